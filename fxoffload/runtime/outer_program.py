"""Outer graphs, ready to run: they call segments and run the ``fxoffload`` ops between them.

An outer graph is compiled once into a list of steps on numbered slots. Each step knows which slots nothing reads after
it, and empties them before it calls out: a segment that is handed the only reference to an input can free it early.
Each call (``OuterCall``) chooses which values to keep and which to offload; the same steps serve all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from fxoffload import ops
from fxoffload.ops import is_op
from fxoffload.runtime.engine import Budgets, CopyEngine
from fxoffload.runtime.layout import layout_of
from fxoffload.runtime.profiler.call_recorder import Recorder
from fxoffload.runtime.transfer import Group, Slot, Transfer, Watch, make_token, slot_of
from fxoffload.step.choice import Windows
from fxoffload.step.offload_candidate import OffloadCandidate
from fxoffload.torch_private.profiler import profiled


@dataclass(frozen=True)
class RuntimeOptions:
    """Options of the executor. Budgets in bytes."""

    budgets: Budgets
    min_bytes: int
    prefetch: bool = True
    across_graphs: bool = True


@dataclass
class OuterCall:
    """One run of an outer graph: the state that its steps share."""

    engine: CopyEngine
    options: RuntimeOptions
    group: Group
    decisions: Sequence[bool] = ()
    transfers: dict[int, Transfer] = field(default_factory=dict)  # Slot of a copy -> its transfer.
    largest_offload: int = 0  # Most bytes that one segment of this forward moved so far.
    before_layers: int = 0  # Bytes moved before any layer did: no window is known yet.
    window: int = 0  # Bytes that this backward reloads ahead unless a budget is set.
    windows: Windows | None = None  # Of a plan.
    watches: Mapping[int, Watch] = field(default_factory=dict)  # Storages of inputs that are not waited for.
    recorder: Recorder | None = None  # of a call that is measured
    has_tokens: bool = True  # whether this backward was given any

    def in_flight_bytes(self, behind: int) -> int:
        """The bound on sources held for copies that are under way. ``behind``: how many segments have run."""
        if self.windows is not None:
            return self.windows.in_flight[behind]
        budget = self.options.budgets.in_flight
        return (self.largest_offload or self.before_layers) if budget is None else budget

    def prefetch_bytes(self, point: int) -> int:
        """The bound on bytes that are reloaded ahead of use. ``point``: as in ``Windows.ahead``."""
        if self.windows is not None:
            return self.windows.ahead[point]
        budget = self.options.budgets.prefetch
        return self.window if budget is None else budget

    @property
    def reclaimed_share(self) -> int:
        """How reclaimed bytes change the prefetch budget (see ``CopyEngine.prefetch``).

        A budget that the user set stands as it is, and a plan's holds them too. The default one grows by them.
        """
        if self.windows is not None:
            return -1
        if self.options.budgets.prefetch is not None:
            return 0
        return 1


_Step = Callable[[list[Any], OuterCall], None]


class _Steps:
    """Turns an outer graph into steps."""

    def __init__(self, outer: fx.GraphModule) -> None:
        self.outer = outer
        self.slots: dict[fx.Node, int] = {}
        self.constants: dict[int, Any] = {}
        self.steps: list[tuple[_Step, tuple[int, ...]]] = []
        self.num_segments = 0  # seen so far
        self.prefetch_point = 1 + len(outer.graph.find_nodes(op="call_module"))
        self.prefetch_point -= sum(is_op(n, ops.prefetch) for n in outer.graph.nodes)
        self.last_use = _last_uses(outer.graph)

    def slot(self, node: fx.Node) -> int:
        return self.slots.setdefault(node, len(self.slots))

    def slots_of(self, nodes: Sequence[Any]) -> tuple[int, ...]:
        return tuple(self.slot(n) for n in nodes)

    def unpacked(self, node: fx.Node, count: int) -> list[int]:
        """Slots of the getitems of a packed result; -1 for results that nothing takes."""
        found = [-1] * count
        for user in node.users:
            if user.target is operator.getitem:
                found[user.args[1]] = self.slot(user)  # type: ignore[index]
        return found

    def dead_after(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self.slot(n) for n in self.last_use.get(node, ()))


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the values that nothing reads after it. Getitems read nothing: their values are stored when made."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        readers = [u for u in node.users if u.target is not operator.getitem]
        # Packed values live in their getitems; a reload's request has no value of its own.
        if node.op == "call_module" or is_op(node, ops.reload) or is_op(node, ops.wait_reload):
            continue
        if readers:
            last.setdefault(max(readers, key=lambda u: order[u]), []).append(node)
    return last


class OuterProgram:
    """An outer graph, ready to run.

    Args:
        outer: the graph, verified; its segments are compiled.
        offload_candidates: the forward's storages in the order of its offload ops; empty for a backward.
        copies: position of a placeholder -> name, for the placeholders of a backward that may hold tokens.
        device: the device that values leave and return to.
        overwritten: positions of placeholders that some segment may overwrite (donated).
    """

    def __init__(
        self,
        outer: fx.GraphModule,
        *,
        device: torch.device,
        options: RuntimeOptions,
        offload_candidates: Sequence[OffloadCandidate] = (),
        copies: Mapping[int, str] | None = None,
        overwritten: Sequence[int] = (),
    ) -> None:
        self.device = device
        self.options = options
        self.offload_candidates = tuple(offload_candidates)
        self.copies = None if copies is None else dict(copies)
        self.overwritten = tuple(overwritten)
        self._candidate_at = 0
        self._build(_Steps(outer))

    def _build(self, steps: _Steps) -> None:
        graph = steps.outer.graph
        placeholders = graph.find_nodes(op="placeholder")
        # Of a backward: saved values that hooks may have handed back in another layout.
        saved = placeholders if self.copies is not None else ()
        self.layouts = {i: found for i, n in enumerate(saved) if (found := layout_of(n)) is not None}
        steps.slots_of(placeholders)
        self._num_inputs = len(placeholders)
        for node in graph.nodes:
            step = self._step(node, steps)
            if step is not None:
                steps.steps.append((step, steps.dead_after(node)))
        self._steps = steps.steps
        self._constants = steps.constants
        self._num_slots = len(steps.slots)
        (values,) = graph.output_node().args
        self._outputs = [(steps.slot(v), None) if isinstance(v, fx.Node) else (-1, v) for v in values]  # type: ignore[union-attr]

    def _step(self, node: fx.Node, steps: _Steps) -> _Step | None:
        if node.op == "get_attr":
            steps.constants[steps.slot(node)] = operator.attrgetter(str(node.target))(steps.outer)
            return None
        if node.op == "call_module":
            steps.num_segments += 1
            return _segment_step(node, steps)
        if is_op(node, ops.offload):
            return self._offload_step(node, steps)
        if is_op(node, ops.release):
            # With copies, from a forward: to the budget. Without, from a backward: everything.
            everything, behind = not node.args[0], steps.num_segments
            return lambda slots, call: call.engine.release(0 if everything else call.in_flight_bytes(behind))
        if is_op(node, ops.wait_offload):
            copies = steps.slots_of(node.args[0])  # type: ignore[arg-type]
            return lambda slots, call: call.engine.wait_offload(_distinct(call.transfers.get(i) for i in copies))
        if is_op(node, ops.prefetch):
            point = steps.prefetch_point
            steps.prefetch_point += 1
            return lambda slots, call: call.engine.prefetch(
                call.prefetch_bytes(point),
                reclaimed_share=call.reclaimed_share,
                at_least_one=call.windows is None,
            )
        if is_op(node, ops.wait_reload):
            return _wait_reload_step(node, steps)
        return None

    def _offload_step(self, node: fx.Node, steps: _Steps) -> _Step:
        sources = steps.slots_of(node.args[0])  # type: ignore[arg-type]
        targets = steps.unpacked(node, len(sources))
        first, end = self._candidate_at, self._candidate_at
        taken = 0
        while taken < len(sources):
            taken += self.offload_candidates[end].sources
            end += 1
        self._candidate_at = end
        offload_candidates = list(enumerate(self.offload_candidates))[first:end]
        pairs = list(zip(targets, sources, strict=True))
        has_unread = any(m.unread for _, m in offload_candidates)

        def offload(slots: list[Any], call: OuterCall) -> None:
            if not has_unread and not any(call.decisions[first:end]):
                for target, source in pairs:
                    slots[target] = slots[source]
                return
            at = 0
            moved: list[tuple[OffloadCandidate, list[int], list[Tensor]]] = []
            for index, candidate in offload_candidates:
                mine = range(at, at + candidate.sources)
                at += candidate.sources
                for i in mine:
                    slots[targets[i]] = slots[sources[i]].new_empty(0) if candidate.unread else slots[sources[i]]
                if candidate.unread:
                    continue
                if not call.decisions[index]:
                    continue
                found = _by_storage(slots, [targets[i] for i in mine], call.options.min_bytes, call.engine.device)
                moved.extend((candidate, *group) for group in found)
            if moved:
                _offload_storages(slots, moved, call)

        return offload

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, args: list[Any], call: OuterCall) -> list[Any]:
        """Run on ``args``, which is cleared."""
        slots: list[Any] = [None] * self._num_slots
        slots[: self._num_inputs] = args
        args.clear()
        for i, value in self._constants.items():
            slots[i] = value
        for step, dead in self._steps:
            step(slots, call)
            for i in dead:
                slots[i] = None
        return [slots[i] if i >= 0 else value for i, value in self._outputs]


def _segment_step(node: fx.Node, steps: _Steps) -> _Step:
    fn = steps.outer.get_submodule(str(node.target)).fn  # type: ignore[union-attr]
    inputs = steps.slots_of(node.args)
    outputs = [i for i in steps.unpacked(node, max((u.args[1] for u in node.users), default=-1) + 1)]  # type: ignore[type-var,operator]
    dead = steps.dead_after(node)
    segment = str(node.target)
    name = f"fxoffload::{segment}"

    def call_segment(slots: list[Any], call: OuterCall) -> None:
        values = [slots[i] for i in inputs]
        for i in dead:
            slots[i] = None
        recorder = call.recorder
        if recorder is not None:
            recorder.before(segment)
        with profiled(name):
            results = fn(values)  # type: ignore[misc]
        if recorder is not None:
            recorder.after(segment)
        for i, value in zip(outputs, results, strict=False):
            if i >= 0:
                slots[i] = value

    return call_segment


def _wait_reload_step(node: fx.Node, steps: _Steps) -> _Step:
    request = node.args[0]
    assert isinstance(request, fx.Node)
    names = [n.name for n in request.args[0]]  # type: ignore[union-attr]
    copies = steps.slots_of(request.args[0])  # type: ignore[arg-type]
    targets = steps.unpacked(node, len(copies))
    pairs = list(zip(targets, copies, strict=True))

    def wait_reload(slots: list[Any], call: OuterCall) -> None:
        if not call.has_tokens:
            for target, copy in pairs:
                slots[target], slots[copy] = slots[copy], None
            return
        values = [slots[i] for i in copies]
        for i in copies:
            slots[i] = None
        found = [slot_of(v, name) for v, name in zip(values, names, strict=True)]
        transfers = _distinct(s.transfer for s in found if s is not None)
        buffers = dict(zip(transfers, call.engine.take(transfers), strict=True)) if transfers else {}
        for i, value, slot in zip(targets, values, found, strict=True):
            slots[i] = value if slot is None else slot.view.on(buffers[slot.transfer])

    return wait_reload


def _distinct(transfers: Any) -> list[Transfer]:
    return list(dict.fromkeys(t for t in transfers if t is not None))


def _by_storage(
    slots: list[Any], where: list[int], min_bytes: int, device: torch.device
) -> list[tuple[list[int], list[Tensor]]]:
    """Slots and tensors of each storage of ``device`` that is large enough to move. Values that share memory at trace
    time share it at run time too, unless Inductor chose to copy.

    A value may be on another device than its trace says: attention without dropout returns its seed and offset on the
    host, and fake tensors of them are on the GPU.
    """
    if len(where) == 1:  # mostly
        value = slots[where[0]]
        is_large = value.nbytes >= max(min_bytes, 1) and value.device == device
        return [(where, [value])] if is_large else []
    groups: dict[int, tuple[list[int], list[Tensor]]] = {}
    for i in where:
        found = groups.setdefault(slots[i].untyped_storage()._cdata, ([], []))
        found[0].append(i)
        found[1].append(slots[i])
    return [
        group
        for group in groups.values()
        if sum(t.nbytes for t in group[1]) >= max(min_bytes, 1) and group[1][0].device == device
    ]


def _offload_storages(
    slots: list[Any], moved: list[tuple[OffloadCandidate, list[int], list[Tensor]]], call: OuterCall
) -> None:
    """Start the copies; put tokens where the values were, except where the host is full."""
    are_inputs = any(candidate.is_input for candidate, _, _ in moved)
    transfers = call.engine.offload(
        [t for _, _, t in moved],
        call.options.budgets,
        reclaimable=not are_inputs,
        watches=[call.watches.get(t[0].untyped_storage()._cdata) if m.is_input else None for m, _, t in moved],
    )
    paced = sum(t.nbytes for (m, _, _), t in zip(moved, transfers, strict=True) if t is not None and m.paces_forward)
    call.largest_offload = max(call.largest_offload, paced)
    if not call.largest_offload:
        call.before_layers += sum(t.nbytes for t in transfers if t is not None)
    for (candidate, where, _), transfer in zip(moved, transfers, strict=True):
        if transfer is None:
            continue
        call.group.add(candidate.rank, transfer, sets_window=candidate.paces_backward)
        for i, view in zip(where, transfer.views, strict=True):
            slots[i] = make_token(Slot(call.group, transfer, view))
            call.transfers[i] = transfer
