"""A training step, described without its graphs: segments in order, and the storages that they make and read.

Both the outer graphs of a compiled model (``from_graphs``) and a chain made up by hand or by a solver come in this
form. Lifetimes of storages, and where a copy may start, follow from it: ``program`` computes them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from fxoffload import ops
from fxoffload.analysis.labels import CANDIDATES_KEY, STORAGE_KEY
from fxoffload.analysis.values import covered_range, element_bytes, output_values, storage_bytes, tensor_of
from fxoffload.ops import is_op
from fxoffload.step.edges import Edges
from fxoffload.step.offload_candidate import RANGE_ALIGNMENT, OffloadCandidate


@dataclass(frozen=True)
class StorageInfo:
    """Memory that some values of the step share.

    Attributes:
        name: unique in the step.
        nbytes: bytes of the allocation.
        moved_bytes: bytes that a copy of it moves; None where it is no candidate and so stays, 0 for a candidate that
            is too small to move.
        is_input: the caller's, allocated before the step: it takes no bytes of the step, and is never taken back.
        is_tangent: a gradient that the backward is given; there from its beginning on.
        is_left_out: a tangent that does not come: segments are compiled without it, and it takes no memory.
        is_output: the caller of the forward sees it.
        is_gradient: the backward returns it.
        copied_after: the forward segment after which its copy starts, -1 for the entry; None: the last that writes it.
        rank: place in the order of reloads; None: the backward segment that first reads it.
        caller_until: of a candidate that the caller holds too: the forward segment after which the caller may release
            it or write to it. Its copy is waited for there, it takes its bytes until then, and it is never taken back.
            None: for an input, the last segment; all others are held by the graph alone.
        watched: of a caller's: its copy is not waited for, and it is taken back (``Choice.watches``).
        label: of a candidate, its name for people: module path, shape and dtype; "" where unknown.
    """

    name: str
    nbytes: int
    moved_bytes: int | None = None
    is_input: bool = False
    is_tangent: bool = False
    is_left_out: bool = False
    is_output: bool = False
    is_gradient: bool = False
    copied_after: int | None = None
    rank: int | None = None
    caller_until: int | None = None
    watched: bool = False
    label: str = ""


@dataclass(frozen=True)
class SegmentStep:
    """One call of a segment.

    Attributes:
        name: unique in its graph.
        ms: time on the compute stream.
        reads: names of the storages that it reads.
        writes: names of the storages that hold its outputs. The first writer allocates.
        temp_bytes: the most that is allocated inside it above the bytes live when it begins, its outputs included and
            the storages that die inside it deducted; 0 where unknown.
        outside_bytes: the part of them that eager code and FSDP have.
        is_outside: whether no graph runs in it: eager code and FSDP do.
    """

    name: str
    layer: str = ""
    ms: float = 0.0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    temp_bytes: int = 0
    outside_bytes: int = 0
    is_outside: bool = False


@dataclass(frozen=True)
class Take:
    """A wait for a storage that came back: the backward segment after it, and the last segment that reads its result.

    A storage has one, unless two views of it were saved that different segments are the first to read. Each take then
    gets a copy of its own (the first one leaves nothing on the device that the second one could use).
    """

    storage: str
    before: int
    last_reader: int


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """One forward of one graph, and its backward.

    Attributes:
        storages: candidates are decided in this order.
        takes: None: before its first reader, one for each candidate that the backward reads.
        holds_outputs: whether the caller holds the forward's outputs until the step ends, not only until the backward
            begins.
        releases: forward segments that a release follows, -1 for the entry; None: one release follows the last reader
            of each offload op's storages.
        runs: of a step in which forwards begin after backwards: how many forward segments run, then how many backward
            segments, and so on in turn. Each run of backward segments begins with the empty segment of a call. Empty:
            the forward runs, then the backward.
        no_zeros: names of tangents for which plain Inductor makes no zeros while layers run: it breaks the graph.
    """

    storages: tuple[StorageInfo, ...]
    forward: tuple[SegmentStep, ...]
    backward: tuple[SegmentStep, ...]
    takes: tuple[Take, ...] | None = None
    holds_outputs: bool = True
    releases: tuple[int, ...] | None = None
    runs: tuple[tuple[int, int], ...] = ()
    no_zeros: frozenset[str] = frozenset()

    @property
    def ranges(self) -> list[tuple[range, range]]:
        """The segments of each run: forward, then backward."""
        found, down, up = [], 0, 0
        for forward, backward in self.runs or ((len(self.forward), len(self.backward)),):
            found.append((range(down, down + forward), range(up, up + backward)))
            down, up = down + forward, up + backward
        return found

    def with_tangents(self, *, but: Container[str] = ()) -> TrainingStep:
        """All tangents are there, ``but`` those of these names: gradients, or zeros that autograd makes."""
        if not any(s.is_left_out for s in self.storages):
            return self
        return replace(
            self, storages=tuple(replace(s, is_left_out=s.is_left_out and s.name in but) for s in self.storages)
        )

    def with_outputs_held(self) -> TrainingStep:
        """The caller holds the outputs, and gradients come from them. At most: working sets may have counted on
        outputs that die in them."""
        if self.holds_outputs:
            return self.with_tangents()
        last = {name: i for i, segment in enumerate(self.backward) for name in segment.reads}
        more = Counter[int]()
        for storage in self.storages:
            if storage.is_output and storage.name in last:
                more[last[storage.name]] += storage.nbytes
        backward = tuple(replace(s, temp_bytes=s.temp_bytes + more[i]) for i, s in enumerate(self.backward))
        return replace(self.with_tangents(), holds_outputs=True, backward=backward)

    @property
    def candidates(self) -> tuple[StorageInfo, ...]:
        """The storages that may move, in the order of the decisions."""
        return tuple(s for s in self.storages if s.moved_bytes is not None)

    @property
    def compute_ms(self) -> float:
        """Time of all segments."""
        return sum(s.ms for s in (*self.forward, *self.backward))

    def decide(self, by_name: Mapping[str, bool], *, default: bool = False) -> tuple[bool, ...]:
        """One bool per candidate, from names.

        Raises:
            ValueError: a name is no candidate's.
        """
        names = [c.name for c in self.candidates]
        unknown = sorted(set(by_name) - set(names))
        if unknown:
            raise ValueError(f"expected names of candidates, found {', '.join(unknown[:5])}")
        return tuple(by_name.get(name, default) for name in names)


# -- from outer graphs -------------------------------------------------------------------------------------------------


def from_graphs(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    offload_candidates: Sequence[OffloadCandidate],
    *,
    num_user_outputs: int,
    forward_ms: Mapping[str, float] | None = None,
    backward_ms: Mapping[str, float] | None = None,
    forward_temp_bytes: Mapping[str, int] | None = None,
    backward_temp_bytes: Mapping[str, int] | None = None,
    min_bytes: int = 1,
    device: torch.device | None = None,
) -> TrainingStep:
    """The step that two outer graphs describe. Sizes are hints: nothing is guarded on.

    Args:
        offload_candidates: of the executor: one per candidate, in the order of the offload ops, ranked.
        num_user_outputs: leading outputs of the forward that the caller sees.
        forward_ms: segment name -> time; 0 where missing.
        backward_ms: segment name -> time; 0 where missing.
        forward_temp_bytes: segment name -> ``SegmentStep.temp_bytes``.
        backward_temp_bytes: segment name -> ``SegmentStep.temp_bytes``.
        min_bytes: smaller values stay (the option of that name).
        device: values elsewhere take no bytes; None counts all.
    """
    down = _ForwardReader(forward, offload_candidates, num_user_outputs, min_bytes, device)
    up = _BackwardReader(backward, down, device)
    return TrainingStep(
        storages=(*down.storages(), *up.storages()),
        forward=_steps(down.calls, forward_ms, forward_temp_bytes),
        backward=_steps(up.calls, backward_ms, backward_temp_bytes),
        takes=tuple(up.takes),
    )


def edges_of(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    offload_candidates: Sequence[OffloadCandidate],
    *,
    num_user_outputs: int,
    min_bytes: int = 1,
    device: torch.device | None = None,
) -> Edges:
    """The inputs and outputs of the graphs of ``from_graphs``, in the names of its step; arguments as there."""
    down = _ForwardReader(forward, offload_candidates, num_user_outputs, min_bytes, device)
    up = _BackwardReader(backward, down, device)
    made = {s.name for s in (*down.storages(), *up.storages())}

    def known(name: str | None) -> str | None:
        return name if name in made else None

    def given(value: object) -> str | None:
        return value.meta.get(STORAGE_KEY) if isinstance(value, fx.Node) else None

    own = {m.name for m in offload_candidates if not m.is_input and not m.unread}
    results = output_values(forward.graph)
    inputs = forward.graph.find_nodes(op="placeholder")
    tangents = backward.graph.find_nodes(op="placeholder")
    return Edges(
        inputs=tuple(known(down.place.get(n.name)) for n in inputs),
        outputs=tuple(known(down.name(given(v))) for v in results[:num_user_outputs]),
        tangents=tuple(None if n.name in down.place else known(up.name(given(n))) for n in tangents),
        gradients=tuple(known(up.name(given(v))) for v in output_values(backward.graph)),
        saved=tuple(
            i
            for i, v in enumerate(results)
            if i >= num_user_outputs and isinstance(v, fx.Node) and _candidate(v, down) in own
        ),
    )


def _candidate(result: fx.Node, forward: _ForwardReader) -> str | None:
    """The candidate that a copy among the forward's results is of."""
    if result.target is operator.getitem and is_op(result.all_input_nodes[0], ops.offload):
        packed, index = result.args
        return forward.candidate_of.get(packed.args[0][index].name)  # type: ignore[union-attr,index]
    return None


def _steps(
    calls: Sequence[SegmentStep], ms: Mapping[str, float] | None, temp_bytes: Mapping[str, int] | None
) -> tuple[SegmentStep, ...]:
    return tuple(
        replace(c, ms=(ms or {}).get(c.name, 0.0), temp_bytes=(temp_bytes or {}).get(c.name, 0)) for c in calls
    )


class _ForwardReader:
    """Storages and segment calls of an outer forward graph.

    Attributes:
        place: name of a value that the backward may be given -> its storage's name, None for the caller's memory.
        candidate_of: name of a saved value -> its candidate's name.
    """

    def __init__(
        self,
        outer: fx.GraphModule,
        offload_candidates: Sequence[OffloadCandidate],
        num_user_outputs: int,
        min_bytes: int,
        device: torch.device | None,
    ) -> None:
        graph = outer.graph
        self._sizes = _sizes(graph, device)
        self._inputs = {n.meta[STORAGE_KEY] for n in graph.nodes if _is_given(n)}
        self._candidates: dict[str, StorageInfo] = {}  # storage class -> candidate
        self.candidate_of: dict[str, str] = {}
        self._find_candidates(graph, offload_candidates, min_bytes)
        self._outputs = {
            v.meta[STORAGE_KEY]
            for v in output_values(graph)[:num_user_outputs]
            if isinstance(v, fx.Node) and STORAGE_KEY in v.meta
        }
        self.place = {n.name: self.name(n.meta[STORAGE_KEY]) for n in graph.nodes if STORAGE_KEY in n.meta}
        self.place.update(self.candidate_of)
        self.calls = _calls(graph, lambda n: self.name(n.meta.get(STORAGE_KEY)))

    def _find_candidates(self, graph: fx.Graph, offload_candidates: Sequence[OffloadCandidate], min_bytes: int) -> None:
        rest = iter(offload_candidates)
        segment = -1
        for node in graph.nodes:
            segment += node.op == "call_module"
            if not is_op(node, ops.offload):
                continue
            sources = iter(node.args[0])  # type: ignore[arg-type]
            for candidate in node.meta[CANDIDATES_KEY]:
                mine = next(rest)
                values = [next(sources) for _ in candidate.nodes]
                key = values[0].meta[STORAGE_KEY]
                self.candidate_of.update((n.name, candidate.name) for n in candidate.nodes)
                self._candidates[key] = StorageInfo(
                    candidate.name,
                    self._sizes.get(key, 0),
                    moved_bytes=_moved_bytes([v.meta["val"] for v in values], min_bytes),
                    is_input=mine.is_input,
                    copied_after=segment,
                    rank=mine.rank,
                    label=candidate.label,
                )

    def name(self, key: str | None) -> str | None:
        """The storage's name for the class of a value; None for the caller's memory."""
        if key in self._candidates:
            return self._candidates[key].name
        return None if key in self._inputs or key not in self._sizes else key

    def storages(self) -> list[StorageInfo]:
        """Candidates first, in the order of their copies."""
        made = dict.fromkeys(w for c in self.calls for w in c.writes)
        others = [
            StorageInfo(key, nbytes, is_output=key in self._outputs)
            for key, nbytes in self._sizes.items()
            if key not in self._candidates and self.name(key) in made
        ]
        return [*self._candidates.values(), *others]


class _BackwardReader:
    """Storages, segment calls and takes of an outer backward graph."""

    def __init__(self, outer: fx.GraphModule, forward: _ForwardReader, device: torch.device | None) -> None:
        self._graph = outer.graph
        self._sizes = _sizes(outer.graph, device)
        # Storage class -> name in the step; None for the caller's memory.
        self._names: dict[str, str | None] = {}
        self._tangents: dict[str, bool] = {}  # storage class -> whether it is left out
        left_out = _left_out(outer)
        unread: list[str] = []
        for node in outer.graph.nodes:
            if not _is_given(node):
                continue
            key = node.meta[STORAGE_KEY]
            if node.op == "placeholder" and node.name in forward.place:
                name = self._names[key] = forward.place[node.name]
                if name is not None and not node.users and node.name not in forward.candidate_of:
                    unread.append(name)
            elif node.op == "placeholder" and key not in self._names:
                self._tangents[key] = self._tangents.get(key, True) and node in left_out
            else:
                self._names.setdefault(key, None)
        for key in self._sizes:
            self._names.setdefault(key, f"backward/{key}")
        calls = _calls(outer.graph, lambda n: self._names.get(n.meta.get(STORAGE_KEY, "")))
        given = {name for name in forward.place.values() if name is not None}
        # Views of saved values make nothing; a value that no segment reads stays in its slot until the run ends.
        self.calls = [replace(c, writes=tuple(w for w in c.writes if w not in given)) for c in calls]
        if unread and self.calls:
            self.calls[-1] = replace(self.calls[-1], reads=(*self.calls[-1].reads, *unread))
        self.takes = self._find_takes(forward.candidate_of)

    def _find_takes(self, candidate_of: Mapping[str, str]) -> list[Take]:
        calls = self._graph.find_nodes(op="call_module")
        order, end = {n: i for i, n in enumerate(calls)}, len(calls)
        waited: list[tuple[str, fx.Node, int]] = []
        before = 0
        for node in self._graph.nodes:
            if node.op == "call_module":
                before = order[node] + 1
            elif is_op(node, ops.wait_reload):
                request = node.args[0]
                assert isinstance(request, fx.Node)
                copies: Any = request.args[0]
                items = {u.args[1]: u for u in node.users if u.target is operator.getitem}
                waited.extend((candidate_of[c.name], items[i], before) for i, c in enumerate(copies) if i in items)
        handed = {item for _, item, _ in waited}
        derived: dict[str, int] = {}  # storage class -> last reader of the views that segments made of it
        for node in self._graph.nodes:
            if STORAGE_KEY in node.meta and node.op == "call_function" and node not in handed:
                key = node.meta[STORAGE_KEY]
                derived[key] = max(derived.get(key, -1), _last_reader(node, order, end))
        takes: dict[tuple[str, int], int] = {}
        for name, item, at in waited:
            last = max(_last_reader(item, order, end), derived.get(item.meta[STORAGE_KEY], -1))
            takes[name, at] = max(takes.get((name, at), -1), last)
        return [Take(name, at, last) for (name, at), last in takes.items()]

    def name(self, key: str | None) -> str | None:
        """The storage's name for the class of a value; None for the caller's memory."""
        return None if key is None else self._names.get(key)

    def storages(self) -> list[StorageInfo]:
        """The storages that the backward makes, and the tangents."""
        made = {w for c in self.calls for w in c.writes}
        returned = {
            v.meta[STORAGE_KEY] for v in output_values(self._graph) if isinstance(v, fx.Node) and STORAGE_KEY in v.meta
        }
        return [
            StorageInfo(
                name,
                nbytes,
                is_tangent=key in self._tangents,
                is_left_out=self._tangents.get(key, False),
                is_gradient=key in returned and name in made,
            )
            for key, nbytes in self._sizes.items()
            if (name := self._names[key]) is not None and (name in made or key in self._tangents)
        ]


def _left_out(outer: fx.GraphModule) -> set[object]:
    """The tangents that the segments which read them are compiled without."""
    calls = outer.graph.find_nodes(op="call_module")
    return {n.args[i] for n in calls for i in getattr(outer.get_submodule(str(n.target)), "left_out", ())}


def _is_given(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr") and STORAGE_KEY in node.meta


def _sizes(graph: fx.Graph, device: torch.device | None) -> dict[str, int]:
    """Storage class -> bytes of its allocation, for tensors on ``device``."""
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        value = tensor_of(node)
        if value is not None and STORAGE_KEY in node.meta and (device is None or value.device.type == device.type):
            key = node.meta[STORAGE_KEY]
            sizes[key] = max(sizes.get(key, 0), storage_bytes(value))
    return sizes


def _moved_bytes(values: Sequence[torch.Tensor], min_bytes: int) -> int:
    """Bytes of the range that the engine copies; 0 where it is too small, or a size has no hint."""
    covered = covered_range(values)
    if covered is None or sum(map(element_bytes, values)) < max(min_bytes, 1):
        return 0
    return covered[1] - covered[0] // RANGE_ALIGNMENT * RANGE_ALIGNMENT


def _calls(graph: fx.Graph, name_of: Callable[[fx.Node], str | None]) -> list[SegmentStep]:
    found = []
    for node in graph.find_nodes(op="call_module"):
        items = [u for u in node.users if u.target is operator.getitem]
        found.append(
            SegmentStep(
                str(node.target),
                str(node.meta.get("layer", "")),
                reads=_known(name_of, [a for a in node.args if isinstance(a, fx.Node)]),
                writes=_known(name_of, items),
            )
        )
    return found


def _known(name_of: Callable[[fx.Node], str | None], nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for n in nodes if (name := name_of(n)) is not None))


def _last_reader(node: fx.Node, order: Mapping[fx.Node, int], end: int) -> int:
    """The last segment that reads a value; ``end`` where it is returned."""
    return max((end if u.op == "output" else order.get(u, -1) for u in node.users), default=end)
