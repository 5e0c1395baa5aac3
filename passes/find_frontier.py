"""Pass on the joint graph, before it is partitioned: what can each layer save less of, and what does that cost?

For one layer of each class of equal layers, from least to most recomputation::

    saved     recomputed                                       extra      (a layer of Qwen3-8B, 16k tokens, H200)
    1.42 GB   norms, rotary embedding, silu * up                0.5 ms
    1.01 GB   the same, and the gate projection                 2.9 ms
    0.14 GB   everything but the layer's input                 11.3 ms

A value that the backward needs is *saved*, or *computed again* from values that are saved or computed again
themselves. For one exchange rate between bytes and milliseconds the best choice is a minimum cut::

    source --ms--> op --bytes--> value --never--> op that reads it
                                 value --never--> sink, where the backward reads it

What lies on the sink's side is there in the backward: an op there is computed again, a value there whose op is not is
saved. ``min_cut`` finds the choice for every rate that makes a difference. Views cost nothing and are never what is
saved: their base is. Values from outside the layer are saved or, parameters, there in any case: a layer is never
computed again for the sake of another one.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from fxoffload.passes.estimate_costs import Rates, recompute_ms
from fxoffload.passes.layer_classes import Joint, Layer, layout_bytes
from fxoffload.passes.min_cut import SINK, SOURCE, Network
from fxoffload.passes.op_costs import fused_form, node_kind, tensors_of
from fxoffload.passes.tag_recompute import OFFLOADED, RECOMPUTED, SAVED, may_recompute, overwritten_inputs

# Prices are whole numbers: femtoseconds, and thousandths of a byte (a value that three layers read costs each a third).
_PER_MS, _PER_BYTE = 10**12, 1000
# A pointwise op whose result stays in registers costs next to nothing; what it reads and writes decides elsewhere.
_IN_REGISTERS = 0.05
# Projections often cost exactly the same for each byte. Then all of them are one step of the frontier: the later ones
# are made this much dearer, so that each is a step of its own.
_TIE_BREAK = 1e-3


@dataclass(frozen=True)
class SavedStorage:
    """One storage that a layer saves.

    Attributes:
        name: of the value in the representative layer.
        position: of the value; see ``LayerClass.name_at``. -1 - k: it comes from outside the layer.
        nbytes: all of it.
        num_layers: how many layers take it from outside (1 for a layer's own): it takes memory once.
    """

    name: str
    position: int
    nbytes: int
    num_layers: int = 1


@dataclass(frozen=True)
class RecomputePoint:
    """One way to split what the backward of a layer needs into saved and computed.

    Attributes:
        recomputed: positions of everything that the backward computes without an incoming gradient: ops of the forward
            again, views of what is saved, and ops that only the backward has.
        saved: what it takes from the forward.
        extra_ms: time of the forward's ops that run again.
        extra_bytes: the most that their results add to the backward's working set at once.
    """

    recomputed: frozenset[int]
    saved: tuple[SavedStorage, ...]
    extra_ms: float
    extra_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that the layer saves; its share of what it saves together with other layers."""
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

    def saved_names(self, label: str, point: RecomputePoint) -> dict[str, int]:
        """Name of each value that the layer ``label`` saves under ``point`` -> bytes."""
        return {self.name_at(label, s.position): s.nbytes for s in point.saved}


class FindFrontier:
    """One ``LayerClass`` for each structure, in order of the first layer. See the module docstring.

    Args:
        rates: how fast the machine is.
        num_forward_outputs: leading outputs of the joint graph that are the forward's.
        static_inputs: indices of the placeholders that are parameters or buffers.
        max_points: bound of the points of one class.
    """

    name = "find_frontier"

    def __init__(
        self,
        rates: Rates,
        *,
        num_forward_outputs: int | None = None,
        static_inputs: Collection[int] = (),
        max_points: int = 24,
    ) -> None:
        self.rates = rates
        self.num_forward_outputs = num_forward_outputs
        self.static_inputs = frozenset(static_inputs)
        self.max_points = max_points

    def __call__(self, gm: fx.GraphModule) -> tuple[LayerClass, ...]:
        joint = Joint(gm, self.num_forward_outputs, self.static_inputs)
        overwritten = overwritten_inputs(gm.graph)
        alike: dict[object, list[Layer]] = defaultdict(list)
        for layer in joint.layers.values():
            alike[layer.key].append(layer)
        return tuple(self._solve(joint, layers, overwritten) for layers in alike.values())

    def _solve(self, joint: Joint, layers: list[Layer], overwritten: set[fx.Node]) -> LayerClass:
        problem = _Problem(joint, layers[0], self.rates, overwritten)
        points = [problem.point(cut.behind) for cut in problem.network.best_cuts(self.max_points)]
        return LayerClass(
            layers=tuple(layer.label for layer in layers),
            points=_undominated(points),
            must_offload=problem.must_offload,
            names={layer.label: tuple(n.name for n in layer.nodes) for layer in layers},
            outside_names={layer.label: tuple(joint.base(v).name for v in layer.outside) for layer in layers},
        )


def _undominated(points: Sequence[RecomputePoint]) -> tuple[RecomputePoint, ...]:
    """The points that no other one beats in both time and bytes, fastest first."""
    found: list[RecomputePoint] = []
    for point in sorted(points, key=lambda p: (p.extra_ms, p.nbytes)):
        if not found or point.nbytes < found[-1].nbytes:
            found.append(point)
    return tuple(found)


class _Problem:
    """The network of one layer, and what a cut of it means."""

    def __init__(self, joint: Joint, layer: Layer, rates: Rates, overwritten: set[fx.Node]) -> None:
        self._joint = joint
        self._layer = layer
        self._rates = rates
        self._overwritten = overwritten
        self._own = [n for n in layer.nodes if layer.place.get(n, -1) >= 0]
        self._readers = {n: r for n in self._own if (r := joint.backward_readers(n, layer))}
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
        for base in dict.fromkeys(joint.base(v) for v in layer.outside):
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
                dearer = 1.0 if _is_fused(op) else 1.0 + _TIE_BREAK * i / len(ops)
                price = max(1, round(self._op_ms(op) * dearer * _PER_MS))
                self.network.edge(SOURCE, self._op[op], (price, 0))
        for base in (n for n in self._own if not self._joint.is_view(n) and tensors_of(n)):
            op = self._joint.maker(base)
            if isinstance(base.meta.get("val"), torch.Tensor) and op in self._op:
                savable = op in self._joint.forward and (self._is_saved(op) or not self._is_forced(op))
                self._value[base] = self.network.node()
                price = (0, layout_bytes(base) * _PER_BYTE) if savable else None
                self.network.edge(self._op[op], self._value[base], price)
        for op in ops:
            for value in self._joint.inputs(op):
                self._needs(value, self._op[op])

    def _needs(self, node: fx.Node, reader: int) -> None:
        """``reader`` on the sink's side wants the memory that ``node`` shows there too."""
        base = self._joint.base(node)
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
            *(u for u in self._joint.users(op) if not self._joint.is_view(u) and u.target is operator.getitem),
        ]
        if op.meta.get("recompute") in SAVED or any(self._joint.leaves(v, self._layer) for v in values):
            return True
        return not self._is_forced(op) and not may_recompute(op, self._overwritten)

    def _op_ms(self, op: fx.Node) -> float:
        """Time to run ``op`` again: of what is fused, what it has to write, or to reduce."""
        if not _is_fused(op):
            return recompute_ms([op], self._rates)
        written = self._rates.memory_ms(layout_bytes(op))
        if fused_form(op) == "reduction":
            return written + self._rates.memory_ms(sum(layout_bytes(i) for i in self._joint.inputs(op)))
        return written if self._is_written(op) else _IN_REGISTERS * written

    def _is_written(self, node: fx.Node, within: Collection[fx.Node] | None = None) -> bool:
        """Whether a kernel of its own may read ``node`` in the backward (one of ``within``, or one that only the
        backward has), so that fusion does not spare writing it."""
        users = [u for u in self._joint.users(node) if within is None or u in within or u in self._joint.behind]
        return any(self._is_written(u, within) if self._joint.is_view(u) else not _is_fused(u) for u in users)

    # -- what a cut means ----------------------------------------------------------------------------------------------

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
                wanted += joint.inputs(node)
            elif (base := joint.base(node)) in self._value:
                saved[base] = None
        again = [n for n in self._own if n in computed and n in joint.forward]
        extra_ms, extra_bytes = self._cost(again, [n for n in self._own if n in computed])
        return RecomputePoint(
            frozenset(place[n] for n in computed), tuple(self._saved_storages(saved)), extra_ms, extra_bytes
        )

    def _saved_storages(self, saved: Collection[fx.Node]) -> list[SavedStorage]:
        place = self._layer.place
        outside = {self._joint.base(v): -1 - k for k, v in reversed(list(enumerate(self._layer.outside)))}
        found = []
        for base in saved:
            own = place.get(base, -1) >= 0
            position = place[base] if own else outside[base]
            num_layers = 1 if own else self._joint.num_reading[base]
            found.append(SavedStorage(base.name, position, layout_bytes(base), num_layers))
        return sorted(found, key=lambda s: s.position)

    def _cost(self, again: list[fx.Node], computed: list[fx.Node]) -> tuple[float, int]:
        """Time of ``again``, and the most bytes of its results at once, in a graph of what the backward has of them."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}

        def place(node: fx.Node) -> fx.Node:
            node = self._joint.merged(node)
            if node not in copies:
                copies[node] = graph.placeholder(node.name)
                copies[node].meta = node.meta
            return copies[node]

        readers = sorted({r for n in computed for r in self._readers.get(n, ())}, key=self._joint.order.__getitem__)
        for node in (*computed, *readers):
            if node.op == "output":
                graph.output(tuple(map(place, node.all_input_nodes)))
            else:
                copies[node] = graph.node_copy(node, place)
        extra_ms = recompute_ms([copies[n] for n in again], self._rates) if again else 0.0
        return extra_ms, self._peak_bytes(again, computed, readers)

    def _peak_bytes(self, again: list[fx.Node], computed: list[fx.Node], readers: list[fx.Node]) -> int:
        """The most bytes at once of what ``again`` writes to memory, each computed just before its first reader."""
        joint = self._joint
        inside: set[fx.Node] = set(computed)
        schedule: dict[fx.Node, None] = {}
        for reader in readers:
            cone, found = [reader], {reader}
            for node in cone:
                fresh = [i for i in joint.inputs(node) if i in inside and i not in schedule and i not in found]
                found.update(fresh)
                cone += fresh
            schedule |= dict.fromkeys(sorted(found, key=joint.order.__getitem__))
        last = {joint.base(i): node for node in schedule for i in joint.inputs(node)}
        dying: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for base, node in last.items():
            dying[node].append(base)
        live: dict[fx.Node, int] = {}
        peak, results = 0, set(again)
        for node in schedule:
            if node in results and not joint.is_view(node) and self._is_materialised(node, inside):
                live[node] = layout_bytes(node)
                peak = max(peak, sum(live.values()))
            for base in dying[node]:
                live.pop(base, None)
        return peak

    def _is_materialised(self, node: fx.Node, computed: set[fx.Node]) -> bool:
        """Whether a value that is computed again is written to memory."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        if not _is_fused(self._joint.maker(node)) or fused_form(node) == "reduction":
            return True
        return self._is_written(node, computed)


def _is_fused(node: fx.Node) -> bool:
    """Whether ``node`` runs inside another op's kernel, or not at all."""
    return node_kind(node) in ("fused", "view")
