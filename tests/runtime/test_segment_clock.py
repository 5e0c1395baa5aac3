"""The clock on a virtual device: time passes and bytes are allocated when the test says so."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest
import torch

from fxoffload.counters import counters
from fxoffload.runtime.profiler import segment_clock
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.profiler.call_recorder import Recorder
from fxoffload.runtime.profiler.segment_clock import SegmentClock, clock_for
from fxoffload.runtime.profiler.stream_events import PooledEvents
from fxoffload.step.readings import PHASES, Phase

NAMES = ("a", "b")


class VirtualEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ms = -1.0

    def record(self) -> None:
        self.at_ms = self.device.now_ms

    def query(self) -> bool:
        assert not self.device.capturing, "to ask an event breaks a capture"
        return self.at_ms <= self.device.passed_ms

    def elapsed_ms(self, later: VirtualEvent) -> float:
        assert self.query() and later.query(), "an event was read that the device has not passed"
        return later.at_ms - self.at_ms


class Device:
    """A compute stream whose work is queued up to ``now_ms`` and done up to ``passed_ms``, and an allocator."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.passed_ms = float("inf")
        self.allocated = 1000
        self.peak = 1000
        self.capturing = False
        self.num_reads = self.num_begun = 0
        self.events = PooledEvents(lambda: VirtualEvent(self), lambda: not self.capturing)

    def compute(self, ms: float) -> None:
        self.now_ms += ms

    def allocate(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def memory(self) -> Memory:
        self.num_reads += 1
        return Memory(self.allocated, self.peak)

    def clock(self, *, skip: int = 0, count: int = 3, memory: bool = True, history: Any = None) -> SegmentClock:
        read = self.memory if memory else None
        return SegmentClock(
            skip=skip,
            count=count,
            events=self.events,
            memory=read,
            history=history,
            num_begun=lambda: self.num_begun,
        )


Work = Callable[[str], None]


def run(
    device: Device,
    clock: SegmentClock,
    phase: Phase,
    work: Work | Iterable[float] = (1.0, 2.0),
    *,
    signature: Hashable = (),
    forward: Recorder | None = None,
    wait_ms: float = 0.0,
) -> Recorder | None:
    """One call of a graph of two segments, as the executor makes it. ``work``: what a segment does, or milliseconds."""
    times = {} if callable(work) else dict(zip(NAMES, work, strict=True))
    recorder = clock.begin(phase, signature, forward)
    for name in NAMES:
        device.compute(wait_ms)
        if recorder is not None:
            recorder.before(name)
        if callable(work):
            work(name)
        else:
            device.compute(times[name])
        if recorder is not None:
            recorder.after(name)
    if recorder is not None:
        recorder.end()
    return recorder


def step(device: Device, clock: SegmentClock, ms: float = 1.0, *, signature: Hashable = ()) -> tuple[bool, bool]:
    """A forward and its backward. Returns which of them was recorded."""
    forward = run(device, clock, "forward", (ms, 2 * ms), signature=signature)
    backward = run(device, clock, "backward", (4 * ms, 3 * ms), signature=signature, forward=forward)
    return forward is not None, backward is not None


# -- times -------------------------------------------------------------------------------------------------------------


def test_a_segment_has_the_median_of_its_calls() -> None:
    device = Device()
    clock = device.clock(count=3)
    for ms in (1.0, 50.0, 2.0):
        assert not clock.ready()
        assert step(device, clock, ms) == (True, True)
    assert clock.ready()
    assert clock.readings().segment_ms() == {"forward": {"a": 2.0, "b": 4.0}, "backward": {"a": 8.0, "b": 6.0}}
    assert clock.readings().step_ms() == {"forward": 6.0, "backward": 14.0}


def test_waits_are_in_the_phase_but_not_in_the_segment() -> None:
    device = Device()
    clock = device.clock(count=1)
    run(device, clock, "forward", (1.0, 2.0), wait_ms=10.0)
    run(device, clock, "backward", (4.0, 3.0), wait_ms=20.0)
    assert clock.readings().segment_ms() == {"forward": {"a": 1.0, "b": 2.0}, "backward": {"a": 4.0, "b": 3.0}}
    assert clock.readings().step_ms() == {"forward": 23.0, "backward": 47.0}
    found = clock.readings().typical()
    assert found is not None
    assert [s.begin_ms for s in found] == [{"a": 10.0, "b": 21.0}, {"a": 20.0, "b": 44.0}]


@pytest.mark.parametrize(("skip", "count"), [(0, 1), (1, 3), (2, 2)])
def test_the_first_calls_are_skipped_and_nothing_is_recorded_after_enough(skip: int, count: int) -> None:
    device = Device()
    clock = device.clock(skip=skip, count=count)
    recorded = [step(device, clock, 100.0 if i < skip else 1.0) for i in range(skip + count)]
    assert recorded == [(False, False)] * skip + [(True, True)] * count
    assert not clock.measuring
    reads, made = device.num_reads, device.events.num_made
    device.events.record = None  # type: ignore[method-assign,assignment]  # any use would raise
    assert [step(device, clock) for _ in range(3)] == [(False, False)] * 3
    assert (device.num_reads, device.events.num_made) == (reads, made)
    assert clock.ready()
    assert clock.readings().segment_ms()["forward"] == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(("skip", "count"), [(-1, 3), (1, 0)])
def test_senseless_counts_are_refused(skip: int, count: int) -> None:
    with pytest.raises(ValueError, match=r"expected skip of 0 or more and count of 1 or more, found skip="):
        Device().clock(skip=skip, count=count)


def test_nothing_is_read_before_the_device_has_passed_it() -> None:
    device = Device()
    clock = device.clock(count=2)
    device.passed_ms = 2.0  # in the middle of the first forward; an early read fails in the event
    for _ in range(2):
        step(device, clock)
    assert not clock.measuring
    assert not clock.ready()
    assert clock.readings().segment_ms() == {"forward": {}, "backward": {}}
    assert clock.readings().step_ms() == {}
    device.passed_ms = 10.0  # the end of the first step
    assert not clock.ready()
    assert clock.readings().step_ms() == {"forward": 3.0, "backward": 7.0}
    device.passed_ms = 20.0
    assert clock.ready()


def test_events_are_used_again() -> None:
    device = Device()
    clock = device.clock(count=10)
    step(device, clock)
    made = device.events.num_made
    # The backward found the forward's, which were read when it began, but for the one that its turn begins with.
    assert made == 2 + 2 * len(NAMES) + 1
    for _ in range(9):
        step(device, clock)
    assert device.events.num_made == made
    assert clock.ready()
    assert len(device.events._free) == made  # and none is handed out twice
    assert len(set(map(id, device.events._free))) == made


# -- calls that do not count -------------------------------------------------------------------------------------------


def test_a_call_that_raised_is_dropped() -> None:
    device = Device()
    clock = device.clock(count=1)

    def fail(name: str) -> None:
        device.compute(100.0)
        if name == "b":
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run(device, clock, "forward", fail)
    assert clock.measuring
    step(device, clock)
    assert clock.readings().segment_ms()["forward"] == {"a": 1.0, "b": 2.0}
    assert clock.readings().live_before()["backward"], "what raised waits for no backward: the pair is clear"


def test_the_clock_does_not_hold_a_recorder_that_never_ended() -> None:
    clock = Device().clock()
    recorder = clock.begin("forward")
    assert recorder is not None
    recorder.before("a")

    class Held:
        pass

    held = Held()
    recorder._open = (held, *recorder._open[1:])  # type: ignore[index,assignment]
    gone = weakref.ref(held)
    del recorder, held
    gc.collect()
    assert gone() is None


def test_a_call_in_which_something_was_compiled_is_dropped_with_its_backward() -> None:
    device = Device()
    compiled = [0]
    clock = SegmentClock(skip=0, count=1, events=device.events, memory=device.memory, epoch=lambda: compiled[0])

    def compiles(name: str) -> None:
        device.compute(100.0)
        compiled[0] += 1

    forward = run(device, clock, "forward", compiles)
    assert run(device, clock, "backward", forward=forward) is None
    assert run(device, clock, "forward", compiles) is not None
    assert run(device, clock, "backward") is None, "its forward is known to be dropped"
    assert clock.readings().step_ms() == {}
    # Between a forward and its backward: the bytes of the backward would be wrong.
    forward = run(device, clock, "forward")
    compiled[0] += 1
    run(device, clock, "backward", forward=forward)
    assert clock.readings().step_ms() == {"forward": 3.0}
    assert clock.measuring
    step(device, clock)
    assert clock.ready()
    made = device.events.num_made
    assert len(device.events._free) == made, "what was dropped gave its events back"


@pytest.mark.parametrize("order", [["a", "b"], ["b"], ["a"]])
def test_brackets_that_do_not_match_are_dropped(order: list[str]) -> None:
    device = Device()
    clock = device.clock()
    recorder = clock.begin("forward")
    assert recorder is not None
    for name in order:
        recorder.before(name)
    if order == ["b"]:
        recorder.after("a")
    recorder.end()
    assert clock.readings().step_ms() == {}
    assert clock.measuring


def test_forwards_under_hooks_or_in_a_recompute_are_left_out_with_their_backwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    clock = device.clock(count=1)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert run(device, clock, "forward", (50.0, 50.0)) is None
    assert run(device, clock, "backward", (50.0, 50.0)) is None
    monkeypatch.setattr(segment_clock, "in_backward", lambda: True)
    assert run(device, clock, "forward", (50.0, 50.0)) is None
    assert run(device, clock, "backward", (50.0, 50.0)) is None
    monkeypatch.undo()
    monkeypatch.setattr(segment_clock, "compiled_autograd_active", lambda: True)
    assert step(device, clock) == (False, False)
    monkeypatch.undo()
    assert step(device, clock) == (True, True)
    assert clock.readings().step_ms() == {"forward": 3.0, "backward": 7.0}


def test_nothing_touches_events_while_a_graph_is_captured() -> None:
    device = Device()
    clock = device.clock(count=2)
    step(device, clock)
    run(device, clock, "forward")
    device.capturing, device.passed_ms = True, -1.0
    unread = len(clock._unread)
    assert unread
    assert step(device, clock) == (False, False)
    assert not clock.ready()
    assert len(clock._unread) == unread
    device.capturing, device.passed_ms = False, float("inf")
    run(device, clock, "backward")
    assert clock.ready()


def test_it_gives_up_on_shapes_that_never_repeat() -> None:
    device = Device()
    clock = device.clock(count=2)
    recorded = [step(device, clock, signature=i) for i in range(12)]
    assert recorded == [(True, True)] * 8 + [(False, False)] * 4
    assert not clock.measuring
    assert clock.ready()
    assert [bool(clock.readings(i).step_ms()) for i in range(12)] == [True] * 8 + [False] * 4


def test_a_forward_that_never_goes_backward_does_not_keep_it_recording() -> None:
    device = Device()
    clock = device.clock(count=2)
    recorded = [run(device, clock, "forward") is not None for _ in range(5)]
    assert recorded == [True, True, False, False, False]
    assert clock.measuring
    assert not clock.ready()
    # Their backwards come after all. Whose they are is not known: times, no bytes.
    for _ in range(2):
        assert run(device, clock, "backward") is not None
    assert clock.ready()
    assert clock.readings().step_ms()["backward"] == 3.0
    assert clock.readings().peak_bytes() is None
    assert clock.readings().live_before()["backward"] == {}


# -- signatures --------------------------------------------------------------------------------------------------------


def test_calls_of_different_sizes_are_kept_apart() -> None:
    device = Device()
    clock = device.clock(count=3)
    for size in (8, 16, 16, 8, 4, 16):
        step(device, clock, float(size), signature=(size,))
    assert clock.ready()
    assert clock.readings().segment_ms()["forward"] == {"a": 16.0, "b": 32.0}
    assert clock.readings((8,)).segment_ms()["backward"] == {"a": 32.0, "b": 24.0}
    assert clock.readings((4,)).step_ms() == {"forward": 12.0, "backward": 28.0}
    assert clock.readings((5,)).step_ms() == {}


def test_a_backward_has_the_signature_of_its_forward() -> None:
    device = Device()
    clock = device.clock(count=1)
    forward = run(device, clock, "forward", signature=(16, 2))
    run(device, clock, "backward", signature=(2,), forward=forward)  # it is given fewer sizes
    assert clock.readings((16, 2)).step_ms() == {"forward": 3.0, "backward": 3.0}
    assert clock.readings((2,)).step_ms() == {}


def test_a_signature_with_both_phases_goes_before_a_more_frequent_one() -> None:
    device = Device()
    clock = device.clock(count=3)
    for _ in range(2):
        run(device, clock, "forward", (9.0, 9.0), signature=9)
    forward = run(device, clock, "forward", signature=1)
    run(device, clock, "backward", signature=1, forward=forward)
    assert clock.readings().step_ms() == {"forward": 3.0, "backward": 3.0}


# -- bytes -------------------------------------------------------------------------------------------------------------


def forward_work(device: Device) -> Work:
    """Segment a leaves 10 bytes and needs 30 more in between; b leaves 20 and needs nothing."""

    def work(name: str) -> None:
        device.compute(1.0)
        device.allocate({"a": 40, "b": 20}[name])
        device.allocate({"a": -30, "b": 0}[name])

    return work


def backward_work(device: Device) -> Work:
    """Segment a needs 100 bytes in between; b frees all that the forward saved, and needs 5 before."""

    def work(name: str) -> None:
        device.compute(1.0)
        device.allocate({"a": 100, "b": 5}[name])
        device.allocate({"a": -100, "b": -35}[name])

    return work


def test_bytes_are_relative_to_the_beginning_of_the_forward() -> None:
    device = Device()
    clock = device.clock(count=1)
    forward = run(device, clock, "forward", forward_work(device))
    run(device, clock, "backward", backward_work(device), forward=forward)
    assert device.allocated == 1000
    assert clock.readings().live_before() == {"forward": {"a": 0, "b": 10}, "backward": {"a": 30, "b": 30}}
    assert clock.readings().live_after() == {"forward": {"a": 10, "b": 30}, "backward": {"a": 30, "b": 0}}
    # b of the forward stays below a's peak, b of the backward below the other a's: not known.
    assert clock.readings().segment_peaks() == {"forward": {"a": 40, "b": None}, "backward": {"a": 130, "b": None}}
    assert clock.readings().temp_bytes() == {"forward": {"a": 40, "b": None}, "backward": {"a": 100, "b": None}}
    assert clock.readings().peak_bytes() == 130
    assert clock.readings().peak_bounds_bytes() == (130, 130)


def test_a_segment_that_ends_at_the_peak_has_it_though_it_did_not_rise() -> None:
    device = Device()
    device.peak = 1060  # exactly what the second segment ends with
    clock = device.clock(count=1)

    def work(name: str) -> None:
        device.allocate({"a": 10, "b": 50}[name])

    forward = run(device, clock, "forward", work)
    run(device, clock, "backward", lambda name: device.allocate(-30), forward=forward)
    # The first of the backward begins with it.
    assert clock.readings().segment_peaks() == {"forward": {"a": None, "b": 60}, "backward": {"a": 60, "b": None}}
    assert clock.readings().temp_bytes()["backward"] == {"a": 0, "b": None}
    assert clock.readings().peak_bytes() == 60


def test_below_an_older_peak_only_bounds_are_known() -> None:
    device = Device()
    device.peak = 5000
    clock = device.clock(count=1)
    forward = run(device, clock, "forward", forward_work(device))
    run(device, clock, "backward", backward_work(device), forward=forward)
    assert clock.readings().segment_peaks() == {"forward": {"a": None, "b": None}, "backward": {"a": None, "b": None}}
    assert clock.readings().peak_bytes() is None
    assert clock.readings().peak_bounds_bytes() == (30, 4000)


def test_one_step_in_which_the_peak_rose_is_enough() -> None:
    """Later steps do the same and rise no further."""
    device = Device()
    clock = device.clock(count=3)
    for _ in range(3):
        forward = run(device, clock, "forward", forward_work(device))
        run(device, clock, "backward", backward_work(device), forward=forward)
    assert clock.readings().segment_peaks()["backward"] == {"a": 130, "b": None}
    assert clock.readings().peak_bytes() == 130


def test_a_peak_that_was_reset_inside_the_step_is_not_believed() -> None:
    device = Device()
    clock = device.clock(count=1)
    forward = run(device, clock, "forward", forward_work(device))
    device.peak = device.allocated  # torch.cuda.reset_peak_memory_stats()
    run(device, clock, "backward", backward_work(device), forward=forward)
    assert clock.readings().peak_bytes() is None
    assert clock.readings().peak_bounds_bytes() is None
    assert clock.readings().segment_peaks()["backward"] == {"a": 130, "b": None}  # inside the segments it holds


def test_what_runs_between_forward_and_backward_counts_for_the_step() -> None:
    device = Device()
    clock = device.clock(count=1)
    forward = run(device, clock, "forward", forward_work(device))
    device.allocate(700)
    device.allocate(-700)
    run(device, clock, "backward", backward_work(device), forward=forward)
    assert clock.readings().peak_bytes() == 730
    assert clock.readings().segment_peaks()["backward"] == {"a": None, "b": None}


class Record:
    """A record of the allocator that tells one peak; ``ended``: how, of all that were begun."""

    def __init__(self, peak: int | None) -> None:
        self.peak = peak
        self.ended: list[bool] = []
        self.begun = 0

    def __call__(self) -> Any:
        self.begun += 1
        return self

    def end(self, *, read: bool = True) -> None:
        self.ended.append(read)

    def peak_between(self, first: Memory, last: Memory) -> int | None:
        return self.peak


def test_a_loss_in_eager_code_has_its_time_and_its_peak() -> None:
    """Below what the process has been before, a record of the allocator tells, once."""
    device = Device()
    device.peak = 5000
    record = Record(1000 + 60 + 700)
    clock = device.clock(count=2, history=record)
    for _ in range(2):
        forward = run(device, clock, "forward", forward_work(device))
        device.compute(5.0)
        run(device, clock, "backward", backward_work(device), forward=forward)
    assert clock.ready()
    assert (record.begun, record.ended) == (1, [True])
    assert clock.readings().turn_ms() == 5.0
    assert clock.readings().turn_peak() == 760
    assert clock.readings().step_ms() == {"forward": 2.0, "backward": 2.0}


def test_other_graphs_between_forward_and_backward_are_not_its_loss() -> None:
    """Their calls have clocks of their own."""
    device = Device()
    record = Record(1000 + 700)
    outer, inner = device.clock(count=1, history=record), device.clock(count=1)
    forwards = []
    for clock in (outer, inner):
        device.num_begun += 1
        forwards.append(run(device, clock, "forward"))
    run(device, inner, "backward", forward=forwards[1])
    run(device, outer, "backward", forward=forwards[0])
    assert outer.ready() and inner.ready()
    assert outer.readings().turn_ms() is outer.readings().turn_peak() is None
    assert inner.readings().turn_ms() == 0.0
    assert record.ended == [False]


def test_a_record_ends_though_no_backward_is_measured() -> None:
    device = Device()
    record = Record(None)
    clock = device.clock(count=1, history=record)
    run(device, clock, "forward")
    run(device, clock, "forward")
    assert (record.begun, record.ended) == (1, [False])
    run(device, clock, "backward")
    run(device, clock, "backward")
    assert clock.readings().turn_ms() is clock.readings().turn_peak() is None


def test_without_a_reader_there_are_times_only() -> None:
    device = Device()
    clock = device.clock(count=1, memory=False)
    step(device, clock)
    assert clock.ready()
    readings = clock.readings()
    nothing = {"forward": {}, "backward": {}}
    assert readings.live_before() == readings.live_after() == readings.segment_peaks() == nothing
    assert readings.peak_bytes() is None
    assert readings.peak_bounds_bytes() is None
    assert device.num_reads == 0


# -- pairs and threads -------------------------------------------------------------------------------------------------


def test_the_only_forward_that_waits_is_the_one() -> None:
    device = Device()
    clock = device.clock(count=2)
    for _ in range(2):
        run(device, clock, "forward", forward_work(device), signature="s")
        run(device, clock, "backward", backward_work(device))
    assert clock.ready()
    assert clock.readings("s").peak_bytes() == 130


def test_a_pair_that_was_named_leaves_the_next_one_clear() -> None:
    device = Device()
    device.peak = 5000
    clock = device.clock(count=2)
    step(device, clock)
    device.peak = 1000
    run(device, clock, "forward", forward_work(device))
    run(device, clock, "backward", backward_work(device))
    assert clock.readings().peak_bytes() == 130


def test_a_forward_that_ends_after_enough_was_measured_is_let_go() -> None:
    device = Device()
    clock = device.clock(count=1)
    late = clock.begin("forward", signature="late")
    assert late is not None
    step(device, clock)
    assert clock.ready()
    late.end()
    assert clock.ready()
    assert clock.readings("late").step_ms() == {}
    assert clock._waiting is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_interleaved_forwards_are_paired_by_recorder(order: tuple[int, int]) -> None:
    device = Device()
    clock = device.clock(count=2)
    forwards = [run(device, clock, "forward", forward_work(device), signature=i) for i in range(2)]
    for i in order:
        run(device, clock, "backward", backward_work(device), signature="?", forward=forwards[i])
    # The second forward began 30 bytes higher; 60 were live when the first of the backwards ran.
    assert clock.readings(0).live_before()["backward"]["a"] == (60 if order[0] == 0 else 30)
    assert clock.readings(1).live_before()["backward"]["a"] == (30 if order[0] == 1 else 0)


def test_interleaved_forwards_are_not_guessed_at() -> None:
    """The owner of the backward is not known: times, no bytes, from then on."""
    device = Device()
    clock = device.clock(count=5)
    for _ in range(2):
        for _ in range(2):
            run(device, clock, "forward", forward_work(device))
        for _ in range(2):
            assert run(device, clock, "backward", backward_work(device)) is not None
    run(device, clock, "forward", forward_work(device))
    run(device, clock, "backward", backward_work(device))
    assert clock.ready()
    assert clock.readings().step_ms() == {"forward": 2.0, "backward": 2.0}
    assert clock.readings().live_before()["backward"] == {}
    assert clock.readings().peak_bytes() is None


def test_a_backward_that_runs_twice_is_two_calls() -> None:
    """With retain_graph."""
    device = Device()
    clock = device.clock(count=2)
    for _ in range(2):
        forward = run(device, clock, "forward")
        for _ in range(2):
            run(device, clock, "backward", forward=forward)
    assert clock.ready()
    assert clock.readings().step_ms() == {"forward": 3.0, "backward": 3.0}


def test_the_second_backward_does_not_change_what_the_first_one_saw() -> None:
    device = Device()
    clock = device.clock(count=2)
    device.passed_ms = 0.0  # both are read when both have run
    forward = run(device, clock, "forward", forward_work(device))
    run(device, clock, "backward", backward_work(device), forward=forward)
    device.peak = device.allocated
    run(device, clock, "backward", backward_work(device), forward=forward)
    device.passed_ms = float("inf")
    assert clock.readings().peak_bytes() == 130


def test_forward_and_backward_on_two_threads() -> None:
    """Each recorder keeps to its own call while the other thread records at the same time."""
    device = Device()
    clock = device.clock(count=50)
    handed: list[Recorder | None] = []
    turn = threading.Barrier(2, timeout=30)
    errors: list[BaseException] = []

    def meet(name: str) -> None:
        turn.wait()

    def backwards() -> None:
        try:
            for i in range(50):
                turn.wait()
                run(device, clock, "backward", meet, forward=handed[i])
                turn.wait()
        except BaseException as error:
            errors.append(error)
            turn.abort()

    thread = threading.Thread(target=backwards)
    handed.append(run(device, clock, "forward", lambda name: None))
    thread.start()
    for _ in range(50):
        turn.wait()
        handed.append(run(device, clock, "forward", meet))
        turn.wait()
    thread.join()
    assert not errors
    assert clock.ready()
    readings = clock.readings()
    assert {p: list(ms) for p, ms in readings.segment_ms().items()} == {"forward": ["a", "b"], "backward": ["a", "b"]}
    assert [len(clock._samples[phase, ()]) for phase in PHASES] == [50, 50]
    assert len(set(map(id, device.events._free))) == device.events.num_made


# -- devices -----------------------------------------------------------------------------------------------------------


def test_the_clock_of_a_cpu() -> None:
    clock = clock_for(torch.device("cpu"), skip=0, count=2)
    for _ in range(2):
        run(Device(), clock, "forward", lambda name: None)
        run(Device(), clock, "backward", lambda name: None)
    assert clock.ready()
    assert all(ms >= 0 for of_phase in clock.readings().segment_ms().values() for ms in of_phase.values())
    assert clock.readings().peak_bytes() is None


@pytest.mark.parametrize("counter", ["num_segments_compiled", "num_segments_reused"])
def test_what_fxoffload_compiles_spoils_the_call(counter: str) -> None:
    clock = clock_for(torch.device("cpu"), skip=0, count=1)
    run(Device(), clock, "forward", lambda name: counters.add(counter))
    assert clock.readings().step_ms() == {}
    run(Device(), clock, "forward", lambda name: None)
    assert clock.readings().step_ms().keys() == {"forward"}
