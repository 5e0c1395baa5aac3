"""Records one call of a forward or backward graph: before and after each segment, an event and a read of the allocator.

Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fxoffload.runtime.profiler.allocator_history import AllocatorHistory
from fxoffload.runtime.profiler.allocator_trace import AllocatorTrace, Memory
from fxoffload.runtime.profiler.stream_events import Event, EventSource
from fxoffload.step.readings import Sample


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources that recorders read.

    Attributes:
        events: of the compute stream.
        memory: reads the allocator; None where there is nothing to read.
        epoch: a value that changes when something is compiled.
        num_begun: how many forwards of any graph have begun on the device. It tells whether other graphs run between
            a graph's forward and its backward, or between its steps; None: not known.
    """

    events: EventSource
    memory: Callable[[], Memory] | None
    epoch: Callable[[], object]
    num_begun: Callable[[], int | None] = lambda: None


class _Bracket(NamedTuple):
    """One call of a segment."""

    segment: str
    begin: Event
    end: Event
    memory: tuple[Memory, Memory] | None


class Recorder:
    """Records one call. Used by one thread; it counts only if ``end`` is called.

    Args:
        sources: the sources that it reads.
        earlier: the recorder of the step's call before this one; None: it is the first.
        ended: called once, by ``end``, with this recorder and whether it can count. It can if its segments came in
            order, and nothing was compiled since the first of these calls began.
    """

    __slots__ = (
        "_begin",
        "_brackets",
        "_broken",
        "_end",
        "_ended",
        "_epoch",
        "_epoch_at_end",
        "_gap",
        "_open",
        "_sources",
        "_trace",
    )

    def __init__(
        self,
        sources: Sources,
        earlier: Recorder | None,
        ended: Callable[[Recorder, bool], None],
    ) -> None:
        self._sources = sources
        self._ended = ended
        self._epoch = sources.epoch() if earlier is None else earlier._epoch
        self._epoch_at_end: object = None
        self._brackets: list[_Bracket] = []
        self._open: tuple[str, Event, Memory | None] | None = None
        self._broken = False
        self._end: Event | None = None
        self._trace: AllocatorTrace | None = None
        self._gap: AllocatorTrace | None = None
        if earlier is not None:
            self._trace = None if earlier._trace is None else earlier._trace.go_on()
            # A kernel that is compiled between the calls is tuned there, once. Compilation inside calls is no matter.
            is_gap = self._trace is not None and sources.epoch() == earlier._epoch_at_end
            self._gap = AllocatorTrace.begin(self._trace.last) if self._trace is not None and is_gap else None
            memory = self._read_memory()
            if self._gap is not None and memory is not None:
                self._gap.add(memory)
        elif sources.memory is not None:
            self._trace = AllocatorTrace.begin(sources.memory())
        self._begin: Event = sources.events.record()

    def before(self, segment: str) -> None:
        """Right before a segment is called, after all waits that were enqueued for it."""
        self._broken = self._broken or self._open is not None
        memory = self._read_memory()
        self._open = (segment, self._sources.events.record(), memory)

    def after(self, segment: str) -> None:
        """Right after it has returned."""
        event = self._sources.events.record()
        memory = self._read_memory()
        if self._open is None or self._open[0] != segment:
            self._broken = True
            self._sources.events.give_back([event])
            return
        name, begin, earlier = self._open
        self._open = None
        both = (earlier, memory) if earlier is not None and memory is not None else None
        self._brackets.append(_Bracket(name, begin, event, both))

    def end(self) -> None:
        """The call has returned. Not to be called if it raised."""
        if self._end is not None:
            return
        self._end = self._sources.events.record()
        self._read_memory()
        self._epoch_at_end = self._sources.epoch()
        self._ended(self, not self._broken and self._open is None and self._epoch == self._sources.epoch())

    def has_completed(self) -> bool:
        """Whether the device has passed the end of the call. Never waits."""
        # All events of a call are on one stream, and this one is the last.
        return self._end is not None and self._end.query()

    def ms_behind(self, earlier: Recorder) -> float:
        """Milliseconds from the end of an earlier call to the beginning of this one. As ``sample``."""
        assert earlier._end is not None
        return earlier._end.elapsed_ms(self._begin)

    def ms_after(self, event: Event) -> float:
        """Milliseconds from an earlier event to the beginning of this call. As ``sample``."""
        return event.elapsed_ms(self._begin)

    def gap_peak(self, history: AllocatorHistory | None = None) -> int | None:
        """Most bytes between the end of the earlier call and the beginning of this one, above those at the beginning of
        the first; None where that is not known. Needs no device to have passed anything. ``history``: of the step."""
        peak = None if self._gap is None else self._gap.exact_peak(history)
        return None if peak is None or self._trace is None else peak - self._trace.first.allocated

    def sample(self) -> Sample:
        """The recorded times and bytes. Only of a call that has completed, before ``release``."""
        assert self._end is not None
        sample = Sample(self._begin.elapsed_ms(self._end))
        base = 0 if self._trace is None else self._trace.first.allocated
        for segment, begin, end, memory in self._brackets:
            sample.segment_ms[segment] = begin.elapsed_ms(end)
            sample.begin_ms[segment] = self._begin.elapsed_ms(begin)
            if memory is None:
                continue
            before, after = memory
            trace = AllocatorTrace.begin(before)
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

    def release(self) -> None:
        """Give the events back. Once."""
        events = [self._begin, *(e for b in self._brackets for e in (b.begin, b.end))]
        events += [] if self._open is None else [self._open[1]]
        events += [] if self._end is None else [self._end]
        self._brackets, self._open = [], None
        self._sources.events.give_back(events)

    def _read_memory(self) -> Memory | None:
        if self._trace is None or self._sources.memory is None:
            return None
        memory = self._sources.memory()
        self._trace.add(memory)
        return memory
