"""Several calls of compiled graphs as one step: the forwards in order, then the backwards in reverse, or as a
``CallOrder`` has them.

A storage inside one call is taken as it is. A value that passes between calls is one storage in the chain: a layer's
output is the next layer's saved input, and the gradient of one is the tangent of the other. It lives as long as it was
seen to (``fxoffload.step.edges.EdgeMemory``).

An empty segment stands for the entry of each forward call: values that only its caller makes are allocated there. One
more stands for the entry of each backward call but the first; under a ``CallOrder``, of the first as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxoffload.planner.program import Program, program_of
from fxoffload.planner.steps import SegmentStep, StorageInfo, Take, TrainingStep
from fxoffload.step.call_order import CallOrder
from fxoffload.step.choice import Windows
from fxoffload.step.edges import CallAt, EdgeMemory, Moment
from fxoffload.step.readings import PHASES, Phase
from fxoffload.step.segment_names import TURN, entry_of, segment_of


@dataclass(frozen=True)
class ExtraMemory:
    """Bytes on the device outside the graphs.

    Attributes:
        calls: per phase, per call: while it runs. Empty: nothing.
        gaps: between two calls, by the empty segment that stands there: bytes allocated above the chain's own, freed
            afterwards or not. Where no segment stands at the turn, the first one after it has as many.
    """

    calls: tuple[tuple[int, ...], ...] = ()
    gaps: tuple[tuple[str, int], ...] = ()


NO_EXTRA_MEMORY = ExtraMemory()


@dataclass(frozen=True)
class Chain:
    """The step of several calls.

    Attributes:
        step: of all of them.
        forward: per call, the position of its entry among the forward segments of ``step``.
        backward: per call, the position of its first segment among the backward segments.
        candidates: per call, its candidates' names in ``step``; None for a value that stays under every decision.
        sizes: per call, its segments forward and backward.
        extra_memory: the part of the working sets of ``step`` outside the graphs (``fxoffload.planner.extra_memory``).
        turn_bytes: the part of the first backward segment's working set that is for the turn alone.
        order: of the calls; None: the forwards, then the backwards in reverse.
    """

    step: TrainingStep
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    candidates: tuple[tuple[str | None, ...], ...]
    sizes: tuple[tuple[int, int], ...]
    extra_memory: ExtraMemory = NO_EXTRA_MEMORY
    turn_bytes: int = 0
    order: CallOrder | None = None

    def gap_before(self, at: CallAt) -> str:
        """The empty segment that stands before a call."""
        is_turn = self.order is None and at == ("backward", len(self.sizes) - 1)
        return TURN if is_turn else entry_of(*at)

    def offload_of(self, call: int, offload: Sequence[bool]) -> tuple[bool, ...]:
        """The part of one call of decisions for ``step``: one bool per candidate of the call."""
        chosen = {c.name for c, go in zip(self.step.candidates, offload, strict=True) if go}
        return tuple(name in chosen for name in self.candidates[call])

    def windows_of(self, call: int, windows: Windows) -> Windows:
        """The part of one call of windows for ``step``."""
        down, up = self.forward[call] + 1, self.backward[call]
        num_forward, num_backward = self.sizes[call]
        return Windows(windows.in_flight[down : down + num_forward + 1], windows.ahead[up : up + num_backward + 1])

    def segments_of_calls(self, phase: Phase) -> list[tuple[SegmentStep, ...]]:
        """The segments of each call, without its entry."""
        if phase == "forward":
            begins, segments = [at + 1 for at in self.forward], self.step.forward
        else:
            begins, segments = list(self.backward), self.step.backward
        counts = [size[phase == "backward"] for size in self.sizes]
        return [segments[at : at + count] for at, count in zip(begins, counts, strict=True)]

    def with_step(self, step: TrainingStep) -> Chain:
        """The same with other times and working sets."""
        return replace(self, step=step)

    def with_extra_memory(self, extra_memory: ExtraMemory) -> Chain:
        """The same with other bytes outside its graphs."""
        if extra_memory == self.extra_memory:
            return self
        more, less = self._by_segment(extra_memory), self._by_segment(self.extra_memory)
        first = self.step.backward[0]
        at_turn = 0 if _has_turn(self.step) else dict(extra_memory.gaps).get(TURN, 0)
        own = first.temp_bytes - self.turn_bytes - less.get(("backward", first.name), 0)
        turn_bytes = max(at_turn - own - more.get(("backward", first.name), 0), 0)

        def changed(phase: Phase, segments: Iterable[SegmentStep]) -> tuple[SegmentStep, ...]:
            by = {s.name: more.get((phase, s.name), 0) - less.get((phase, s.name), 0) for s in segments}
            if phase == "backward":
                by[first.name] += turn_bytes - self.turn_bytes

            def with_more(segment: SegmentStep) -> SegmentStep:
                nbytes = by[segment.name]
                outside = segment.outside_bytes + nbytes
                return replace(segment, temp_bytes=segment.temp_bytes + nbytes, outside_bytes=outside)

            return tuple(map(with_more, segments))

        step = replace(
            self.step, forward=changed("forward", self.step.forward), backward=changed("backward", self.step.backward)
        )
        return replace(self, step=step, extra_memory=extra_memory, turn_bytes=turn_bytes)

    def _by_segment(self, extra_memory: ExtraMemory) -> dict[tuple[Phase, str], int]:
        found: dict[tuple[Phase, str], int] = {}
        for phase, calls in zip(PHASES, extra_memory.calls, strict=False):
            for nbytes, segments in zip(calls, self.segments_of_calls(phase), strict=True):
                found.update({(phase, s.name): nbytes for s in segments})
        for name, nbytes in extra_memory.gaps:
            found.update({(phase, name): nbytes for phase in PHASES})  # no two of them have one name
        return found


def with_turn(step: TrainingStep, ms: float = 0.0, temp_bytes: int = 0) -> TrainingStep:
    """A step with a segment for the code between the last forward and the first backward.

    Copies go on meanwhile; nothing is released, and all positions stay. A step that has such a segment stays as it is,
    and so does one under a ``CallOrder``: an entry stands there.

    Args:
        step: of a graph, or of a chain.
        ms: of that code.
        temp_bytes: that it has at most.
    """
    if _has_turn(step) or step.runs:
        return step
    turn = SegmentStep(TURN, ms=ms, temp_bytes=temp_bytes, outside_bytes=temp_bytes, is_outside=True)
    return replace(step, forward=(*step.forward, turn))


def _has_turn(step: TrainingStep) -> bool:
    return any(s.name == TURN for s in step.forward)


def concatenate(
    calls: Sequence[TrainingStep], edge_memory: Iterable[EdgeMemory] = (), order: CallOrder | None = None
) -> Chain:
    """Make one step of many.

    Args:
        calls: in the order of their forwards. Each has segments both ways.
        edge_memory: observed lifetimes at the edges of the calls. Storages that it does not name live as their own step
            says, from the beginning of their call. The outputs of such a call then stay until the end.
        order: of the calls; None: the forwards, then the backwards in reverse.

    Raises:
        ValueError: a call has no segments, ``edge_memory`` names what no call has, or ``order`` is one of more calls or
            fewer.
    """
    return _ChainBuilder(calls, edge_memory, order).build()


class _ChainBuilder:
    def __init__(
        self, calls: Sequence[TrainingStep], edge_memory: Iterable[EdgeMemory], order: CallOrder | None
    ) -> None:
        self.calls = list(calls)
        self.order = order
        self.backwards = tuple(reversed(range(len(self.calls)))) if order is None else order.backwards
        if len(self.backwards) != len(self.calls):
            raise ValueError(f"expected the order of {len(self.calls)} calls, found that of {len(self.backwards)}")
        if not self.calls or not all(s.forward and s.backward for s in self.calls):
            raise ValueError("expected calls with segments both ways, found one without")
        self.programs: list[Program] = [program_of(s) for s in self.calls]
        self.infos = [{s.name: s for s in step.storages} for step in self.calls]
        self.forward, self.backward, self.ranks = [0], [0] * len(self.calls), [0] * len(self.calls)
        for step in self.calls:
            self.forward.append(self.forward[-1] + 1 + len(step.forward))
        at, rank = int(order is not None), 0
        for k in self.backwards:
            self.backward[k], self.ranks[k] = at, rank
            at += len(self.calls[k].backward) + 1  # the next one's entry
            rank += len(self.calls[k].backward) + 1
        self.names: dict[tuple[int, str], str] = {}  # (call, its name) -> name in the chain
        self.made: dict[str, StorageInfo] = {}
        self.place: dict[str, tuple[int, str]] = {}  # candidate of the chain -> of which call
        self.down_reads: dict[int, list[str]] = defaultdict(list)
        self.down_writes: dict[int, list[str]] = defaultdict(list)
        self.up_reads: dict[int, list[str]] = defaultdict(list)
        self.up_writes: dict[int, list[str]] = defaultdict(list)
        for item in edge_memory:
            self._share(item, is_seen=True)
        for k, infos in enumerate(self.infos):
            for name, info in infos.items():
                if (k, name) not in self.names:
                    self._share(EdgeMemory(((k, name),), Moment("backward", k) if info.is_tangent else None))

    # -- positions -----------------------------------------------------------------------------------------------------

    def _last_forward(self, call: int) -> int:
        return self.forward[call] + len(self.calls[call].forward)

    def _last_backward(self, call: int) -> int:
        return self.backward[call] + len(self.calls[call].backward) - 1

    def _hold(self, name: str, until: Moment) -> None:
        """It lives to the end of a call."""
        if until.phase == "forward":
            self.down_reads[self._last_forward(until.call)].append(name)
        else:
            self.up_reads[self._last_backward(until.call)].append(name)

    def _enters_backward(self, name: str, call: int) -> None:
        """It is there when a backward call begins, made outside the chain."""
        if self.backward[call]:
            self.up_writes[self.backward[call] - 1].append(name)
        else:
            self.down_writes[self.forward[-1] - 1].append(name)

    # -- storages ------------------------------------------------------------------------------------------------------

    def _share(self, edge_memory: EdgeMemory, *, is_seen: bool = False) -> None:
        """One storage of the chain. ``is_seen``: it was there in a step; so is a tangent that comes after all."""
        members = [m for m in edge_memory.members if m not in self.names]
        if not members:
            return
        unknown = [name for k, name in members if name not in self.infos[k]]
        if unknown:
            raise ValueError(f"expected storages of the calls, found {unknown[0]}")
        infos = [self.infos[k][name] for k, name in members]
        (first, _), info = members[0], infos[0]
        name = f"call {members[0][0]}/{members[0][1]}"
        nbytes = max(i.nbytes for i in infos)
        self.names.update(dict.fromkeys(members, name))
        plain = StorageInfo(name, nbytes, is_left_out=info.is_left_out and not is_seen)
        mover = self._mover(members, edge_memory.until)
        if mover is not None:
            self._add_candidate(mover, name, nbytes, edge_memory)
            if info.is_input and not self.made[name].is_input:
                self.down_writes[self.forward[first]].append(name)
            return
        for k, own in members:
            self._keep(k, own, name)
        if info.is_input:
            if edge_memory.until is None or edge_memory.until.phase == "backward":
                self.made[name] = replace(plain, is_input=True)  # the caller's, whatever happens here
                return
            self.down_writes[self.forward[first]].append(name)
        if info.is_tangent:
            self._enters_backward(name, first)
        for (k, _), other in zip(members, infos, strict=True):
            if other.is_tangent:
                self._hold(name, Moment("backward", k))
        if edge_memory.until is not None:
            self._hold(name, edge_memory.until)
        elif info.is_tangent:
            self._hold(name, Moment("backward", self.backwards[-1]))
        self.made[name] = replace(
            plain,
            is_output=info.is_output and edge_memory.until is None,
            is_gradient=info.is_gradient and edge_memory.until is None,
        )

    def _mover(self, members: Sequence[tuple[int, str]], until: Moment | None) -> tuple[int, str] | None:
        """The call that decides whether it moves; None where it stays in any case."""
        candidates = [(k, n) for k, n in members if self.infos[k][n].moved_bytes is not None]
        if len(candidates) != 1:
            return None
        k, own = candidates[0]
        if not all(self._comes_first(Moment("forward", j), k) for j, _ in members):
            return None  # its backward may have run by then
        info = self.infos[k][own]
        if not info.is_input:
            return (k, own)
        if len(members) == 1 and until is None:
            return (k, own)  # the caller's: to move it frees nothing, and the solver knows
        taken = any(t.storage == own for t in self._takes(k))
        elsewhere = any(n in s.reads for j, n in members if (j, n) != (k, own) for s in self.calls[j].backward)
        is_freed = until is not None and until.phase == "forward" and self._comes_first(until, k)
        return (k, own) if is_freed and taken and not elsewhere else None

    def _comes_first(self, moment: Moment, call: int) -> bool:
        """Whether it comes before the backward of a call."""
        return moment.is_before(Moment("backward", call), None if self.order is None else self.order.positions)

    def _add_candidate(self, mover: tuple[int, str], name: str, nbytes: int, edge_memory: EdgeMemory) -> None:
        (k, own), until = mover, edge_memory.until
        info = self.infos[k][own]
        caller_until, copied_after = None, info.copied_after
        if copied_after is not None:
            copied_after += self.forward[k] + 1
        if info.is_input:
            copied_after = self.forward[k] if copied_after is None else copied_after
            last = k if until is None else max(k, until.call)
            caller_until = self._last_forward(last)
        number = [c.name for c in self.calls[k].candidates].index(own)
        self.place[name] = mover
        self.made[name] = replace(
            info,
            name=name,
            label=f"call {k} {info.label}" if info.label else "",
            nbytes=nbytes,
            is_input=info.is_input and until is None,
            is_output=False,
            copied_after=copied_after,
            rank=self.ranks[k] + self.programs[k].candidates.rank[number],
            caller_until=caller_until,
            # A value that is held to the step's end is mostly a leaf, as a batch is, and so waited for.
            watched=caller_until is not None and until is not None and edge_memory.watched,
        )

    def _keep(self, call: int, own: str, name: str) -> None:
        """A storage that is no candidate in the chain lives until the last reader of any of its takes has run."""
        for take in self._takes(call):
            if take.storage == own:
                last = min(take.last_reader, len(self.calls[call].backward) - 1)
                self.up_reads[self.backward[call] + last].append(name)

    def _takes(self, call: int) -> Iterable[Take]:
        names = self.programs[call].candidates.names
        for before, takes in enumerate(self.programs[call].takes):
            for i, last_reader in takes:
                yield Take(names[i], before, last_reader)

    # -- the step ------------------------------------------------------------------------------------------------------

    def build(self) -> Chain:
        forward: list[SegmentStep] = []
        backward: list[SegmentStep] = []
        takes: list[Take] = []
        releases: list[int] = []
        end = self._last_backward(self.backwards[-1]) + 1
        for k, step in enumerate(self.calls):
            forward.append(SegmentStep(entry_of("forward", k), is_outside=True))
            forward.extend(self._named(k, s) for s in step.forward)
            releases.extend(self.forward[k] + i for i, found in enumerate(self.programs[k].releases) if found)
        for k in self.backwards:
            step, offset = self.calls[k], self.backward[k]
            if offset:
                backward.append(SegmentStep(entry_of("backward", k), is_outside=True))
            backward.extend(self._named(k, s) for s in step.backward)
            for take in self._takes(k):
                if (name := self._decided_by(k, take.storage)) is not None:
                    is_returned = take.last_reader >= len(step.backward)
                    takes.append(Take(name, offset + take.before, end if is_returned else offset + take.last_reader))
        candidates = tuple(
            tuple(self._decided_by(k, c.name) for c in call.candidates) for k, call in enumerate(self.calls)
        )
        # In the order of their calls, and there as the call has them: so they are copied.
        first = (self.made[name] for names in candidates for name in names if name is not None)
        step = TrainingStep(
            storages=(*first, *(s for s in self.made.values() if s.name not in self.place)),
            forward=tuple(_with(forward, self.down_reads, self.down_writes)),
            backward=tuple(_with(backward, self.up_reads, self.up_writes)),
            takes=tuple(takes),
            releases=tuple(releases),
            runs=self._runs(),
            no_zeros=frozenset(self.names[k, name] for k, step in enumerate(self.calls) for name in step.no_zeros),
        )
        sizes = tuple((len(s.forward), len(s.backward)) for s in self.calls)
        return Chain(step, tuple(self.forward[:-1]), tuple(self.backward), candidates, sizes, order=self.order)

    def _runs(self) -> tuple[tuple[int, int], ...]:
        """How many segments run both ways in turn, with the entries."""
        return tuple(
            (
                sum(len(self.calls[k].forward) + 1 for k in forwards),
                sum(len(self.calls[k].backward) + 1 for k in backwards),
            )
            for forwards, backwards in (() if self.order is None else self.order.runs)
        )

    def _decided_by(self, call: int, own: str) -> str | None:
        """The name in the chain of a candidate of a call; None where it is no candidate there, or another call's."""
        name = self.names[call, own]
        return name if self.place.get(name) == (call, own) else None

    def _named(self, call: int, segment: SegmentStep) -> SegmentStep:
        def names(own: Iterable[str]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(self.names[call, n] for n in own))

        return replace(
            segment, name=segment_of(call, segment.name), reads=names(segment.reads), writes=names(segment.writes)
        )


def _with(
    segments: Iterable[SegmentStep], reads: dict[int, list[str]], writes: dict[int, list[str]]
) -> Iterable[SegmentStep]:
    for i, segment in enumerate(segments):
        made = dict.fromkeys((*segment.writes, *writes[i]))
        others = (n for n in reads[i] if n not in made)  # its own results exist after it anyway
        yield replace(segment, reads=tuple(dict.fromkeys((*segment.reads, *others))), writes=tuple(made))
