"""Measures whole steps that follow a plan over several graphs: every call's segments, and the gaps between the calls.

Each call has a ``Recorder``, which continues that of the call before it. A step counts when it is over, and was the
chain to its end; otherwise its recorders are dropped. As in ``segment_clock``, nothing waits for the device: a step
is read once the device has passed all of it. Once enough steps have been read, nothing more is recorded.

[Note: What a chain's times mean]

- Segments are those of [Note: What the times mean] in ``fxoffload.step.readings``, named by their calls.

- The time between the end of one call and the beginning of the next belongs to the second one's entry, an empty segment
  of the chain (``planner.chain``). It holds eager code, collectives, or a host that is late. Copies run during it, and
  no call waits for a copy in it, so a plan counts it as computation. The gap between the last forward and the first
  backward is the ``TURN``: the loss, and a head that is not compiled.

- The step runs from the first forward's beginning to the last backward's end on the compute stream. Its forward ends
  where the first backward begins. Work before and after it (an embedding, the optimizer) is in neither: the time from
  the last backward's end to the next step's beginning is ``Readings.between_steps_ms``.

- The rest of a step is inside calls and outside segments: waits for copies, and the executor's own host time where the
  device notices it.

[Note: Gaps] Memory may be allocated and freed between two calls: FSDP's reduction of gradients, an eager head. It is
known from the first step that follows a plan, in which the allocator's events are recorded. No kernel of the chain is
tuned between calls, so that step tells as much of it as any other. A gap in which something else is compiled tells
nothing. Without a record (another one is kept, or the allocator keeps none), a gap's peak is seen only where the
allocator's peak rises there, which belongs to the process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fxoffload.errors import in_brief
from fxoffload.runtime.profiler.allocator_history import AllocatorHistory, cuda_history
from fxoffload.runtime.profiler.allocator_trace import Memory, cuda_memory
from fxoffload.runtime.profiler.call_recorder import Recorder, Sources
from fxoffload.runtime.profiler.first_arguments import FirstArguments
from fxoffload.runtime.profiler.segment_clock import compilations
from fxoffload.runtime.profiler.stream_events import Event, EventSource, cuda_events, host_events
from fxoffload.step.readings import Phase, Readings, Sample
from fxoffload.step.segment_names import TURN, entry_of, segment_of
from fxoffload.tell import warn

# Steps over ``count`` after which it gives up: steps that never are the chain to their end.
_PATIENCE = 4


class StepRecording:
    """One step that is measured. Used by one call at a time.

    Args:
        sources: the sources that its recorders read.
        num_calls: of the chain.
        ended: called by ``end`` with a step that counts.
        failed: called with the error that kept a call from being measured.
        only_gaps: whether only ``gap_peaks`` count: something may be compiled in its calls.
        left_bytes: bytes that are there when it begins and yet belong to it, without the first call's arguments.
        first_bytes: at least so much of these belongs to it, as another step has told.
        history: of the allocator's events, begun with the step. Ended with its last call.
        after: the event at the end of the step before; None: unknown.

    Attributes:
        only_gaps, history: those.
    """

    def __init__(
        self,
        sources: Sources,
        num_calls: int,
        ended: Callable[[StepRecording], None],
        failed: Callable[[Exception], None],
        *,
        only_gaps: bool = False,
        left_bytes: int = 0,
        first_bytes: int = 0,
        history: AllocatorHistory | None = None,
        after: Event | None = None,
    ) -> None:
        self._after, self._last = after, None
        self.only_gaps = only_gaps
        self.history = history
        self._sources = sources
        self._num_calls = num_calls
        self._ended = ended
        self._failed = failed
        self._recorders: list[Recorder] = []
        self._num_ended = 0
        self._dropped = False
        self._first: FirstArguments | None = None
        self._others_bytes, self._first_bytes = left_bytes, first_bytes

    def given(self, place: int, args: Iterable[Any]) -> None:
        """The forward at ``place`` is given ``args``."""
        if place == 0:
            self._first = FirstArguments(args)
        self._see_first()

    def _see_first(self) -> None:
        if self._first is not None:
            self._first_bytes = max(self._first_bytes, self._first.left_bytes())

    @property
    def _left_bytes(self) -> int:
        return self._others_bytes + self._first_bytes

    def begin(self, phase: Phase, call: int) -> Recorder | None:
        """A call begins: its recorder; None where the step does not count any more. Never raises."""
        at = len(self._recorders)
        expected = call if phase == "forward" else 2 * self._num_calls - 1 - call
        if self._dropped or at != expected or self._num_ended != at:
            self.drop()
            return None
        earlier = self._recorders[-1] if at else None
        try:
            self._see_first()
            recorder = Recorder(self._sources, phase, (), earlier, self._call_ended)
        except Exception as error:
            self.drop()
            self._failed(error)
            return None
        self._recorders.append(recorder)
        return recorder

    def _call_ended(self, recorder: Recorder, counts: bool) -> None:
        if self._dropped:
            recorder.release()
            return
        self._num_ended += 1
        if self._num_ended == 2 * self._num_calls:
            self._last = self._sources.events.record()
            if self.history is not None:
                self.history.end()
        if not counts and not self.only_gaps:
            self.drop()

    def end(self) -> None:
        """The step is over, and was the chain to its end."""
        if not self._dropped and self._num_ended == 2 * self._num_calls:
            self._ended(self)
        else:
            self.drop()

    def take_last(self) -> Event | None:
        """The event at its end, which is the caller's from then on."""
        last, self._last = self._last, None
        return last

    def drop(self) -> None:
        """It does not count."""
        self._dropped = True
        self._sources.events.give_back([e for e in (self._after, self._last) if e is not None])
        self._after = self._last = None
        if self.history is not None:
            self.history.end(read=False)
        for recorder in self._recorders[: self._num_ended]:
            recorder.release()
        self._recorders, self._num_ended = [], 0

    def has_completed(self) -> bool:
        """Whether the device has passed all of it. Never waits."""
        return all(r.has_completed() for r in reversed(self._recorders))

    def samples(self) -> tuple[Sample, Sample]:
        """Its forward and its backward. Only of a step that has completed."""
        recorders = self._recorders
        turn = self._num_calls
        first, last = recorders[0], recorders[-1]
        whole, backward_ms = last.ms_from(first), last.ms_from(recorders[turn])
        found = Sample(whole - backward_ms), Sample(backward_ms)
        found[0].after_step_ms = None if self._after is None else first.ms_after(self._after)
        found[0].segment_ms[entry_of("forward", 0)] = found[0].begin_ms[entry_of("forward", 0)] = 0.0
        for at, recorder in enumerate(recorders):
            call = at if at < turn else 2 * turn - 1 - at
            into = found[recorder.phase == "backward"]
            begins = recorder.ms_behind_begin(first if at <= turn else recorders[turn])
            if at:
                gap = TURN if at == turn else entry_of(recorder.phase, call)
                before = found[0] if at == turn else into
                before.segment_ms[gap] = recorder.ms_behind(recorders[at - 1])
                before.begin_ms[gap] = begins - before.segment_ms[gap]
            _add(into, recorder.sample(), call, begins if at != turn else 0.0)
        for sample in found:
            sample.raise_bytes(self._left_bytes)
        found[1].gap_peaks.update(self.gap_peaks())  # which counts those bytes itself
        return found

    def gap_peaks(self) -> dict[str, int | None]:
        """``Sample.gap_peaks`` of the whole step. The device need not have passed it."""
        turn, found = self._num_calls, {}
        for at, recorder in enumerate(self._recorders[1:], 1):
            call = at if at < turn else 2 * turn - 1 - at
            peak = recorder.gap_peak(self.history)
            name = TURN if at == turn else entry_of(recorder.phase, call)
            found[name] = None if peak is None else peak + self._left_bytes
        return found


def _add(whole: Sample, call: Sample, number: int, begins_ms: float) -> None:
    """Put a call's segments into those of its phase, where it begins at ``begins_ms``, and the step's peak so far."""

    def named(values: dict[str, int]) -> dict[str, int]:
        return {segment_of(number, name): value for name, value in values.items()}

    whole.segment_ms.update({segment_of(number, name): ms for name, ms in call.segment_ms.items()})
    whole.begin_ms.update({segment_of(number, name): begins_ms + ms for name, ms in call.begin_ms.items()})
    whole.live_before.update(named(call.live_before))
    whole.live_after.update(named(call.live_after))
    whole.peaks.update({segment_of(number, name): peak for name, peak in call.peaks.items()})
    whole.temp_bytes.update({segment_of(number, name): size for name, size in call.temp_bytes.items()})
    whole.peak, whole.bounds = call.peak, call.bounds


class ChainClock:
    """Times and bytes of steps of one chain. Thread-safe.

    It does not count the first ``skip`` steps, whose variants are new; but see [Note: Gaps]. Nor does it count steps in
    which something was compiled, that were not the chain to their end, or that run under CUDA graph capture.

    Args:
        num_calls: of the chain.
        skip: steps that are not measured.
        count: steps that are enough. It gives up after four times as many.
        events: see ``cuda_events`` and ``host_events``.
        memory: reads the allocator; None where there is nothing to read.
        epoch: a value that changes when something is compiled.
        left_bytes, first_bytes: of each step; see ``StepRecording``.
        history: begins a record of the allocator's events; None, or a result of None, where there is none.

    Attributes:
        measuring: whether ``begin_step`` may still return a recording.
    """

    def __init__(
        self,
        num_calls: int,
        *,
        skip: int = 1,
        count: int = 3,
        events: EventSource,
        memory: Callable[[], Memory] | None = None,
        epoch: Callable[[], object] = lambda: None,
        left_bytes: int = 0,
        first_bytes: int = 0,
        history: Callable[[], AllocatorHistory | None] | None = None,
    ) -> None:
        if num_calls < 1 or skip < 0 or count < 1:
            raise ValueError(
                f"expected calls, skip of 0 or more and count of 1 or more, found {num_calls}, {skip} and {count}"
            )
        self.measuring = True
        self._num_calls, self._skip, self._count = num_calls, skip, count
        self._sources = Sources(events, memory, epoch, history)
        self._left_bytes, self._first_bytes = left_bytes, first_bytes
        self._lock = threading.Lock()
        self._seen = self._recorded = self._counted = 0
        self._last: Event | None = None  # at the end of the step before
        self._unread: deque[StepRecording] = deque()
        self._samples: list[tuple[Sample, Sample]] = []
        self._gaps: list[dict[str, int | None]] = []
        self._failed = False

    def begin_step(self, *, follows: bool = True) -> StepRecording | None:
        """A step that follows the plan begins: its recording, or None if it is not measured. ``follows``: no other
        step was between it and the last one that was recorded."""
        with self._lock:
            after, self._last = self._last, None
            if after is not None and not follows:
                self._sources.events.give_back([after])
                after = None
            if not self.measuring:
                return None
            self._seen += 1
            if not self._sources.events.usable():
                return None
            if self._seen <= self._skip:
                if self._sources.memory is None:
                    return None
                return self._recording(only_gaps=True)
            if self._recorded >= _PATIENCE * self._count:
                self.measuring = False
                return None
            self._recorded += 1
            return self._recording(only_gaps=False, after=after)

    def _recording(self, *, only_gaps: bool, after: Event | None = None) -> StepRecording:
        begin = self._sources.history if only_gaps else None
        return StepRecording(
            self._sources,
            self._num_calls,
            self._ended,
            self.fail,
            only_gaps=only_gaps,
            left_bytes=self._left_bytes,
            first_bytes=self._first_bytes,
            history=None if begin is None else begin(),
            after=after,
        )

    def _ended(self, step: StepRecording) -> None:
        with self._lock:
            if not self.measuring:
                step.drop()
                return
            self._last = step.take_last()
            if step.only_gaps:
                self._gaps.append(step.gap_peaks())
                step.drop()
                return
            self._unread.append(step)
            self._counted += 1
            self.measuring = self._counted < self._count

    def fail(self, error: Exception) -> None:
        """A step cannot be measured: measure no more, and drop all measurements. Warns once."""
        with self._lock:
            is_known, self._failed, self.measuring = self._failed, True, False
            self._unread.clear()
            self._samples.clear()
            self._gaps.clear()
        if not is_known:
            warn(
                f"fxoffload could not measure a step of {self._num_calls} calls of compiled graphs and goes on with "
                f"its plan as it is: {in_brief(error)}",
            )

    def _read_completed(self) -> None:
        if not self._unread or not self._sources.events.usable():  # to ask an event would break a capture
            return
        while self._unread and self._unread[0].has_completed():
            step = self._unread.popleft()
            self._samples.append(step.samples())
            step.drop()  # its events are reused

    def ready(self) -> bool:
        """Whether all that is to be measured was measured, and the device has passed it. Never waits."""
        with self._lock:
            self._read_completed()
            return not self.measuring and not self._unread and bool(self._samples)

    def gave_up(self) -> bool:
        """Whether it will never be ready."""
        with self._lock:
            return not self.measuring and not self._unread and not self._samples

    def readings(self) -> Readings:
        """The measurements, as of one forward and one backward. See [Note: What a chain's times mean]."""
        with self._lock:
            self._read_completed()
            samples: dict[Phase, list[Sample]] = {
                "forward": [f for f, _ in self._samples],
                "backward": [b for _, b in self._samples],
            }
            return Readings(samples, tuple(self._gaps))


def chain_clock_for(
    device: torch.device, num_calls: int, *, left_bytes: int = 0, first_bytes: int = 0, records: bool = True
) -> ChainClock:
    """A clock for a chain whose graphs run on ``device``. ``left_bytes``, ``first_bytes``: see ``StepRecording``.
    ``records``: whether the allocator may be asked to record its events."""
    if device.type == "cuda" and torch.cuda.is_available():
        history = cuda_history(device) if records else None
        found: dict[str, Any] = {"memory": cuda_memory(device), "history": history}
        found |= {"left_bytes": left_bytes, "first_bytes": first_bytes}
        return ChainClock(num_calls, events=cuda_events(device), epoch=compilations, **found)
    return ChainClock(num_calls, events=host_events(), epoch=compilations)
