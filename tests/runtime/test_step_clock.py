"""The clock of a graph, a step of one call, on a virtual device: time passes and bytes are allocated when the test says
so."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxoffload.counters import counters
from fxoffload.runtime.profiler import step_clock
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.profiler.step_clock import StepClock, StepRecording, step_clock_for
from fxoffload.runtime.profiler.stream_events import PooledEvents
from fxoffload.step.readings import Phase
from fxoffload.step.segment_names import TURN

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

    def clock(self, *, skip: int = 0, count: int = 3, memory: bool = True, history: Any = None) -> StepClock:
        read = self.memory if memory else None
        return StepClock(
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
    recording: StepRecording | None,
    phase: Phase,
    work: Work | Iterable[float] = (1.0, 2.0),
    *,
    wait_ms: float = 0.0,
) -> bool:
    """One call of a graph of two segments, as the executor makes it. ``work``: what a segment does, or milliseconds.
    Returns whether it was recorded."""
    times = {} if callable(work) else dict(zip(NAMES, work, strict=True))
    recorder = None if recording is None else recording.begin(phase)
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
    if recording is not None and phase == "backward":
        recording.end()
    return recorder is not None


def forward(
    device: Device,
    clock: StepClock,
    work: Work | Iterable[float] = (1.0, 2.0),
    *,
    signature: Hashable = (),
    wait_ms: float = 0.0,
) -> StepRecording | None:
    """A step begins with its forward."""
    device.num_begun += 1
    recording = clock.begin_step(signature=signature)
    run(device, recording, "forward", work, wait_ms=wait_ms)
    return recording


def step(device: Device, clock: StepClock, ms: float = 1.0, *, signature: Hashable = ()) -> tuple[bool, bool]:
    """A forward and its backward. Returns which of them was recorded."""
    recording = forward(device, clock, (ms, 2 * ms), signature=signature)
    return recording is not None, run(device, recording, "backward", (4 * ms, 3 * ms))


# -- times -------------------------------------------------------------------------------------------------------------


def test_a_segment_has_the_median_of_its_calls() -> None:
    device = Device()
    clock = device.clock(count=3)
    for ms in (1.0, 50.0, 2.0):
        assert not clock.ready()
        assert step(device, clock, ms) == (True, True)
    assert clock.ready()
    assert clock.readings().segment_ms() == {
        "forward": {"a": 2.0, "b": 4.0, TURN: 0.0},
        "backward": {"a": 8.0, "b": 6.0},
    }
    assert clock.readings().step_ms() == {"forward": 6.0, "backward": 14.0}


def test_waits_are_in_the_phase_but_not_in_the_segment() -> None:
    device = Device()
    clock = device.clock(count=1)
    recording = forward(device, clock, (1.0, 2.0), wait_ms=10.0)
    device.compute(5.0)
    run(device, recording, "backward", (4.0, 3.0), wait_ms=20.0)
    assert clock.readings().segment_ms() == {
        "forward": {"a": 1.0, "b": 2.0, TURN: 5.0},
        "backward": {"a": 4.0, "b": 3.0},
    }
    assert clock.readings().step_ms() == {"forward": 28.0, "backward": 47.0}
    found = clock.readings().typical()
    assert found is not None
    assert [s.begin_ms for s in found] == [{"a": 10.0, "b": 21.0, TURN: 23.0}, {"a": 20.0, "b": 44.0}]


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
    assert clock.readings().segment_ms()["forward"] == {"a": 1.0, "b": 2.0, TURN: 0.0}


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
    assert not clock.ready()  # which reads
    made = device.events.num_made
    assert made == 2 * (2 + 2 * len(NAMES)) + 1  # and one at the end of the step
    for _ in range(9):
        step(device, clock)
        clock.ready()
    assert device.events.num_made == made + 1  # the end of the step before is there until the next one is read
    assert clock.ready()
    device.events.give_back([clock._last])  # type: ignore[list-item]
    made = device.events.num_made
    assert len(device.events._free) == made  # and none is handed out twice
    assert len(set(map(id, device.events._free))) == made


# -- calls that do not count -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_call_that_raised_is_dropped(phase: Phase) -> None:
    device = Device()
    clock = device.clock(count=1)

    def fail(name: str) -> None:
        device.compute(100.0)
        if name == "b":
            raise RuntimeError("out of memory")

    recording = clock.begin_step()
    if phase == "backward":
        run(device, recording, "forward")
    with pytest.raises(RuntimeError, match="out of memory"):
        run(device, recording, phase, fail)
    assert clock.measuring
    step(device, clock)
    assert clock.readings().segment_ms()["forward"] == {"a": 1.0, "b": 2.0, TURN: 0.0}
    assert clock.readings().live_before()["backward"]


def test_the_clock_does_not_hold_a_step_that_never_ended() -> None:
    device = Device()
    clock = device.clock(history=Record(None))
    recording = forward(device, clock)
    gone = weakref.ref(recording)
    del recording
    gc.collect()
    assert gone() is None


def test_a_step_in_which_something_was_compiled_is_dropped() -> None:
    device = Device()
    compiled = [0]
    clock = StepClock(skip=0, count=1, events=device.events, memory=device.memory, epoch=lambda: compiled[0])

    def compiles(name: str) -> None:
        device.compute(100.0)
        compiled[0] += 1

    recording = forward(device, clock, compiles)
    assert recording is not None
    assert not run(device, recording, "backward")
    recording = forward(device, clock)
    compiled[0] += 1  # between
    assert run(device, recording, "backward")
    recording = forward(device, clock)
    assert run(device, recording, "backward", compiles)
    assert clock.readings().step_ms() == {}
    assert clock.measuring
    step(device, clock)
    assert clock.ready()
    assert len(device.events._free) == device.events.num_made - 1, "what was dropped gave its events back"


@pytest.mark.parametrize("order", [["a", "b"], ["b"], ["a"]])
def test_brackets_that_do_not_match_are_dropped(order: list[str]) -> None:
    device = Device()
    clock = device.clock()
    recording = clock.begin_step()
    recorder = None if recording is None else recording.begin("forward")
    assert recording is not None and recorder is not None
    for name in order:
        recorder.before(name)
    if order == ["b"]:
        recorder.after("a")
    recorder.end()
    assert recording.begin("backward") is None
    recording.end()
    assert clock.readings().step_ms() == {}
    assert clock.measuring


def test_compiled_autograd_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its backward launches is not this graph's alone."""
    device = Device()
    clock = device.clock(count=1)
    recording = forward(device, clock, (50.0, 50.0))
    monkeypatch.setattr(step_clock, "compiled_autograd_active", lambda: True)
    assert not run(device, recording, "backward", (50.0, 50.0))
    monkeypatch.undo()
    assert step(device, clock) == (True, True)
    assert clock.readings().step_ms() == {"forward": 3.0, "backward": 7.0}


def test_nothing_touches_events_while_a_graph_is_captured() -> None:
    device = Device()
    clock = device.clock(count=2)
    step(device, clock)
    recording = forward(device, clock)
    device.capturing, device.passed_ms = True, -1.0
    device.events.record, record = None, device.events.record  # type: ignore[method-assign,assignment]
    assert not run(device, recording, "backward")
    assert step(device, clock) == (False, False)
    assert not clock.ready() and clock.readings().step_ms() == {}
    device.capturing, device.passed_ms, device.events.record = False, float("inf"), record  # type: ignore[method-assign]
    step(device, clock)
    assert clock.ready()


def test_it_gives_up_on_shapes_that_never_repeat() -> None:
    device = Device()
    clock = device.clock(count=2)
    recorded = [step(device, clock, signature=i) for i in range(12)]
    assert recorded == [(True, True)] * 8 + [(False, False)] * 4
    assert not clock.measuring
    assert clock.ready() and not clock.gave_up()
    assert [bool(clock.readings(i).step_ms()) for i in range(12)] == [True] * 8 + [False] * 4


def test_forwards_that_never_go_backward_do_not_keep_it_recording() -> None:
    device = Device()
    clock = device.clock(count=2)
    recordings = [forward(device, clock) for _ in range(10)]
    assert [r is not None for r in recordings] == [True] * 8 + [False] * 2
    assert not clock.measuring
    assert not clock.ready() and clock.gave_up()


def test_a_few_forwards_that_never_go_backward_are_no_matter() -> None:
    device = Device()
    clock = device.clock(count=1)
    forward(device, clock, (50.0, 50.0))
    step(device, clock)
    assert clock.readings().step_ms() == {"forward": 3.0, "backward": 7.0}


# -- signatures --------------------------------------------------------------------------------------------------------


def test_calls_of_different_sizes_are_kept_apart() -> None:
    device = Device()
    clock = device.clock(count=3)
    for size in (8, 16, 16, 8, 4, 16):
        step(device, clock, float(size), signature=(size,))
    assert clock.ready()
    assert clock.readings().segment_ms()["forward"] == {"a": 16.0, "b": 32.0, TURN: 0.0}
    assert clock.readings((8,)).segment_ms()["backward"] == {"a": 32.0, "b": 24.0}
    assert clock.readings((4,)).step_ms() == {"forward": 12.0, "backward": 28.0}
    assert clock.readings((5,)).step_ms() == {}


def test_forwards_alone_are_no_frequent_signature() -> None:
    device = Device()
    clock = device.clock(count=3)
    for _ in range(2):
        forward(device, clock, (9.0, 9.0), signature=9)
    step(device, clock, signature=1)
    assert clock.readings().step_ms() == {"forward": 3.0, "backward": 7.0}


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
    recording = forward(device, clock, forward_work(device))
    run(device, recording, "backward", backward_work(device))
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

    recording = forward(device, clock, work)
    run(device, recording, "backward", lambda name: device.allocate(-30))
    # The first of the backward begins with it.
    assert clock.readings().segment_peaks() == {"forward": {"a": None, "b": 60}, "backward": {"a": 60, "b": None}}
    assert clock.readings().temp_bytes()["backward"] == {"a": 0, "b": None}
    assert clock.readings().peak_bytes() == 60


def test_below_an_older_peak_only_bounds_are_known() -> None:
    device = Device()
    device.peak = 5000
    clock = device.clock(count=1)
    recording = forward(device, clock, forward_work(device))
    run(device, recording, "backward", backward_work(device))
    assert clock.readings().segment_peaks() == {"forward": {"a": None, "b": None}, "backward": {"a": None, "b": None}}
    assert clock.readings().peak_bytes() is None
    assert clock.readings().peak_bounds_bytes() == (30, 4000)


def test_one_step_in_which_the_peak_rose_is_enough() -> None:
    """Later steps do the same and rise no further."""
    device = Device()
    clock = device.clock(count=3)
    for _ in range(3):
        recording = forward(device, clock, forward_work(device))
        run(device, recording, "backward", backward_work(device))
    assert clock.readings().segment_peaks()["backward"] == {"a": 130, "b": None}
    assert clock.readings().peak_bytes() == 130


def test_a_peak_that_was_reset_inside_the_step_is_not_believed() -> None:
    device = Device()
    clock = device.clock(count=1)
    recording = forward(device, clock, forward_work(device))
    device.peak = device.allocated  # torch.cuda.reset_peak_memory_stats()
    run(device, recording, "backward", backward_work(device))
    assert clock.readings().peak_bytes() is None
    assert clock.readings().peak_bounds_bytes() is None
    assert clock.readings().segment_peaks()["backward"] == {"a": 130, "b": None}  # inside the segments it holds


def test_what_runs_between_forward_and_backward_counts_for_the_step() -> None:
    device = Device()
    clock = device.clock(count=1)
    recording = forward(device, clock, forward_work(device))
    device.allocate(700)
    device.allocate(-700)
    run(device, recording, "backward", backward_work(device))
    assert clock.readings().peak_bytes() == clock.readings().gap_peaks()[TURN] == 730
    assert clock.readings().segment_peaks()["backward"] == {"a": None, "b": None}


class Record:
    """Begins records of the allocator that tell one peak; ``ended``: how each of them did."""

    def __init__(self, peak: int | None) -> None:
        self.peak = peak
        self.ended: list[bool | None] = []

    def __call__(self) -> Any:
        at = len(self.ended)
        self.ended.append(None)

        def end(*, read: bool = True) -> None:
            if self.ended[at] is None:
                self.ended[at] = read

        return SimpleNamespace(end=end, peak_between=lambda first, last: self.peak)


def test_a_loss_in_eager_code_has_its_time_and_its_peak() -> None:
    """Below what the process has been before, a record of the allocator tells, once."""
    device = Device()
    device.peak = 5000
    record = Record(1000 + 60 + 700)
    clock = device.clock(count=2, history=record)
    for _ in range(2):
        recording = forward(device, clock, forward_work(device))
        device.compute(5.0)
        run(device, recording, "backward", backward_work(device))
    assert clock.ready()
    assert record.ended == [True]
    assert clock.readings().segment_ms()["forward"][TURN] == 5.0
    assert clock.readings().gap_peaks() == {TURN: 760}
    assert clock.readings().step_ms() == {"forward": 7.0, "backward": 2.0}


def test_other_graphs_between_forward_and_backward_are_not_its_loss() -> None:
    """Their calls have clocks of their own."""
    device = Device()
    record = Record(1000 + 700)
    outer, inner = device.clock(count=1, history=record), device.clock(count=1)
    recordings = [forward(device, clock) for clock in (outer, inner)]
    for recording in reversed(recordings):
        run(device, recording, "backward")
    assert outer.ready() and inner.ready()
    assert outer.readings().segment_ms()["forward"] == {"a": 1.0, "b": 2.0}
    assert outer.readings().step_ms() == {"forward": 3.0, "backward": 3.0}
    assert outer.readings().gap_peaks() == {}
    assert inner.readings().segment_ms()["forward"][TURN] == 0.0


def test_without_a_count_of_forwards_nothing_is_known_of_the_code_around_a_graph() -> None:
    device = Device()
    clock = StepClock(skip=0, count=2, events=device.events, memory=device.memory)
    for _ in range(2):
        step(device, clock)
    assert clock.ready()
    assert TURN not in clock.readings().segment_ms()["forward"]
    assert clock.readings().between_steps_ms() is None


@pytest.mark.parametrize("others", [0, 1])
def test_the_time_between_steps_is_known_where_no_other_graph_runs_there(others: int) -> None:
    device = Device()
    clock = device.clock(count=2)
    for _ in range(2):
        step(device, clock)
        device.compute(8.0)
        device.num_begun += others
    assert clock.readings().between_steps_ms() == (None if others else 8.0)


def test_a_record_ends_though_no_backward_comes() -> None:
    device = Device()
    record = Record(None)
    clock = device.clock(count=1, history=record)
    forward(device, clock)
    assert record.ended == [None]
    recording = forward(device, clock)
    assert record.ended == [False, None]
    late = forward(device, clock)
    run(device, recording, "backward")
    assert not clock.measuring
    assert late is not None
    assert record.ended == [False] * 3


def test_a_record_is_begun_until_one_tells() -> None:
    device = Device()
    device.peak = 5000
    record = Record(None)
    clock = device.clock(count=3, history=record)
    step(device, clock)
    record.peak = 1000 + 5
    step(device, clock)
    step(device, clock)
    assert clock.ready()
    assert (record.ended, clock.readings().gap_peaks()) == ([True, True], {TURN: 5})


def test_each_choice_is_recorded_for_itself() -> None:
    """The turn's bytes hold for the choice that ran; the readings say which."""
    device = Device()
    device.peak = 5000
    record = Record(1000 + 5)
    clock = device.clock(count=2, history=record)
    for signature, peak in (("first", 5), ("then", 7), ("then", 7)):
        record.peak = 1000 + peak
        step(device, clock, signature=signature)
    assert clock.ready() and record.ended == [True, True]
    readings = clock.readings()
    assert (readings.signature, readings.gap_peaks()) == ("then", {TURN: 7})


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


def test_a_step_that_ends_after_enough_was_measured_is_let_go() -> None:
    device = Device()
    clock = device.clock(count=1)
    late = forward(device, clock, signature="late")
    step(device, clock)
    assert clock.ready()
    assert run(device, late, "backward")
    assert clock.ready()
    assert clock.readings("late").step_ms() == {}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_interleaved_steps_keep_apart(order: tuple[int, int]) -> None:
    device = Device()
    clock = device.clock(count=2)
    recordings = [forward(device, clock, forward_work(device), signature=i) for i in range(2)]
    for i in order:
        run(device, recordings[i], "backward", backward_work(device))
    # The second forward began 30 bytes higher; 60 were live when the first of the backwards ran.
    assert clock.readings(0).live_before()["backward"]["a"] == (60 if order[0] == 0 else 30)
    assert clock.readings(1).live_before()["backward"]["a"] == (30 if order[0] == 1 else 0)


def test_forward_and_backward_on_two_threads() -> None:
    """Each recorder keeps to its own call while the other thread records at the same time."""
    device = Device()
    clock = device.clock(count=50)
    handed: list[StepRecording | None] = []
    turn = threading.Barrier(2, timeout=30)
    errors: list[BaseException] = []

    def meet(name: str) -> None:
        turn.wait()

    def backwards() -> None:
        try:
            for i in range(50):
                turn.wait()
                run(device, handed[i], "backward", meet)
                turn.wait()
        except BaseException as error:
            errors.append(error)
            turn.abort()

    thread = threading.Thread(target=backwards)
    handed.append(forward(device, clock, lambda name: None))
    thread.start()
    for _ in range(50):
        turn.wait()
        handed.append(forward(device, clock, meet))
        turn.wait()
    thread.join()
    assert not errors
    assert clock.ready()
    readings = clock.readings()
    assert {p: list(ms) for p, ms in readings.segment_ms().items()} == {"forward": ["a", "b"], "backward": ["a", "b"]}
    assert [len(samples) for samples in readings.samples.values()] == [50, 50]
    assert len(set(map(id, device.events._free))) == len(device.events._free)


# -- devices -----------------------------------------------------------------------------------------------------------


def test_the_clock_of_a_cpu() -> None:
    clock = step_clock_for(torch.device("cpu"), skip=0, count=2)
    for _ in range(2):
        step(Device(), clock)
    assert clock.ready()
    assert all(ms >= 0 for of_phase in clock.readings().segment_ms().values() for ms in of_phase.values())
    assert clock.readings().peak_bytes() is None


@pytest.mark.parametrize("counter", ["num_segments_compiled", "num_segments_reused"])
def test_what_fxoffload_compiles_spoils_the_step(counter: str) -> None:
    clock = step_clock_for(torch.device("cpu"), skip=0, count=1)
    run(Device(), forward(Device(), clock, lambda name: counters.add(counter)), "backward")
    assert clock.readings().step_ms() == {}
    step(Device(), clock)
    assert clock.readings().step_ms().keys() == {"forward", "backward"}
