"""Measures the segments of one compiled graph, forward and backward, over its first calls: times and bytes.

Measurements replace the estimates that a plan is made from. A call of a graph is recorded by a ``Recorder``: before and
after each segment, an event on the compute stream and two numbers of the allocator. Nothing waits for the device: a
call is read when its last event has completed, at the next ``begin`` or ``ready``. Ranks exchange nothing. Once enough
was measured, ``begin`` returns None, and ``measuring`` is False.

[Note: What the times mean] is in ``fxoffload.step.readings``, [Note: What the bytes mean] in ``allocator_trace``.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

import torch

from fxoffload.counters import counters
from fxoffload.runtime.profiler.allocator_history import AllocatorHistory, cuda_history
from fxoffload.runtime.profiler.allocator_trace import Memory, cuda_memory
from fxoffload.runtime.profiler.call_recorder import Recorder, Sources
from fxoffload.runtime.profiler.stream_events import EventSource, cuda_events, host_events
from fxoffload.step.readings import PHASES, Phase, Readings, Sample
from fxoffload.torch_private.autograd import compiled_autograd_active, in_backward, saved_tensor_hooks_active

# Times over ``count`` at which a phase gives up: shapes that never repeat, calls that are never counted.
_PATIENCE = 4
# Why a forward has no recorder: neither it nor its backward is to be measured; or it was not needed.
_Unrecorded = Literal["ruled out", "not needed"]


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

    The first ``skip`` calls of each graph do not count: kernels are loaded and tuned in them. Nor do calls that raised,
    that run under CUDA graph capture, or during which something was compiled. Nor do forwards under saved-tensor hooks
    or inside a backward (a checkpoint's recompute), and their backwards, where these are known. The clock holds no
    recorder that has not ended.

    Args:
        skip: calls of each of the two graphs that are not measured.
        count: calls of each, with the same signature, that are enough. It gives up after four times as many.
        events: see ``cuda_events`` and ``host_events``.
        memory: reads the allocator; None where there is nothing to read.
        epoch: a value that changes when something is compiled.
        history: begins a record of the allocator's events; None, or a result of None, where there is none. It tells
            the peak between a forward and its backward, once.
        num_begun: how many forwards of any graph have begun on the device.

    Time and memory between a forward and its backward count where no other compiled graph runs there.

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
        history: Callable[[], AllocatorHistory | None] | None = None,
        num_begun: Callable[[], int] = lambda: 0,
    ) -> None:
        if skip < 0 or count < 1:
            raise ValueError(f"expected skip of 0 or more and count of 1 or more, found skip={skip}, count={count}")
        self.measuring = True
        self._skip, self._count = skip, count
        self._sources = Sources(events, memory, epoch, history)
        self._num_begun = num_begun
        self._needs_turn = history is not None
        self._record: AllocatorHistory | None = None  # Of the forward that waits.
        self._turns: dict[Recorder, Recorder] = {}  # Backward -> its forward.
        self._lock = threading.Lock()
        self._calls: dict[Phase, _Calls] = {phase: _Calls() for phase in PHASES}
        self._unread: deque[Recorder] = deque()
        self._samples: dict[tuple[Phase, Hashable], list[Sample]] = {}
        # The one forward that waits for its backward, as long as there was never more than one.
        self._waiting: Recorder | _Unrecorded | None = None
        self._overlapped = False

    # -- recording -----------------------------------------------------------------------------------------------------

    def begin(self, phase: Phase, signature: Hashable = (), forward: Recorder | None = None) -> Recorder | None:
        """A call begins: its recorder, or None if this call is not measured.

        ``signature``: calls with different ones are kept apart (sizes; a policy's decisions, for bytes and phases). Of
        a backward it is its forward's where that is known.
        ``forward``: of a backward, the recorder of its forward. Without it the forward that waits is taken, as long as
        never more than one did; then the backward counts for times, without bytes.
        """
        if not self.measuring:
            self._end_record(None)
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
                ruled_out = ruled_out or waiting == "ruled out" or (forward is not None and forward.dropped)
                signature = signature if forward is None else forward.signature
            is_measured = not ruled_out and self._needs(phase, signature)
            if not is_measured and phase == "forward":
                self._wait("ruled out" if ruled_out else "not needed")
        if not is_measured or phase == "forward":
            self._end_record(None)
        if not is_measured:
            return None
        if phase == "forward" and self._needs_turn and self._sources.history is not None:
            self._record = self._sources.history()
        recorder = Recorder(self._sources, phase, signature, forward, self._ended)
        if phase == "backward":
            is_turn = forward is not None and recorder.has_gap and forward.num_begun == self._num_begun()
            self._end_record(recorder if is_turn else None)
            if forward is not None and is_turn:
                self._turns[recorder] = forward
            elif forward is not None and forward not in self._unread:
                forward.release()
        return recorder

    def _end_record(self, backward: Recorder | None) -> None:
        """The record of the allocator, if one is open, ends. ``backward``: that begins now; None: it tells nothing."""
        record, self._record = self._record, None
        if record is not None:
            record.end(read=backward is not None)
        if backward is not None:
            backward.turn_peak = backward.gap_peak(record)
            self._needs_turn = self._needs_turn and backward.turn_peak is None

    def _needs(self, phase: Phase, signature: Hashable) -> bool:
        """Whether a call that begins now is to be recorded. Counts it."""
        calls = self._calls[phase]
        calls.seen += 1
        if calls.recorded >= _PATIENCE * self._count:
            self._finish(calls)
        if calls.done or calls.seen <= self._skip or calls.counted[signature] >= self._count:
            return False
        usable = self._sources.events.usable()
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

    def _ended(self, recorder: Recorder, counts: bool) -> None:
        with self._lock:
            if recorder.phase == "forward" and self.measuring:
                recorder.dropped, recorder.num_begun = not counts, self._num_begun()
                self._wait(recorder)
            calls = self._calls[recorder.phase]
            counts = counts and self.measuring and calls.counted[recorder.signature] < self._count
            if not counts:
                self._turns.pop(recorder, None)
                recorder.release()
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
            self._end_record(None)

    def _read_completed(self) -> None:
        if not self._unread or not self._sources.events.usable():  # to ask an event would break a capture
            return
        for _ in range(len(self._unread)):
            recorder = self._unread.popleft()
            if not recorder.has_completed():
                self._unread.append(recorder)
                continue
            self._samples.setdefault((recorder.phase, recorder.signature), []).append(self._sample(recorder))
            recorder.release(keep_end=recorder.phase == "forward")

    def _sample(self, recorder: Recorder) -> Sample:
        sample, forward = recorder.sample(), self._turns.pop(recorder, None)
        sample.turn_peak = recorder.turn_peak
        if forward is not None and forward.has_end and forward not in self._unread:
            sample.turn_ms = recorder.ms_behind(forward)
            forward.release()
        return sample

    # -- results -------------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether all that is to be measured was measured, and the device has passed it. Never waits. It stays False
        where no call was counted."""
        with self._lock:
            self._read_completed()
            return not self.measuring and not self._unread and bool(self._samples)

    def readings(self, signature: Hashable = None) -> Readings:
        """The measurements of the calls of ``signature``; None: of the most frequent one that has both phases."""
        with self._lock:
            self._read_completed()
            wanted = [signature] if signature is not None else self._by_frequency()
            found: dict[Phase, list[Sample]] = {}
            for phase in PHASES:
                # A backward whose forward was not known may have a signature of its own.
                keys = [k for s in wanted if (k := (phase, s)) in self._samples]
                found[phase] = list(self._samples[keys[0]]) if keys else []
            return Readings(found)

    def _by_frequency(self) -> list[Hashable]:
        seen: Counter[Hashable] = Counter()
        for (_, signature), samples in self._samples.items():
            seen[signature] += len(samples)
        found = [signature for signature, _ in seen.most_common()]
        return sorted(found, key=lambda s: not all((phase, s) in self._samples for phase in PHASES))


def clock_for(
    device: torch.device,
    *,
    skip: int = 1,
    count: int = 3,
    records: bool = True,
    num_begun: Callable[[], int] = lambda: 0,
) -> SegmentClock:
    """A clock for graphs that run on ``device``. ``records``: whether it may record the allocator's events."""
    if device.type == "cuda" and torch.cuda.is_available():
        events, memory = cuda_events(device), cuda_memory(device)
        history = cuda_history(device) if records else None
        return SegmentClock(
            skip=skip,
            count=count,
            events=events,
            memory=memory,
            epoch=compilations,
            history=history,
            num_begun=num_begun,
        )
    return SegmentClock(skip=skip, count=count, events=host_events(), epoch=compilations)


def compilations() -> int:
    """Grows with every segment that fxoffload compiles."""
    stats = counters.snapshot()
    return stats.num_segments_compiled + stats.num_segments_reused
