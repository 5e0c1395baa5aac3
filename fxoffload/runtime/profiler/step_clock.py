"""Measures whole steps that follow a plan: every call's segments, and the gaps between the calls.

The plan is for a chain of calls of several graphs, or for one graph: a step of one call. Measurements replace the
estimates that it was made from. Each call has a ``Recorder``, which continues that of the call before it: before and
after each segment, an event on the compute stream and a read of the allocator. A step counts when it ran to its end as
planned; otherwise its recorders are dropped. Nothing waits for the device: a step is read once the device has passed
all of it. Ranks exchange nothing. Once enough steps have been read, nothing more is recorded.

[Note: What a step's times mean]

- Segments are those of [Note: What the times mean] in ``fxoffload.step.readings``. In a chain their calls name them.

- The time between the end of one call and the beginning of the next belongs to the second one's entry, an empty segment
  of the chain (``planner.chain``). It holds eager code, collectives, or a host that is late. Copies run during it, and
  no call waits for a copy in it, so a plan counts it as computation. The gap between the last forward and the first
  backward is the ``TURN``: the loss, and a head that is not compiled.

- The step runs from the first forward's beginning to the last backward's end on the compute stream. Its forward ends
  where the first backward begins. Where a pipeline runs them in turn, a call and the gap before it count for its phase,
  whose time is the sum. Work before and after it (an embedding, the optimizer) is in neither: the time from
  the last backward's end to the next step's beginning is ``Readings.between_steps_ms``.

- The rest of a step is inside calls and outside segments: waits for copies, and the executor's own host time where the
  device notices it.

[Note: Gaps] Memory may be allocated and freed between two calls: FSDP's reduction of gradients, an eager head. It is
known from the first step that follows a chain's plan, in which the allocator's events are recorded. No kernel of the
chain is tuned between calls, so that step tells as much of it as any other. A graph with a plan of its own follows it
from the first step of all, in which its loss is new too. So the events are recorded in steps that count, until one of
them tells. A gap in which something else is compiled tells nothing. Without a record (another one is kept, or the
allocator keeps none), a gap's peak is seen only where the allocator's peak rises there, which belongs to the process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from fxoffload.counters import counters
from fxoffload.errors import in_brief
from fxoffload.runtime.profiler.allocator_history import AllocatorHistory, cuda_history
from fxoffload.runtime.profiler.allocator_trace import Memory, cuda_memory
from fxoffload.runtime.profiler.call_recorder import Recorder, Sources
from fxoffload.runtime.profiler.first_arguments import FirstArguments
from fxoffload.runtime.profiler.stream_events import Event, EventSource, cuda_events, host_events
from fxoffload.step.call_order import CallOrder, usual_order
from fxoffload.step.readings import PHASES, Phase, Readings, Sample
from fxoffload.step.segment_names import TURN, entry_of, segment_of
from fxoffload.tell import warn
from fxoffload.torch_private.autograd import compiled_autograd_active

# Steps over ``count`` after which it gives up: steps that never are the chain to their end.
_PATIENCE = 4


class StepRecording:
    """One step that is measured. Used by one call at a time.

    Args:
        sources: the sources that its recorders read.
        num_calls: of the chain; None: the step of a graph with a plan of its own, whose segments no call names.
        order: of the calls; None: the usual one.
        ended: called by ``end`` with a step that counts.
        failed: called with the error that kept a call from being measured.
        signature: steps with different ones are kept apart (sizes; a policy's decisions).
        only_gaps: whether only ``gap_peaks`` count: something may be compiled in its calls.
        left_bytes: bytes that are there when it begins and yet belong to it, without the first call's arguments.
        first_bytes: at least so much of these belongs to it, as another step has told.
        history: of the allocator's events, begun with the step. Ended with its last call.
        after: the event at the end of the step before; None: unknown.

    Attributes:
        signature, only_gaps, history: those.
    """

    def __init__(
        self,
        sources: Sources,
        num_calls: int | None,
        ended: Callable[[StepRecording], None],
        failed: Callable[[Exception], None],
        *,
        order: CallOrder | None = None,
        signature: Hashable = (),
        only_gaps: bool = False,
        left_bytes: int = 0,
        first_bytes: int = 0,
        history: AllocatorHistory | None = None,
        after: Event | None = None,
    ) -> None:
        self._after, self._last = after, None
        self.signature = signature
        self.only_gaps = only_gaps
        self.history = history
        self._sources = sources
        self._is_chain, self._has_order = num_calls is not None, order is not None
        self._order = usual_order(num_calls or 1) if order is None else order.calls
        self._ended = ended
        self._failed = failed
        self._recorders: list[Recorder] = []
        self._num_ended = 0
        self._dropped = False
        self._has_turn = True
        self._num_begun: int | None = None  # when the last forward ended
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

    def begin(self, phase: Phase, call: int = 0) -> Recorder | None:
        """A call begins: its recorder; None where the step does not count any more. Never raises."""
        at = len(self._recorders)
        is_expected = at < len(self._order) and self._order[at] == (phase, call)
        is_planned = not self._dropped and is_expected and self._num_ended == at
        if not is_planned or compiled_autograd_active() or not self._sources.events.usable():
            self.drop()
            return None
        earlier = self._recorders[-1] if at else None
        if at == 1 and not self._is_chain:
            self._has_turn = self._num_begun is not None and self._sources.num_begun() == self._num_begun
        try:
            self._see_first()
            recorder = Recorder(self._sources, earlier, self._call_ended)
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
        if not self._is_chain and self._num_ended == 1:
            self._num_begun = self._sources.num_begun()
        if self._num_ended == len(self._order):
            self._last = self._sources.events.record()
            if self.history is not None:
                self.history.end()
        if not counts and not self.only_gaps:
            self.drop()

    def end(self) -> None:
        """The step is over, and was the planned one to its end."""
        if not self._dropped and self._num_ended == len(self._order):
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
        found: dict[Phase, Sample] = {phase: Sample(0.0) for phase in PHASES}
        forward, backward = found.values()
        forward.after_step_ms = None if self._after is None else self._recorders[0].ms_after(self._after)
        for at, recorder in enumerate(self._recorders):
            phase, call = self._order[at]
            # Other graphs that run between a graph's forward and its backward are no part of its step.
            if (gap := self._gap_before(at)) is not None:
                before = forward if gap == TURN else found[phase]
                before.segment_ms[gap] = ms = recorder.ms_behind(self._recorders[at - 1]) if at else 0.0
                before.begin_ms[gap] = before.phase_ms
                before.phase_ms += ms
            self._add(found[phase], recorder.sample(), call)
        for sample in (forward, backward):
            sample.raise_bytes(self._left_bytes)
        backward.gap_peaks.update(self.gap_peaks())  # which counts those bytes itself
        return forward, backward

    def gap_peaks(self) -> dict[str, int | None]:
        """``Sample.gap_peaks`` of the whole step. The device need not have passed it."""
        found: dict[str, int | None] = {}
        for at, recorder in enumerate(self._recorders[1:], 1):
            if (name := self._gap_before(at)) is not None:
                peak = recorder.gap_peak(self.history)
                found[name] = None if peak is None else peak + self._left_bytes
        return found

    def _gap_before(self, at: int) -> str | None:
        """The empty segment before a call; None: there is none."""
        if at == len(self._order) // 2 and not self._has_order:
            return TURN if self._has_turn else None
        return entry_of(*self._order[at]) if self._is_chain else None

    def _add(self, whole: Sample, sample: Sample, call: int) -> None:
        """Add a call's time and segments to those of its phase, at their end, and the peak so far."""

        def named(values: dict[str, Any]) -> dict[str, Any]:
            return {segment_of(call, name): value for name, value in values.items()} if self._is_chain else values

        whole.begin_ms.update(named({name: whole.phase_ms + ms for name, ms in sample.begin_ms.items()}))
        whole.phase_ms += sample.phase_ms
        for of in ("segment_ms", "live_before", "live_after", "peaks", "temp_bytes"):
            getattr(whole, of).update(named(getattr(sample, of)))
        whole.peak, whole.bounds = sample.peak, sample.bounds


class StepClock:
    """Times and bytes of steps that follow one plan. Thread-safe.

    It does not count the first ``skip`` steps, in which kernels are loaded and tuned; but see [Note: Gaps]. Nor does it
    count steps in which a call raised or something was compiled, that were not as planned to their end, or that run
    under CUDA graph capture. It holds no step that has not ended.

    Args:
        num_calls, order: see ``StepRecording``.
        skip: steps that are not measured.
        count: steps with the same signature that are enough. It gives up after four times as many.
        events: see ``cuda_events`` and ``host_events``.
        memory: reads the allocator; None where there is nothing to read.
        epoch: a value that changes when something is compiled.
        left_bytes, first_bytes: of each step; see ``StepRecording``.
        history: begins a record of the allocator's events; None, or a result of None, where there is none.
        num_begun: see ``Sources``.

    Attributes:
        measuring: whether ``begin_step`` may still return a recording.
    """

    def __init__(
        self,
        num_calls: int | None = None,
        *,
        order: CallOrder | None = None,
        skip: int = 1,
        count: int = 3,
        events: EventSource,
        memory: Callable[[], Memory] | None = None,
        epoch: Callable[[], object] = lambda: None,
        left_bytes: int = 0,
        first_bytes: int = 0,
        history: Callable[[], AllocatorHistory | None] | None = None,
        num_begun: Callable[[], int | None] = lambda: None,
    ) -> None:
        if (num_calls is not None and num_calls < 1) or skip < 0 or count < 1:
            raise ValueError(
                f"expected calls, skip of 0 or more and count of 1 or more, found {num_calls}, {skip} and {count}"
            )
        self.measuring = True
        self._num_calls, self._order, self._skip, self._count = num_calls, order, skip, count
        self._sources = Sources(events, memory, epoch, num_begun)
        self._left_bytes, self._first_bytes = left_bytes, first_bytes
        self._begin_history = history
        self._history: AllocatorHistory | None = None  # of the newest step
        self._lock = threading.Lock()
        self._seen = self._recorded = 0
        self._counted: Counter[Hashable] = Counter()  # by signature
        self._last: Event | None = None  # at the end of the step before
        self._num_begun: int | None = None  # then
        self._unread: list[StepRecording] = []
        self._samples: dict[Hashable, list[tuple[Sample, Sample]]] = {}
        self._gaps: list[dict[str, int | None]] = []
        self._told: set[Hashable] = set()  # signatures of steps whose turn is known from a record
        self._failed = False

    def begin_step(self, *, follows: bool = True, signature: Hashable = ()) -> StepRecording | None:
        """A step that follows the plan begins: its recording, or None if it is not measured. ``follows``: no other
        step was between it and the last one that was recorded. ``signature``: see ``StepRecording``."""
        with self._lock:
            self._end_history()
            after, self._last = self._last, None
            if after is not None and not (follows and self._is_next()):
                self._sources.events.give_back([after])
                after = None
            if not self.measuring:
                return None
            self._seen += 1
            if not self._sources.events.usable():
                return None
            is_warm = self._num_calls is not None  # Steps ran before it was planned: see [Note: Gaps].
            is_skipped = self._seen <= self._skip
            if is_skipped and not (is_warm and self._sources.memory is not None):
                return None
            if not is_skipped:
                if self._recorded >= _PATIENCE * self._count:
                    self.measuring = False
                    return None
                self._recorded += 1
            if self._begin_history is not None and is_skipped == is_warm and signature not in self._told:
                self._history = self._begin_history()
            return StepRecording(
                self._sources,
                self._num_calls,
                self._ended,
                self.fail,
                order=self._order,
                signature=signature,
                only_gaps=is_skipped,
                left_bytes=self._left_bytes,
                first_bytes=self._first_bytes,
                history=self._history,
                after=after,
            )

    def _is_next(self) -> bool:
        """Whether no forward of another graph was between the last step of a graph and the forward that begins now."""
        before = self._num_begun
        return self._num_calls is not None or (before is not None and self._sources.num_begun() == before + 1)

    def _end_history(self) -> None:
        """For a step that was abandoned."""
        history, self._history = self._history, None
        if history is not None:
            history.end(read=False)

    def _ended(self, step: StepRecording) -> None:
        with self._lock:
            if not self.measuring:
                step.drop()
                return
            self._last, self._num_begun = step.take_last(), self._sources.num_begun()
            if step.only_gaps:
                self._gaps.append(step.gap_peaks())
                step.drop()
                return
            if step.history is not None and step.gap_peaks().get(TURN) is not None:
                self._told.add(step.signature)
            self._unread.append(step)
            self._counted[step.signature] += 1
            self.measuring = self._counted[step.signature] < self._count
            if not self.measuring:
                self._end_history()

    def fail(self, error: Exception) -> None:
        """A step cannot be measured: measure no more, and drop all measurements. Warns once."""
        with self._lock:
            is_known, self._failed, self.measuring = self._failed, True, False
            self._end_history()
            self._unread.clear()
            self._samples.clear()
            self._gaps.clear()
        if not is_known:
            warn(f"fxoffload could not measure a step and goes on with its plan as it is: {in_brief(error)}")

    def _read_completed(self) -> None:
        if not self._unread or not self._sources.events.usable():  # to ask an event would break a capture
            return
        for step in [s for s in self._unread if s.has_completed()]:
            self._unread.remove(step)
            self._samples.setdefault(step.signature, []).append(step.samples())
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

    def readings(self, signature: Hashable = None) -> Readings:
        """The measurements of the steps of ``signature``, as of one forward and one backward; None: of the most
        frequent one. See [Note: What a step's times mean]."""
        with self._lock:
            self._read_completed()
            if signature is None:
                signature = max(self._samples, key=lambda s: len(self._samples[s]), default=())
            found = self._samples.get(signature, [])
            samples: dict[Phase, list[Sample]] = {"forward": [f for f, _ in found], "backward": [b for _, b in found]}
            return Readings(samples, tuple(self._gaps), signature)


def step_clock_for(
    device: torch.device, num_calls: int | None = None, *, records: bool = True, **about: Any
) -> StepClock:
    """A clock for graphs that run on ``device``. ``records``: whether it may record the allocator's events. ``about``:
    further arguments of ``StepClock``."""
    if device.type == "cuda" and torch.cuda.is_available():
        about |= {"memory": cuda_memory(device), "history": cuda_history(device) if records else None}
        return StepClock(num_calls, events=cuda_events(device), epoch=compilations, **about)
    return StepClock(num_calls, events=host_events(), epoch=compilations, **about)


def compilations() -> int:
    """Grows with every segment that fxoffload compiles."""
    stats = counters.snapshot()
    return stats.num_segments_compiled + stats.num_segments_reused
