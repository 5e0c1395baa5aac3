"""Measures the segments of one compiled graph, forward and backward, over its first calls: times and bytes.

What was measured replaces the estimates that a plan is made from. A call of a graph is recorded by a ``Recorder``: an
event before and behind each segment on the compute stream, and two numbers of the allocator beside each event. Nothing
waits for the device: a call is read when its last event has completed, at the next ``begin`` or ``ready``. Nothing is
exchanged between ranks. Once enough was measured ``begin`` returns None, and ``measuring`` is False.

[Note: What the times mean]
- A segment's bracket begins behind the waits for copies that were enqueued before it, and ends before what follows. So
  it holds the segment's kernels and nothing else that this graph asks for, as they run *beside the copies of that
  step*: where memory bandwidth is short, a segment beside a copy is slower than one alone.
- Where the host launches more slowly than the device computes, the gaps between kernels are in the bracket, and the
  work of the executor between segments is in the time of the phase. A sum of brackets far above the estimates tells so.
- Only host time that the device notices is added: reading the allocator takes tens of microseconds, outside the
  brackets; where the device is behind the host, it sees none of it.
- The time of a phase runs from its begin to its end on the compute stream, waits included: the simulator's
  ``forward_ms``. For the backward the simulator's ``backward_ms`` begins at the forward's end, this one where the
  backward graph begins; what the user runs between them (a loss outside of the graph) is in neither.

[Note: What the bytes mean]
Allocated bytes are read from the caching allocator, relative to what was allocated when the forward call began; a
backward whose forward is not known (see ``SegmentClock.begin``) has none. The allocator keeps one peak for the whole
process and device, which belongs to the user and is never reset here. If it rose between two reads, its new value is
exactly the peak between them; if it equals what is allocated at one of the reads, likewise; otherwise the peak is not
known, only that it is no higher. So a process that has been higher before (another phase, autotuning in the first call)
shows no peaks at all until the user resets the counter. What other threads allocate at the same time counts as well.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch

from fxoffload._torch_compat import compiled_autograd_active, in_backward, saved_tensor_hooks_active
from fxoffload.stats import counters

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")

# Times over ``count`` at which a phase gives up: shapes that never repeat, calls that are never counted.
_PATIENCE = 4
# What is known of a forward that has no recorder: it is not to be measured, nor is its backward; or it was not needed.
_Unrecorded = Literal["ruled out", "not needed"]

# Allocators whose statistics hold a peak. A pluggable one raises.
_ALLOCATORS = ("native", "cudaMallocAsync")


# -- events ------------------------------------------------------------------------------------------------------------


class Event(Protocol):
    """A point on the compute stream. Can be recorded again."""

    def record(self) -> None: ...
    def query(self) -> bool:
        """Whether the device has passed it. Never waits."""
        ...

    def elapsed_ms(self, later: Any) -> float:
        """Milliseconds between two events that the device has passed."""
        ...


class EventSource(Protocol):
    """Hands out recorded events, and takes back those that were read."""

    def record(self) -> Event: ...
    def give_back(self, events: Iterable[Any]) -> None: ...
    def usable(self) -> bool:
        """Whether events of this source can be recorded and read now."""
        ...


_E = TypeVar("_E", bound=Event)


class PooledEvents(Generic[_E]):
    """Events that are made once and recorded again and again.

    Args:
        make: makes an event.
        usable: whether events can be recorded now.
    """

    def __init__(self, make: Callable[[], _E], usable: Callable[[], bool] = lambda: True) -> None:
        self._make = make
        self._free: deque[_E] = deque()
        self.usable = usable
        self.num_made = 0

    def record(self) -> _E:
        try:
            event = self._free.pop()
        except IndexError:
            event = self._make()
            self.num_made += 1
        event.record()
        return event

    def give_back(self, events: Iterable[_E]) -> None:
        self._free.extend(events)


class _CudaEvent:
    """A timing event on the compute stream of one device, whichever device is current."""

    __slots__ = ("_event", "_index")

    def __init__(self, index: int) -> None:
        self._index = index
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._index))

    def query(self) -> bool:
        return self._event.query()

    def elapsed_ms(self, later: _CudaEvent) -> float:
        return self._event.elapsed_time(later._event)


class _HostEvent:
    """A point in time on the host, where segments run while they are called."""

    __slots__ = ("_at_ms", "_now_ms")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._at_ms = 0.0

    def record(self) -> None:
        self._at_ms = self._now_ms()

    def query(self) -> bool:
        return True

    def elapsed_ms(self, later: _HostEvent) -> float:
        return later._at_ms - self._at_ms


def cuda_events(device: torch.device) -> PooledEvents[_CudaEvent]:
    """Timing events of one device. Not usable while a CUDA graph is captured: there they could not be read."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return PooledEvents(lambda: _CudaEvent(index), lambda: not torch.cuda.is_current_stream_capturing())


def host_events(now_ms: Callable[[], float] = lambda: 1e3 * time.perf_counter()) -> PooledEvents[_HostEvent]:
    """For a CPU: ``now_ms`` tells the time in milliseconds."""
    return PooledEvents(lambda: _HostEvent(now_ms))


# -- memory ------------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """What the allocator says. Bytes."""

    allocated: int
    peak: int


def cuda_memory(device: torch.device) -> Callable[[], Memory] | None:
    """Reads a device's allocator; None for an allocator that keeps no statistics."""
    if torch.cuda.get_allocator_backend() not in _ALLOCATORS:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index

    def read() -> Memory:
        # ``memory_allocated()`` and its like flatten and sort all statistics on every call.
        found = torch.cuda.memory_stats_as_nested_dict(index)["allocated_bytes"]["all"]
        return Memory(found["current"], found["peak"])

    return read


@dataclass(slots=True)
class _Trace:
    """Reads of the allocator between two points.

    Attributes:
        first: the first read.
        last: the latest read.
        highest: most bytes allocated at a read.
        was_reset: whether somebody reset the peak in between, so that it no longer covers everything.
    """

    first: Memory
    last: Memory
    highest: int
    was_reset: bool = False

    @staticmethod
    def begin(memory: Memory) -> _Trace:
        return _Trace(memory, memory, memory.allocated)

    def go_on(self) -> _Trace:
        """A trace from the same first read, to be continued apart from this one."""
        return _Trace(self.first, self.last, self.highest, self.was_reset)

    def add(self, memory: Memory) -> None:
        self.was_reset = self.was_reset or memory.peak < self.last.peak
        self.last = memory
        self.highest = max(self.highest, memory.allocated)

    def exact_peak(self) -> int | None:
        """The peak where it is known (see [Note: What the bytes mean]). Absolute bytes, as the counter's."""
        if self.was_reset:
            return None
        return self.last.peak if self.last.peak > self.first.peak or self.highest == self.last.peak else None

    def bounds(self) -> tuple[int, int] | None:
        """At least and at most, both the exact peak where it is known; None where there is no upper bound."""
        if self.was_reset:
            return None
        exact = self.exact_peak()
        return (self.highest if exact is None else exact, self.last.peak)


# -- one call ----------------------------------------------------------------------------------------------------------


class _Bracket(NamedTuple):
    """One call of a segment."""

    segment: str
    begin: Event
    end: Event
    memory: tuple[Memory, Memory] | None


class Recorder:
    """Records one call of a forward or backward graph. Used by one thread; it counts only if ``end`` is called.

    Attributes:
        phase: of the graph.
        signature: what tells this call from others whose times differ.
    """

    __slots__ = (
        "_begin",
        "_brackets",
        "_broken",
        "_clock",
        "_dropped",
        "_end",
        "_epoch",
        "_open",
        "_trace",
        "phase",
        "signature",
    )

    def __init__(self, clock: SegmentClock, phase: Phase, signature: Hashable, forward: Recorder | None) -> None:
        self.phase: Phase = phase
        self.signature = signature
        self._clock = clock
        self._epoch = clock._epoch() if forward is None else forward._epoch
        self._brackets: list[_Bracket] = []
        self._open: tuple[str, Event, Memory | None] | None = None
        self._broken = False
        self._dropped = False
        self._end: Event | None = None
        self._trace: _Trace | None = None
        if phase == "forward" and clock._read_memory is not None:
            self._trace = _Trace.begin(clock._read_memory())
        elif forward is not None and forward._trace is not None:
            self._trace = forward._trace.go_on()
            self._read_memory()
        self._begin: Event = clock._events.record()

    def before(self, segment: str) -> None:
        """Right before a segment is called, behind all waits that were enqueued for it."""
        self._broken = self._broken or self._open is not None
        memory = self._read_memory()
        self._open = (segment, self._clock._events.record(), memory)

    def after(self, segment: str) -> None:
        """Right after it has returned."""
        event = self._clock._events.record()
        memory = self._read_memory()
        if self._open is None or self._open[0] != segment:
            self._broken = True
            self._clock._events.give_back([event])
            return
        name, begin, earlier = self._open
        self._open = None
        both = (earlier, memory) if earlier is not None and memory is not None else None
        self._brackets.append(_Bracket(name, begin, event, both))

    def end(self) -> None:
        """The call has returned. Not to be called if it raised."""
        if self._end is not None:
            return
        self._end = self._clock._events.record()
        self._read_memory()
        self._clock._ended(self, counts=not self._broken and self._open is None and self._epoch == self._clock._epoch())

    def _read_memory(self) -> Memory | None:
        if self._trace is None or self._clock._read_memory is None:
            return None
        memory = self._clock._read_memory()
        self._trace.add(memory)
        return memory

    def _has_completed(self) -> bool:
        # All events of a call are on one stream, this one behind the others.
        return self._end is not None and self._end.query()

    def _sample(self) -> _Sample:
        assert self._end is not None
        sample = _Sample(self._begin.elapsed_ms(self._end))
        base = 0 if self._trace is None else self._trace.first.allocated
        for segment, begin, end, memory in self._brackets:
            sample.segment_ms[segment] = begin.elapsed_ms(end)
            if memory is None:
                continue
            before, after = memory
            trace = _Trace.begin(before)
            trace.add(after)
            peak = trace.exact_peak()
            sample.live_before[segment] = before.allocated - base
            sample.live_after[segment] = after.allocated - base
            sample.peaks[segment] = None if peak is None else peak - base
            sample.temp_bytes[segment] = None if peak is None else peak - before.allocated
        if self._trace is not None:
            peak, bounds = self._trace.exact_peak(), self._trace.bounds()
            sample.peak = None if peak is None else peak - base
            sample.bounds = None if bounds is None else (bounds[0] - base, bounds[1] - base)
        return sample

    def _release(self) -> None:
        """Give the events back."""
        events = [self._begin, *(e for b in self._brackets for e in (b.begin, b.end))]
        events += [] if self._open is None else [self._open[1]]
        events += [] if self._end is None else [self._end]
        self._brackets, self._open = [], None
        self._clock._events.give_back(events)


@dataclass(slots=True)
class _Sample:
    """One call that was read. Bytes relative to the beginning of the forward."""

    phase_ms: float
    segment_ms: dict[str, float] = field(default_factory=dict)
    live_before: dict[str, int] = field(default_factory=dict)
    live_after: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    temp_bytes: dict[str, int | None] = field(default_factory=dict)
    peak: int | None = None
    bounds: tuple[int, int] | None = None


# -- all calls ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Calls:
    """Calls of one phase.

    Attributes:
        seen: how many began.
        recorded: for how many of them a recorder was handed out.
        counted: how many have ended and count, by signature.
        done: whether none is needed any more.
    """

    seen: int = 0
    recorded: int = 0
    counted: Counter[Hashable] = field(default_factory=Counter)
    done: bool = False


class SegmentClock:
    """Times and bytes of the segments of one forward graph and of its backward. Thread-safe.

    Not counted: the first ``skip`` calls of each graph (kernels are loaded, autotuned), calls in or around which
    something was compiled, forwards under saved-tensor hooks or inside a backward (a checkpoint's recompute) and their
    backwards (where these are known), calls that raised, calls under CUDA graph capture. The clock holds no recorder
    that has not ended.

    Args:
        skip: calls of each of the two graphs that are not measured.
        count: calls of each, with the same signature, that are enough. It gives up after four times as many.
        events: see ``cuda_events`` and ``host_events``.
        memory: reads the allocator; None where there is nothing to read.
        epoch: a value that changes when something is compiled.

    Attributes:
        measuring: whether ``begin`` may still return a recorder. Read it before computing a signature.
    """

    def __init__(
        self,
        *,
        skip: int = 1,
        count: int = 3,
        events: EventSource,
        memory: Callable[[], Memory] | None = None,
        epoch: Callable[[], object] = lambda: None,
    ) -> None:
        if skip < 0 or count < 1:
            raise ValueError(f"expected skip of 0 or more and count of 1 or more, found skip={skip}, count={count}")
        self.measuring = True
        self._skip, self._count = skip, count
        self._events = events
        self._read_memory = memory
        self._epoch = epoch
        self._lock = threading.Lock()
        self._calls: dict[Phase, _Calls] = {phase: _Calls() for phase in PHASES}
        self._unread: deque[Recorder] = deque()
        self._samples: dict[tuple[Phase, Hashable], list[_Sample]] = {}
        # The one forward that waits for its backward, as long as there was never more than one.
        self._waiting: Recorder | _Unrecorded | None = None
        self._overlapped = False

    # -- recording -----------------------------------------------------------------------------------------------------

    def begin(self, phase: Phase, signature: Hashable = (), forward: Recorder | None = None) -> Recorder | None:
        """A call begins: its recorder, or None if this call is not measured.

        ``signature``: calls with different ones are kept apart (sizes; what a policy decided, for bytes and phases). Of
        a backward it is its forward's where that is known.
        ``forward``: of a backward, the recorder of its forward. Without it the forward that waits is taken, as long as
        never more than one did; then the backward counts for times, without bytes.
        """
        if not self.measuring:
            return None
        with self._lock:
            self._read_completed()
            ruled_out = compiled_autograd_active()
            if phase == "forward":
                forward = None
                ruled_out = ruled_out or in_backward() or saved_tensor_hooks_active()
            else:
                waiting = self._take_waiting() if forward is None else self._forget(forward)
                forward = waiting if isinstance(waiting, Recorder) else None
                ruled_out = ruled_out or waiting == "ruled out" or (forward is not None and forward._dropped)
                signature = signature if forward is None else forward.signature
            if ruled_out or not self._needs(phase, signature):
                if phase == "forward":
                    self._wait("ruled out" if ruled_out else "not needed")
                return None
        return Recorder(self, phase, signature, forward)

    def _needs(self, phase: Phase, signature: Hashable) -> bool:
        """Whether a call that begins now is to be recorded. Counts it."""
        calls = self._calls[phase]
        calls.seen += 1
        if calls.recorded >= _PATIENCE * self._count:
            self._finish(calls)
        if calls.done or calls.seen <= self._skip or calls.counted[signature] >= self._count:
            return False
        usable = self._events.usable()
        calls.recorded += usable
        return usable

    def _wait(self, forward: Recorder | _Unrecorded) -> None:
        """A forward waits for its backward. Two at a time, and it is no longer clear whose backward comes next."""
        self._overlapped = self._overlapped or self._waiting is not None
        self._waiting = None if self._overlapped else forward

    def _take_waiting(self) -> Recorder | _Unrecorded | None:
        waiting, self._waiting = self._waiting, None
        return waiting

    def _forget(self, forward: Recorder) -> Recorder:
        """``forward`` waits no longer."""
        if self._waiting is forward:
            self._waiting = None
        return forward

    def _ended(self, recorder: Recorder, *, counts: bool) -> None:
        with self._lock:
            if recorder.phase == "forward" and self.measuring:
                recorder._dropped = not counts
                self._wait(recorder)
            calls = self._calls[recorder.phase]
            counts = counts and self.measuring and calls.counted[recorder.signature] < self._count
            if not counts:
                recorder._release()
                return
            self._unread.append(recorder)
            calls.counted[recorder.signature] += 1
            if calls.counted[recorder.signature] >= self._count:
                self._finish(calls)

    def _finish(self, calls: _Calls) -> None:
        calls.done = True
        if all(c.done for c in self._calls.values()):
            self.measuring = False
            self._waiting = None

    def _read_completed(self) -> None:
        if not self._unread or not self._events.usable():  # to ask an event would break a capture
            return
        for _ in range(len(self._unread)):
            recorder = self._unread.popleft()
            if not recorder._has_completed():
                self._unread.append(recorder)
                continue
            self._samples.setdefault((recorder.phase, recorder.signature), []).append(recorder._sample())
            recorder._release()

    # -- results -------------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether all that is to be measured was measured, and the device has passed it. Never waits. It stays False
        where no call was counted."""
        with self._lock:
            self._read_completed()
            return not self.measuring and not self._unread and bool(self._samples)

    def signatures(self) -> list[Hashable]:
        """Of the calls that were read: those with both phases, the most frequent first, then the others."""
        with self._lock:
            self._read_completed()
            return self._by_frequency()

    def segment_ms(self, signature: Hashable = None) -> dict[Phase, dict[str, float]]:
        """Milliseconds of each segment, by phase: medians over the calls of ``signature``, or of the first one of
        ``signatures``. See [Note: What the times mean]."""
        return {p: _medians(s.segment_ms for s in found) for p, found in self._found(signature).items()}

    def step_ms(self, signature: Hashable = None) -> dict[Phase, float]:
        """Milliseconds of each phase, waits between segments included: medians. A phase that was not measured is
        missing."""
        found = self._found(signature)
        return {p: statistics.median(s.phase_ms for s in samples) for p, samples in found.items() if samples}

    def live_before(self, signature: Hashable = None) -> dict[Phase, dict[str, int]]:
        """Bytes allocated before each segment, above those at the beginning of the forward: medians."""
        return {p: _median_bytes(s.live_before for s in found) for p, found in self._found(signature).items()}

    def live_after(self, signature: Hashable = None) -> dict[Phase, dict[str, int]]:
        """Bytes allocated after each segment, likewise."""
        return {p: _median_bytes(s.live_after for s in found) for p, found in self._found(signature).items()}

    def segment_peaks(self, signature: Hashable = None) -> dict[Phase, dict[str, int | None]]:
        """Most bytes allocated while each segment ran, above those at the beginning of the forward: the largest of the
        exact ones, None where none is known. See [Note: What the bytes mean]."""
        return {p: _largest(s.peaks for s in found) for p, found in self._found(signature).items()}

    def temp_bytes(self, signature: Hashable = None) -> dict[Phase, dict[str, int | None]]:
        """The same above what was live when the segment began (the simulator's ``SegmentStep.temp_bytes``)."""
        return {p: _largest(s.temp_bytes for s in found) for p, found in self._found(signature).items()}

    def measured_peak_bytes(self, signature: Hashable = None) -> int | None:
        """Most bytes allocated from the beginning of a forward to the end of its backward, above those at that
        beginning: the largest of the exact ones, None where none is known. What runs between the two counts too."""
        return max((s.peak for s in self._found(signature)["backward"] if s.peak is not None), default=None)

    def peak_bounds_bytes(self, signature: Hashable = None) -> tuple[int, int] | None:
        """At least and at most: the same, where it need not be exact. Low: what was allocated at the edge of a segment.
        High: the allocator's peak, which may be older than the step."""
        found = [s.bounds for s in self._found(signature)["backward"] if s.bounds is not None]
        return (max(low for low, _ in found), max(high for _, high in found)) if found else None

    def _found(self, signature: Hashable) -> dict[Phase, list[_Sample]]:
        with self._lock:
            self._read_completed()
            wanted = [signature] if signature is not None else self._by_frequency()
            found: dict[Phase, list[_Sample]] = {}
            for phase in PHASES:
                # A backward whose forward was not known may have a signature of its own.
                keys = [k for s in wanted if (k := (phase, s)) in self._samples]
                found[phase] = list(self._samples[keys[0]]) if keys else []
            return found

    def _by_frequency(self) -> list[Hashable]:
        seen: Counter[Hashable] = Counter()
        for (_, signature), samples in self._samples.items():
            seen[signature] += len(samples)
        found = [signature for signature, _ in seen.most_common()]
        return sorted(found, key=lambda s: not all((phase, s) in self._samples for phase in PHASES))


def _by_name(maps: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Name -> its values, in the order of the first map that has it."""
    found: dict[str, list[Any]] = {}
    for values in maps:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def _medians(maps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in _by_name(maps).items()}


def _median_bytes(maps: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return {name: statistics.median_high(values) for name, values in _by_name(maps).items()}


def _largest(maps: Iterable[Mapping[str, int | None]]) -> dict[str, int | None]:
    return {name: max((v for v in vs if v is not None), default=None) for name, vs in _by_name(maps).items()}


def clock_for(device: torch.device, *, skip: int = 1, count: int = 3) -> SegmentClock:
    """A clock for graphs that run on ``device``."""
    if device.type == "cuda" and torch.cuda.is_available():
        events, memory = cuda_events(device), cuda_memory(device)
        return SegmentClock(skip=skip, count=count, events=events, memory=memory, epoch=_compilations)
    return SegmentClock(skip=skip, count=count, events=host_events(), epoch=_compilations)


def _compilations() -> int:
    """Grows with every segment that fxoffload compiles."""
    stats = counters.snapshot()
    return stats.num_segments_compiled + stats.num_segments_reused
