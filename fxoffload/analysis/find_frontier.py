"""Pass on the joint graph, before it is partitioned: the recompute choices of each layer, and their costs.

For one layer of each class of equal layers, from least to most recomputation::

    saved     recomputed                                       extra      (a layer of Qwen3-8B, 16k tokens, H200)
    2.25 GB   casts, and what fuses anyway                      0.0 ms
    1.42 GB   norms, rotary embedding, silu * up                0.4 ms
    1.01 GB   the same, and the gate projection                 2.6 ms
    0.14 GB   everything but the layer's input                 11.0 ms

A value that the backward needs is *saved*, or *recomputed* from values that are saved or recomputed themselves. For
one exchange rate between bytes and milliseconds the best choice is a minimum cut::

    source --ms--> op --bytes--> value --never--> op that reads it
                                 value --never--> sink, where the backward reads it

All nodes on the sink's side are there in the backward. An op on that side is recomputed; a value on that side is saved
if its op is not. Saving takes time too where it makes a fused kernel write a value that would stay in registers.
``min_cut`` finds the choice for every rate that makes a difference, from prices op by op. The points then carry the
estimated time of the layer's whole forward and backward. Views cost nothing and are never saved themselves: their base
is. Values from outside the layer are saved; parameters are there in any case. One layer is never recomputed for the
sake of another.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from fxoffload.analysis.estimate_costs import Rates, estimate_segment
from fxoffload.analysis.layer_classes import Joint, Layer, layout_bytes
from fxoffload.analysis.min_cut import SINK, SOURCE, Network
from fxoffload.analysis.op_costs import fused_form, runs_alone, tensors_of
from fxoffload.analysis.recompute_rules import OFFLOADED, RECOMPUTED, SAVED, may_recompute, overwritten_inputs

# Prices are whole numbers: femtoseconds, and thousandths of a byte (a value that three layers read costs each a third).
_PER_MS, _PER_BYTE = 10**12, 1000
# A pointwise op whose result stays in registers costs next to nothing; bytes read and written decide elsewhere.
_IN_REGISTERS = 0.05
# Projections often cost exactly the same for each byte. Then all of them are one step of the frontier: the later ones
# are made this much dearer, so that each is a step of its own.
_TIE_BREAK = 1e-3


@dataclass(frozen=True)
class SavedStorage:
    """One storage that a layer saves.

    Attributes:
        position: of the value in the representative layer; see ``LayerClass.name_at``. -1 - k: it comes from outside
            the layer.
        nbytes: all of it.
        num_layers: how many layers take it from outside (1 for a layer's own): it takes memory once.
    """

    position: int
    nbytes: int
    num_layers: int = 1


@dataclass(frozen=True)
class RecomputePoint:
    """One way to split the values that the backward of a layer needs into saved and computed.

    Attributes:
        recomputed: positions of everything that the backward computes without an incoming gradient: ops of the forward
            once more, views of saved values, and ops that only the backward has.
        saved: storages that it takes from the forward.
        extra_ms: how much longer the layer's forward and backward take than under the first point of the frontier.
        extra_bytes: the most that their results add to the backward's working set at once.
    """

    recomputed: frozenset[int]
    saved: tuple[SavedStorage, ...]
    extra_ms: float
    extra_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that the layer saves; of a storage saved for several layers, its share."""
        return sum(s.nbytes // s.num_layers for s in self.saved)


@dataclass(frozen=True)
class LayerClass:
    """Layers of the same structure.

    Attributes:
        layers: their labels, in graph order. The first is the representative.
        points: from least to most recomputation; each saves less and takes longer than the one before.
        must_offload: positions of values that a user's policy wants on the host (they are saved in every point).
        names: label -> names of the layer's nodes, by position.
        outside_names: label -> names of the values that it takes from outside, by -1 - position.
    """

    layers: tuple[str, ...]
    points: tuple[RecomputePoint, ...]
    must_offload: tuple[int, ...]
    names: Mapping[str, tuple[str, ...]]
    outside_names: Mapping[str, tuple[str, ...]]

    def name_at(self, label: str, position: int) -> str:
        """Name of the joint graph's node at a position of the layer ``label``."""
        return self.names[label][position] if position >= 0 else self.outside_names[label][-1 - position]


class FindFrontier:
    """One ``LayerClass`` for each structure, in order of the first layer. See the module docstring.

    Args:
        num_forward_outputs: leading outputs of the joint graph that are the forward's.
        static_inputs: indices of the placeholders that are parameters or buffers.
    """

    def __init__(
        self,
        rates: Rates,
        *,
        num_forward_outputs: int | None = None,
        static_inputs: Collection[int] = (),
    ) -> None:
        self.rates = rates
        self.num_forward_outputs = num_forward_outputs
        self.static_inputs = frozenset(static_inputs)

    def __call__(self, gm: fx.GraphModule) -> tuple[LayerClass, ...]:
        joint = Joint(gm, self.num_forward_outputs, self.static_inputs)
        overwritten = overwritten_inputs(gm.graph)
        alike: dict[object, list[Layer]] = defaultdict(list)
        for layer in joint.layers.values():
            alike[layer.key].append(layer)
        return tuple(self._solve(joint, layers, overwritten) for layers in alike.values())

    def _solve(self, joint: Joint, layers: list[Layer], overwritten: set[fx.Node]) -> LayerClass:
        problem = _Problem(joint, layers[0], self.rates, overwritten)
        points = [problem.point(cut.behind) for cut in problem.network.best_cuts()]
        return LayerClass(
            layers=tuple(layer.label for layer in layers),
            points=_undominated(points),
            must_offload=problem.must_offload,
            names={layer.label: tuple(n.name for n in layer.nodes) for layer in layers},
            outside_names={layer.label: tuple(joint.base[v].name for v in layer.outside) for layer in layers},
        )


def _undominated(points: Sequence[RecomputePoint]) -> tuple[RecomputePoint, ...]:
    """The points that no other one beats in both time and bytes, fastest first; times from the fastest one's."""
    found: list[RecomputePoint] = []
    for point in sorted(points, key=lambda p: (p.extra_ms, p.nbytes)):
        if not found or point.nbytes < found[-1].nbytes:
            found.append(point)
    return tuple(replace(p, extra_ms=p.extra_ms - found[0].extra_ms) for p in found)


class _Problem:
    """The network of one layer, and the meaning of a cut."""

    def __init__(self, joint: Joint, layer: Layer, rates: Rates, overwritten: set[fx.Node]) -> None:
        self._joint = joint
        self._layer = layer
        self._rates = rates
        self._overwritten = overwritten
        self._own = [n for n in layer.nodes if layer.place.get(n, -1) >= 0]
        self._readers = {n: r for n in self._own if (r := joint.backward_readers(n, layer))}
        self._all_readers = {r for readers in self._readers.values() for r in readers}
        self._op: dict[fx.Node, int] = {}  # op -> its node of the network
        self._value: dict[fx.Node, int] = {}  # base -> its node of the network
        self.network = Network()
        self.must_offload = tuple(layer.place[n] for n in self._own if n.meta.get("recompute") in OFFLOADED)
        self._add_outside()
        self._add_ops()
        for node in self._readers:
            self._needs(node, SINK)

    # -- the network ---------------------------------------------------------------------------------------------------

    def _add_outside(self) -> None:
        joint, layer = self._joint, self._layer
        self._read_from_outside: list[fx.Node] = []
        for base in dict.fromkeys(joint.base[v] for v in layer.outside):
            if layer.place.get(base, -1) >= 0 or not joint.costs_memory(base):
                continue
            price = layout_bytes(base) * _PER_BYTE // joint.num_reading[base]
            self._value[base] = self.network.node()
            self.network.edge(SOURCE, self._value[base], (0, price))
            if joint.backward_readers_of_outside(base, layer):
                self._read_from_outside.append(base)
                self.network.edge(self._value[base], SINK)

    def _add_ops(self) -> None:
        ops = [n for n in self._own if self._is_op(n)]
        for i, op in enumerate(ops):
            self._op[op] = self.network.node()
            if op not in self._joint.forward:
                continue  # the backward computes it in any case
            if self._is_saved(op):
                self.network.edge(SOURCE, self._op[op])
            else:
                dearer = 1.0 + _TIE_BREAK * i / len(ops) if runs_alone(op) else 1.0
                price = max(1, round(self._op_ms(op) * dearer * _PER_MS))
                self.network.edge(SOURCE, self._op[op], (price, 0))
        for base in (n for n in self._own if not self._joint.is_view(n) and tensors_of(n)):
            op = self._joint.maker(base)
            if isinstance(base.meta.get("val"), torch.Tensor) and op in self._op:
                savable = op in self._joint.forward and (self._is_saved(op) or not self._is_forced(op))
                self._value[base] = self.network.node()
                price = (round(self._save_ms(base) * _PER_MS), layout_bytes(base) * _PER_BYTE) if savable else None
                self.network.edge(self._op[op], self._value[base], price)
        for op in ops:
            for value in self._joint.inputs[op]:
                self._needs(value, self._op[op])

    def _needs(self, node: fx.Node, reader: int) -> None:
        """``reader`` on the sink's side wants the memory that ``node`` shows there too."""
        base = self._joint.base[node]
        if base in self._value:
            self.network.edge(self._value[base], reader)
        elif base in self._op:  # all items of an op at once
            self.network.edge(self._op[base], reader)

    def _is_op(self, node: fx.Node) -> bool:
        return not self._joint.is_view(node) and self._joint.maker(node) is node and bool(tensors_of(node))

    def _is_forced(self, op: fx.Node) -> bool:
        return op.meta.get("recompute") in RECOMPUTED

    def _is_saved(self, op: fx.Node) -> bool:
        """Whether ``op`` must not run again."""
        values = [
            op,
            *(u for u in self._joint.users[op] if not self._joint.is_view(u) and u.target is operator.getitem),
        ]
        if op.meta.get("recompute") in SAVED or any(self._joint.leaves(v, self._layer) for v in values):
            return True
        return not self._is_forced(op) and not may_recompute(op, self._overwritten)

    def _op_ms(self, op: fx.Node) -> float:
        """Time to recompute ``op``. A fused op costs only the bytes that it writes or reduces."""
        if runs_alone(op):
            return estimate_segment([op], self._rates)
        written = self._rates.memory_ms(layout_bytes(op))
        if fused_form(op) == "reduction":
            return written + self._rates.memory_ms(sum(layout_bytes(i) for i in self._joint.inputs[op]))
        return written if self._is_written(op) else _IN_REGISTERS * written

    def _save_ms(self, base: fx.Node) -> float:
        """Time to write a value only because it is saved."""
        joint = self._joint
        if runs_alone(joint.maker(base)) or fused_form(base) == "reduction" or joint.leaves(base, self._layer):
            return 0.0
        return 0.0 if self._is_written(base, joint.forward) else self._rates.memory_ms(layout_bytes(base))

    def _is_written(self, node: fx.Node, within: Collection[fx.Node] | None = None) -> bool:
        """Whether a kernel of its own reads ``node`` (of ``within``, if given), so that fusion does not spare writing
        it."""
        users = [u for u in self._joint.users[node] if within is None or u in within]
        return any(self._is_written(u, within) if self._joint.is_view(u) else runs_alone(u) for u in users)

    # -- the meaning of a cut ------------------------------------------------------------------------------------------

    def point(self, behind: Collection[int]) -> RecomputePoint:
        """``behind``: the sink's side."""
        joint, place = self._joint, self._layer.place
        computed: set[fx.Node] = set()
        saved: dict[fx.Node, None] = dict.fromkeys(self._read_from_outside)
        wanted = list(self._readers)
        while wanted:
            node = wanted.pop()
            if node in computed or node in saved or not tensors_of(node):
                continue
            own = place.get(node, -1) >= 0
            if own and not joint.is_view(node) and self._op[joint.maker(node)] not in behind:
                saved[node] = None
            elif own:
                computed.add(node)
                wanted += joint.inputs[node]
            elif (base := joint.base[node]) in self._value:
                saved[base] = None
        return RecomputePoint(
            frozenset(place[n] for n in computed),
            tuple(self._saved_storages(saved)),
            self._forward_ms(saved) + self._backward_ms(computed),
            self._peak_bytes(computed),
        )

    def _saved_storages(self, saved: Collection[fx.Node]) -> list[SavedStorage]:
        place = self._layer.place
        outside = {self._joint.base[v]: -1 - k for k, v in reversed(list(enumerate(self._layer.outside)))}
        found = []
        for base in saved:
            own = place.get(base, -1) >= 0
            position = place[base] if own else outside[base]
            num_layers = 1 if own else self._joint.num_reading[base]
            found.append(SavedStorage(position, layout_bytes(base), num_layers))
        return sorted(found, key=lambda s: s.position)

    def _forward_ms(self, saved: Collection[fx.Node]) -> float:
        """Time of the layer's forward, writes of ``saved`` values included."""
        joint, place = self._joint, self._layer.place
        nodes = [n for n in self._own if n in joint.forward]
        leaving = [n for n in nodes if any(place.get(u, -1) < 0 for u in joint.users[n] if u in joint.forward)]
        returned = [n for n in nodes if n in joint.returned]
        return self._ms(nodes, [*leaving, *returned, *(n for n in saved if place.get(n, -1) >= 0)])

    def _backward_ms(self, computed: Collection[fx.Node]) -> float:
        """Time of the layer's backward."""
        joint = self._joint
        ops = [n for n in self._sorted({*joint.backward[self._layer.label], *self._all_readers}) if n.op != "output"]
        inside = {*computed, *ops}
        leaving = [n for n in ops if n in joint.returned or not inside.issuperset(joint.users[n])]
        return self._ms([*self._sorted(computed), *ops], leaving)

    def _ms(self, nodes: Sequence[fx.Node], returned: Sequence[fx.Node]) -> float:
        """Time of ``nodes`` in a graph of their own."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}

        def place(node: fx.Node) -> fx.Node:
            node = self._joint.merged[node]
            if node not in copies:
                copies[node] = graph.placeholder(node.name)
                copies[node].meta = node.meta
            return copies[node]

        for node in nodes:
            copies[node] = graph.node_copy(node, place)
        ops = [copies[n] for n in nodes]
        graph.output(tuple(map(place, returned)))
        return estimate_segment(ops, self._rates)

    def _sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self._joint.order.__getitem__)

    def _peak_bytes(self, computed: Collection[fx.Node]) -> int:
        """The most bytes at once of recomputed values in memory, each computed just before its first reader."""
        joint = self._joint
        inside = set(computed)
        schedule: dict[fx.Node, None] = {}
        for reader in self._sorted(self._all_readers):
            cone, found = [reader], {reader}
            for node in cone:
                fresh = [i for i in joint.inputs[node] if i in inside and i not in schedule and i not in found]
                found.update(fresh)
                cone += fresh
            schedule |= dict.fromkeys(self._sorted(found))
        last = {joint.base[i]: node for node in schedule for i in joint.inputs[node]}
        dying: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for base, node in last.items():
            dying[node].append(base)
        live: dict[fx.Node, int] = {}
        peak = 0
        for node in schedule:
            if (
                node in inside
                and node in joint.forward
                and not joint.is_view(node)
                and self._is_materialised(node, schedule)
            ):
                live[node] = layout_bytes(node)
                peak = max(peak, sum(live.values()))
            for base in dying[node]:
                live.pop(base, None)
        return peak

    def _is_materialised(self, node: fx.Node, readers: Collection[fx.Node]) -> bool:
        """Whether a value that is recomputed for ``readers`` is written to memory."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        if runs_alone(self._joint.maker(node)) or fused_form(node) == "reduction":
            return True
        return self._is_written(node, readers)
