"""Simulates a step event by event: one compute stream, one copy engine each way, and the bytes on the device.

The rules are the executor's (``fxoffload.runtime.outer_program``) and the copy engine's (``fxoffload.runtime.engine``):

- A copy to the host starts when the segment that finishes its storage ends. That of a graph input starts at entry.
- A release lets compute wait for the oldest copies until the in-flight window of that point (``Windows``) holds, and
  drops their sources. Before the forward returns, compute waits for the copies of inputs.
- The backward takes back values that are still on the device. The caller's are not taken back, since the caller may
  have written to them. A value is readable once its copy down has ended.
- Then reloads are asked for, before each segment and in the order of need: as many as the window of that point holds.
  They start after all work that compute has been given so far. In a chain, those at the top of a call start after the
  work between it and the call before.
- Where forwards begin after backwards (``TrainingStep.runs``), a run of backwards takes back and reloads its own values
  alone. The first segment of each call drops all sources that are left.
- A segment waits for the values it reads. A value that was not asked for until then is asked for, and waited for, at
  once.

Bytes are those of the allocator, which follows the order of the calls and not that of the device. No rule asks how far
a copy is. So a step's memory and its transfers depend on the decisions and the windows, never on the times. A GPU does
the same as the rehearsal on a CPU. Three things are left out: a host budget that is used up, groups that other
forwards have left in the save order, and calls without a plan's windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from fxoffload.planner.link import CopyRates, Direction, Link
from fxoffload.planner.program import Program, program_of
from fxoffload.planner.steps import SegmentStep, TrainingStep
from fxoffload.step.choice import Windows
from fxoffload.step.segment_names import in_words, place_of

Track = Literal["compute", "d2h", "h2d"]


class Boundary(NamedTuple):
    """Memory on the device around one call of a segment. Bytes are right before the call unless they say otherwise.

    Attributes:
        phase: "forward" or "backward".
        segment: name of the segment.
        begin_ms: when compute begins it.
        end_ms: when compute ends it.
        live_bytes: everything that the step has allocated.
        saved_bytes: the candidates' part: kept, in flight, taken back, reloaded.
        in_flight_bytes: bytes that the in-flight window counts (the ranges that are copied, those of inputs too).
        ahead_bytes: bytes that the prefetch window counts.
        gradient_bytes: gradients that the backward has made and will return.
        peak_bytes: the most while it runs.
        after_bytes: everything, right after the call.
        outside_bytes: bytes that eager code and FSDP have while it runs, outside the compiled graphs.
        layer: label of its layer, "layers.3"; "" outside the layers.
    """

    phase: Literal["forward", "backward"]
    segment: str
    begin_ms: float
    end_ms: float
    live_bytes: int
    saved_bytes: int
    in_flight_bytes: int
    ahead_bytes: int
    gradient_bytes: int
    peak_bytes: int
    after_bytes: int
    outside_bytes: int = 0
    layer: str = ""

    @property
    def place(self) -> str:
        """See ``place_of``."""
        return place_of(self.segment, self.layer)


class SimEvent(NamedTuple):
    """One bar of the timeline.

    Attributes:
        name: of a segment or a storage, or "wait".
        nbytes: that a copy moves.
        label: of a copy, its value by module path, shape and dtype; of a wait, the copies that it waits for, "D2H" or
            "H2D".
        at: a boundary. Of a segment: its own. Of a wait: the one before it in the forward, the one after it in the
            backward. Of a copy: the one whose end starts the offload of its value; -1: the beginning of the graph.
        candidate: of a copy, its place among the step's candidates.
    """

    track: Track
    name: str
    begin_ms: float
    end_ms: float
    nbytes: int = 0
    label: str = ""
    at: int = -1
    candidate: int = -1


@dataclass(frozen=True)
class Simulation:
    """Time and memory of a step, by simulation.

    Attributes:
        peak_bytes: most bytes on the device above those allocated when the step began.
        peak_without_gradients_bytes: the same, less what the backward has made so far to return. An upper bound: what
            a segment makes to return counts while it runs.
        peak_segment: name of the segment in which the peak is.
        peak_phase: "forward" or "backward".
        forward_ms: of the forwards, on the compute stream.
        backward_ms: of the backwards. Each of both includes the code before it.
        exposed_ms: time that compute waited for copies.
        bytes_offloaded: copied to the host, including values that are taken back later.
        bytes_reloaded: copied back.
        bytes_reclaimed: taken back instead.
        num_prefetch_misses: reloads that had not been asked for when they were needed.
        boundaries: one per call of a segment, in order.
        outside_ms: time between the calls of compiled graphs.
    """

    peak_bytes: int
    peak_without_gradients_bytes: int
    peak_segment: str
    peak_phase: str
    forward_ms: float
    backward_ms: float
    exposed_ms: float
    bytes_offloaded: int
    bytes_reloaded: int
    bytes_reclaimed: int
    num_prefetch_misses: int
    boundaries: tuple[Boundary, ...]
    _recording: _Recording = field(repr=False, compare=False)
    outside_ms: float = 0.0

    @property
    def peak_place(self) -> str:
        """Where the peak is, in words."""
        return in_words(self.boundaries, self.peak_phase, self.peak_segment)

    @property
    def outside_bytes(self) -> int:
        """Most bytes that eager code and FSDP have at a time, outside the compiled graphs."""
        return max((b.outside_bytes for b in self.boundaries), default=0)

    @property
    def step_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms

    def copy_ms(self, nbytes: int, direction: Direction) -> float:
        """Milliseconds of a copy of this size on the step's link, while nothing else is copied."""
        return self._recording.link.rates.copy_ms(nbytes, direction, False)

    @property
    def live_bytes(self) -> list[int]:
        """Bytes on the device before each call of a segment."""
        return [b.live_bytes for b in self.boundaries]

    @cached_property
    def events(self) -> tuple[SimEvent, ...]:
        """Segments, waits and copies, by track and time."""
        return tuple(self._recording.events(self.boundaries))


@dataclass
class _Recording:
    """The timeline's data; turned into events on demand."""

    names: tuple[str, ...]
    labels: tuple[str, ...]
    moved_bytes: list[int]
    link: Link
    downs: list[int]  # candidates, in the order of their copies to the host
    ups: list[int]
    left_at: dict[int, int] = field(default_factory=dict)  # candidate -> boundary after which it left
    waits: list[tuple[float, float, str, int]] = field(default_factory=list)  # begin, end, for which way, boundary

    def events(self, boundaries: Sequence[Boundary]) -> list[SimEvent]:
        found = [SimEvent("compute", b.segment, b.begin_ms, b.end_ms, at=i) for i, b in enumerate(boundaries)]
        last = len(boundaries) - 1
        found.extend(
            SimEvent("compute", "wait", begin, end, label=way, at=min(max(at, 0), last))
            for begin, end, way, at in self.waits
        )
        found.sort(key=lambda event: (event.begin_ms, event.end_ms))
        copies: tuple[tuple[Track, list[int], list[tuple[float, float]]], ...] = (
            ("d2h", self.downs, self.link.downs()),
            ("h2d", self.ups, self.link.ups),
        )
        for track, which, times in copies:
            found.extend(
                SimEvent(
                    track, self.names[i], begin, end, self.moved_bytes[i], self.labels[i], self.left_at.get(i, -1), i
                )
                for i, (begin, end) in zip(which, times, strict=True)
            )
        return found


def simulate(
    step: TrainingStep,
    decisions: Sequence[bool],
    *,
    copies: CopyRates,
    windows: Windows,
) -> Simulation:
    """Run a step on paper.

    Args:
        step: to simulate.
        decisions: one bool per ``step.candidates``, True to offload.
        copies: how long copies take.
        windows: bytes that may be under way at each point. Points after the last release may be missing: a turn
            (``fxoffload.planner.chain.with_turn``) has none.

    Raises:
        ValueError: the step contradicts itself, the decisions are not as many as the candidates, or the windows are
            another step's.
    """
    program = program_of(step)
    if len(decisions) != len(program.candidates.names):
        raise ValueError(f"expected {len(program.candidates.names)} decisions, found {len(decisions)}")
    _check_windows(program, windows)
    run = _Run(program, decisions, copies, windows)
    for forward, backward in program.runs:
        run.forward(step.forward, forward)
        run.backward(step.backward, backward)
    return run.result()


def _check_windows(program: Program, windows: Windows) -> None:
    least = max((at + 1 for at, releases in enumerate(program.releases) if releases), default=0)
    most, ups = len(program.releases), len(program.takes)
    down, up = len(windows.in_flight), len(windows.ahead)
    if not least <= down <= most or up != ups:
        raise ValueError(f"expected windows of {least} to {most} points down and {ups} up, found {down} and {up}")


# Where an offloaded value is.
_AWAY, _RELOADED, _TAKEN_BACK, _TAKEN = range(4)


class _Run:
    """State of one simulation; the names are those of ``CopyEngine`` and ``OuterCall``."""

    def __init__(self, program: Program, decisions: Sequence[bool], copies: CopyRates, windows: Windows) -> None:
        self.program = program
        self.windows = windows
        self.link = Link(copies)
        self.now = 0.0
        self.saved = 0
        self.in_flight: deque[int] = deque()
        self.in_flight_bytes = 0
        self.ahead_bytes = 0
        self.reclaimed_bytes = 0
        self.offloaded = self.reloaded = self.reclaimed = self.misses = 0
        self.forward_ms = self.backward_ms = self.outside_ms = 0.0
        self.boundaries: list[Boundary] = []
        self.peak = self.peak_without_gradients = 0
        self.peak_at: tuple[str, str] = ("", "")
        candidates = program.candidates
        self.moves = [bool(go and nbytes) for go, nbytes in zip(decisions, candidates.moved_bytes, strict=True)]
        self.copy_number = [-1] * len(candidates.names)
        self.reload_end = [0.0] * len(candidates.names)
        self.state = [_AWAY] * len(candidates.names)
        self.is_backward = False
        self.num_run = 0  # forward segments
        # Sources that were waited for before their last reader ran die in that reader.
        self.dies_forward = [0] * len(program.made)
        # Bytes of candidates that die in each backward segment; [-1]: those that do not.
        self.dies = [0] * len(program.takes)
        for moves, at, held in zip(self.moves, candidates.last_read_backward, candidates.held_bytes, strict=True):
            if not moves:
                self.dies[at] += held
        self.recording = _Recording(candidates.names, candidates.labels, candidates.moved_bytes, self.link, [], [])

    # -- shared --------------------------------------------------------------------------------------------------------

    def _wait(self, until: float, way: Literal["D2H", "H2D"] = "D2H") -> None:
        if until > self.now:
            at = len(self.boundaries) - (not self.is_backward)
            self.recording.waits.append((self.now, until, way, at))
            self.now = until

    def _call(self, phase: Literal["forward", "backward"], segment: SegmentStep, saved_after: int) -> None:
        program, at = self.program, len(self.boundaries)
        begin = self.now
        self.now = begin + segment.ms
        self.outside_ms += segment.ms * segment.is_outside
        before = program.fixed_before[at] + self.saved
        after = program.fixed_after[at] + saved_after
        gradients = program.gradients_before[at]
        inside = before + segment.temp_bytes
        peak = after if after > inside else inside
        if peak > self.peak:
            self.peak, self.peak_at = peak, (phase, segment.name)
        bare = max(inside - gradients, after - program.gradients_after[at])
        if bare > self.peak_without_gradients:
            self.peak_without_gradients = bare
        self.boundaries.append(
            Boundary(
                phase,
                segment.name,
                begin,
                self.now,
                before,
                self.saved,
                self.in_flight_bytes,
                self.ahead_bytes,
                gradients,
                peak,
                after,
                segment.outside_bytes,
                segment.layer,
            )
        )
        self.saved = saved_after

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, segments: Sequence[SegmentStep], run: range) -> None:
        program = self.program
        self.is_backward, begin_ms = False, self.now
        for at in range(run.start - (run.start == 0), run.stop):
            if at >= 0:
                self._call("forward", segments[at], self.saved + program.made[at] - self.dies_forward[at])
                self.num_run += 1
            for op in program.offloads[at + 1]:
                self._offload(op)
            if program.releases[at + 1]:
                self._release(self.windows.in_flight[at + 1])
            last = next((i for i in reversed(program.awaited[at + 1]) if self.moves[i]), None)
            if last is not None:
                self._wait(self.link.down_end(self.copy_number[last]))
        self.forward_ms += self.now - begin_ms

    def _offload(self, op: list[int]) -> None:
        moved_bytes, moves, now = self.program.candidates.moved_bytes, self.moves, self.now
        total = 0
        for i in op:
            if moves[i]:
                nbytes = moved_bytes[i]
                self.copy_number[i] = self.link.down(nbytes, now)
                self.in_flight.append(i)
                self.recording.downs.append(i)
                self.recording.left_at[i] = len(self.boundaries) - 1
                total += nbytes
        self.in_flight_bytes += total
        self.offloaded += total

    def _release(self, limit: int) -> None:
        c, in_flight = self.program.candidates, self.in_flight
        last = -1
        while in_flight and self.in_flight_bytes > limit:
            last = in_flight.popleft()
            self.in_flight_bytes -= c.moved_bytes[last]
            read = c.last_read_forward[last]
            if read >= self.num_run:
                self.dies_forward[read] += c.held_bytes[last]
            else:
                self.saved -= c.held_bytes[last]
        if last >= 0:
            self._wait(self.link.down_end(self.copy_number[last]))

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, segments: Sequence[SegmentStep], run: range) -> None:
        """Run the backward segments that follow them. Nothing is reloaded for those of later runs."""
        program = self.program
        self.is_backward, begin_ms = True, self.now
        is_last = run.stop == len(segments)
        first, gaps = program.first_take, program.is_gap
        mine = {i for i, at in enumerate(first) if at >= run.start and (at < run.stop or is_last)}
        queue = deque(i for i in program.candidates.need_order if self.moves[i] and i in mine)
        begins_in_gap = bool(run) and gaps[run.start]
        if not begins_in_gap:
            self._reclaim(mine)
            if any(program.takes):
                self._prefetch(queue, 0)
        for at in run:
            self._take(program.takes[at])
            if not gaps[at]:
                self._prefetch(queue, at + 1)
            self._call("backward", segments[at], self.saved - self.dies[at])
            if gaps[at]:
                if at == run.start:
                    self._reclaim(mine)
                self._prefetch(queue, at + 1)
            if program.drops[at]:
                self._release(0)
        if is_last:
            self._take(program.takes[-1])
        self.backward_ms += self.now - begin_ms

    def _reclaim(self, mine: Set[int]) -> None:
        """Take back those of ``mine`` that are still on the device."""
        c = self.program.candidates
        kept: deque[int] = deque()
        for i in self.in_flight:
            if c.is_callers[i] or i not in mine:
                kept.append(i)
                continue
            nbytes = c.moved_bytes[i]
            self.state[i] = _TAKEN_BACK
            self.reclaimed += nbytes
            self.reclaimed_bytes += nbytes
            self.in_flight_bytes -= nbytes
        self.in_flight = kept

    def _prefetch(self, queue: deque[int], point: int) -> None:
        window = self.windows.ahead[point] - self.reclaimed_bytes
        nbytes, state = self.program.candidates.moved_bytes, self.state
        while queue:
            i = queue[0]
            if state[i] == _AWAY:
                if self.ahead_bytes + nbytes[i] > window:
                    return
                self._reload(i)
            queue.popleft()

    def _reload(self, i: int) -> None:
        """Start a copy back, after all work that compute has been given so far."""
        nbytes = self.program.candidates.moved_bytes[i]
        self.reload_end[i] = self.link.up(nbytes, self.now)
        self.recording.ups.append(i)
        self.state[i] = _RELOADED
        self.ahead_bytes += nbytes
        self.saved += nbytes
        self.reloaded += nbytes

    def _take(self, takes: Sequence[tuple[int, int]]) -> None:
        """Let compute wait for the values that a segment is the first to read."""
        c, state, moves = self.program.candidates, self.state, self.moves
        taken_back = reloaded = 0.0
        for i, _ in takes:
            # A second take finds nothing: the first one's value is not the engine's any more.
            if moves[i] and state[i] in (_AWAY, _TAKEN):
                self.misses += 1
                self._reload(i)
        for i, last_reader in takes:
            if not moves[i]:
                continue
            if state[i] == _TAKEN_BACK:
                taken_back = max(taken_back, self.link.down_end(self.copy_number[i]))
                self.reclaimed_bytes -= c.moved_bytes[i]
                self.dies[last_reader] += c.held_bytes[i]
            else:
                reloaded = max(reloaded, self.reload_end[i])
                self.ahead_bytes -= c.moved_bytes[i]
                self.dies[last_reader] += c.moved_bytes[i]
            state[i] = _TAKEN
        self._wait(taken_back)
        self._wait(reloaded, "H2D")

    # -- result --------------------------------------------------------------------------------------------------------

    def result(self) -> Simulation:
        """The simulation, once the step has run."""
        phase, segment = self.peak_at
        return Simulation(
            peak_bytes=self.peak,
            peak_without_gradients_bytes=self.peak_without_gradients,
            peak_segment=segment,
            peak_phase=phase,
            forward_ms=self.forward_ms,
            backward_ms=self.backward_ms,
            exposed_ms=sum(end - begin for begin, end, *_ in self.recording.waits),
            bytes_offloaded=self.offloaded,
            bytes_reloaded=self.reloaded,
            bytes_reclaimed=self.reclaimed,
            num_prefetch_misses=self.misses,
            boundaries=tuple(self.boundaries),
            _recording=self.recording,
            outside_ms=self.outside_ms,
        )
