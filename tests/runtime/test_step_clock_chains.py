"""The clock of a step of several calls, in a time of its own."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fxoffload.runtime.profiler import step_clock
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.profiler.step_clock import StepClock, StepRecording, step_clock_for
from fxoffload.runtime.profiler.stream_events import host_events
from fxoffload.step.call_order import CallOrder
from fxoffload.step.segment_names import TURN, entry_of, segment_of


class Time:
    """Stands still unless a test lets it pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.epoch = 0
        self.memory = Memory(1000, 1000)

    def clock(self, num_calls: int = 2, **changes: Any) -> StepClock:
        given = {"skip": 0, "count": 1, "events": host_events(lambda: self.now), "epoch": lambda: self.epoch}
        return StepClock(num_calls, **{**given, **changes})

    def allocate(self, nbytes: int) -> None:
        allocated = self.memory.allocated + nbytes
        self.memory = Memory(allocated, max(allocated, self.memory.peak))

    def call(
        self, step: StepRecording, phase: Any, number: int, segments: dict[str, float], inside: float = 0.0
    ) -> None:
        recorder = step.begin(phase, number)
        assert recorder is not None
        for name, ms in segments.items():
            self.now += inside
            recorder.before(name)
            self.now += ms
            recorder.after(name)
        recorder.end()

    def step(self, clock: StepClock, gaps: Iterator[float] | None = None, inside: float = 0.0) -> StepRecording | None:
        """Two calls; what lies between the calls takes ``gaps``."""
        gaps = gaps or itertools.repeat(0.0)
        step = clock.begin_step()
        if step is None:
            return None
        self.call(step, "forward", 0, {"a": 1.0, "b": 2.0}, inside)
        self.now += next(gaps)
        self.call(step, "forward", 1, {"a": 3.0}, inside)
        self.now += next(gaps)
        self.call(step, "backward", 1, {"a": 4.0}, inside)
        self.now += next(gaps)
        self.call(step, "backward", 0, {"a": 5.0, "b": 6.0}, inside)
        return step


def test_a_chain_of_one_call_has_a_turn() -> None:
    """Its segments are the chain's, and what lies between its forward and its backward is timed."""
    time = Time()
    clock = time.clock(1)
    step = clock.begin_step()
    assert step is not None
    time.call(step, "forward", 0, {"a": 1.0, "b": 2.0})
    time.now += 5.0
    time.call(step, "backward", 0, {"a": 4.0})
    step.end()
    assert clock.ready()
    assert clock.readings().segment_ms() == {
        "forward": {"call 0/entry": 0.0, "call 0/a": 1.0, "call 0/b": 2.0, TURN: 5.0},
        "backward": {"call 0/a": 4.0},
    }
    assert clock.readings().step_ms() == {"forward": 8.0, "backward": 4.0}


def test_names() -> None:
    assert entry_of("forward", 3) == "call 3/entry"
    assert entry_of("backward", 3) == "call 3/backward entry"
    assert segment_of(3, "layers_0") == "call 3/layers_0"


def test_a_step_from_the_first_forward_to_the_last_backward() -> None:
    time = Time()
    clock = time.clock()
    step = time.step(clock, iter((10.0, 20.0, 40.0)), inside=0.5)
    assert step is not None
    time.now += 1000.0  # the optimizer
    assert not clock.ready()
    step.end()
    assert clock.ready() and not clock.measuring and not clock.gave_up()
    found = clock.readings()
    assert found.segment_ms() == {
        "forward": {
            "call 0/entry": 0.0,
            "call 0/a": 1.0,
            "call 0/b": 2.0,
            "call 1/entry": 10.0,
            "call 1/a": 3.0,
            TURN: 20.0,
        },
        "backward": {"call 1/a": 4.0, "call 0/backward entry": 40.0, "call 0/a": 5.0, "call 0/b": 6.0},
    }
    # The forward ends where the first backward begins.
    assert found.step_ms() == {"forward": 6.0 + 30.0 + 3 * 0.5, "backward": 15.0 + 40.0 + 3 * 0.5}
    assert found.peak_bytes() is None


def test_forwards_and_backwards_in_turn() -> None:
    """A call, and the gap before it, count for its phase; there is no turn."""
    time, order = (
        Time(),
        CallOrder((("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1), ("backward", 2))),
    )
    clock = time.clock(3, order=order)
    step = clock.begin_step()
    assert step is not None
    for at, (phase, call) in enumerate(order.calls):
        time.now += 10.0 * at
        time.call(step, phase, call, {"a": 1.0 + at}, inside=0.5)
    step.end()
    assert clock.readings().segment_ms() == {
        "forward": {
            "call 0/entry": 0.0,
            "call 0/a": 1.0,
            "call 1/entry": 10.0,
            "call 1/a": 2.0,
            "call 2/entry": 30.0,
            "call 2/a": 4.0,
        },
        "backward": {
            "call 0/backward entry": 20.0,
            "call 0/a": 3.0,
            "call 1/backward entry": 40.0,
            "call 1/a": 5.0,
            "call 2/backward entry": 50.0,
            "call 2/a": 6.0,
        },
    }
    assert clock.readings().step_ms() == {"forward": 47.0 + 3 * 0.5, "backward": 124.0 + 3 * 0.5}
    assert clock.readings().waits_ms()["forward"]["call 2/a"] == 0.5


def test_another_order_than_the_expected_one_does_not_count() -> None:
    time = Time()
    clock = time.clock(2, order=CallOrder((("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1))))
    step = clock.begin_step()
    assert step is not None
    for call in range(2):
        time.call(step, "forward", call, {"a": 1.0})
    assert step.begin("backward", 1) is None  # the usual one
    step.end()
    assert not clock.ready()


def test_medians_of_steps_behind_those_that_are_skipped() -> None:
    time = Time()
    clock = time.clock(skip=2, count=3)
    found = []
    for gap in (999.0, 999.0, 1.0, 50.0, 2.0, 999.0):
        step = time.step(clock, itertools.repeat(gap))
        found.append(step is not None)
        if step is not None:
            step.end()
    assert found == [False, False, True, True, True, False]
    assert clock.readings().segment_ms()["forward"][TURN] == 2.0


def test_nothing_is_recorded_once_enough_was() -> None:
    time = Time()
    events = host_events(lambda: time.now)
    memory = mock.Mock(return_value=Memory(0, 0))
    clock = time.clock(events=events, memory=memory)
    step = time.step(clock)
    assert step is not None
    step.end()
    reads = memory.call_count
    with mock.patch.object(events, "record", side_effect=AssertionError):
        assert time.step(clock) is None
    assert memory.call_count == reads


def test_bytes_are_those_of_the_whole_step() -> None:
    time = Time()
    clock = time.clock(memory=lambda: time.memory)
    step = clock.begin_step()
    assert step is not None
    made = [100, 200, 400, -300]
    for (phase, number), nbytes in zip(
        (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)), made, strict=True
    ):
        recorder = step.begin(phase, number)  # type: ignore[arg-type]
        assert recorder is not None
        recorder.before("a")
        time.allocate(50)
        time.allocate(nbytes - 50)
        recorder.after("a")
        recorder.end()
        if (phase, number) == ("forward", 1):
            time.allocate(5000)  # the head
            time.allocate(-5000)
    step.end()
    found = clock.readings()
    assert found.live_before() == {
        "forward": {"call 0/a": 0, "call 1/a": 100},
        "backward": {"call 1/a": 300, "call 0/a": 700},
    }
    assert found.live_after()["backward"] == {"call 1/a": 700, "call 0/a": 400}
    assert found.temp_bytes()["forward"] == {"call 0/a": 100, "call 1/a": 200}
    assert found.peak_bytes() == 5300
    assert time.memory.peak == 6300  # never reset


def test_steps_that_do_not_count() -> None:
    time = Time()
    clock = time.clock(count=2)

    def begun() -> StepRecording:
        step = clock.begin_step()
        assert step is not None
        return step

    step = begun()  # not to its end
    time.call(step, "forward", 0, {"a": 1.0})
    step.end()
    step = begun()  # in another order
    time.call(step, "forward", 0, {"a": 1.0})
    assert step.begin("backward", 0) is None
    assert step.begin("forward", 1) is None
    step.end()
    step = begun()  # a call that raised
    assert step.begin("forward", 0) is not None
    assert step.begin("forward", 1) is None
    step = begun()  # something is compiled
    time.call(step, "forward", 0, {"a": 1.0})
    time.epoch += 1
    time.call(step, "forward", 1, {"a": 1.0})
    assert step.begin("backward", 1) is None
    found = time.step(clock)  # thrown away at the end
    assert found is not None
    found.drop()
    found.end()
    assert not clock.ready() and clock.measuring
    assert clock.readings().segment_ms() == {"forward": {}, "backward": {}}


def test_it_gives_up() -> None:
    time = Time()
    clock = time.clock(count=2)
    for _ in range(8):
        step = clock.begin_step()
        assert step is not None
        step.drop()
    assert not clock.gave_up()
    assert clock.begin_step() is None
    assert clock.gave_up() and not clock.ready()


def test_events_are_used_again() -> None:
    time = Time()
    events = host_events(lambda: time.now)
    clock = time.clock(count=3, events=events)
    made = []
    for drop in (False, True, False, True, False):
        step = time.step(clock)
        assert step is not None
        if drop:
            step.drop()
        else:
            step.end()
        assert clock.ready() is (len(made) == 4)  # which reads
        made.append(events.num_made)
    assert made[1] <= made[0] + 1  # that at the end of the last step, which the next one takes
    assert len(set(made[1:])) == 1


def test_the_time_between_two_steps_that_follow_each_other() -> None:
    time = Time()
    clock = time.clock(skip=1, count=3)
    dropped = 3
    for place, between in enumerate((0.0, 30.0, 7.0, 99.0, 5.0)):
        time.now += between
        step = time.step(clock, itertools.repeat(1.0))
        if step is None:
            continue
        time.now += 0.5
        if place == dropped:
            step.drop()
        else:
            step.end()
    found = clock.readings()
    # Of the second and the third; nothing is known of the fifth, whose step before did not count.
    assert [s.after_step_ms for s in found.samples["forward"]] == [None, 7.5, None]
    assert found.between_steps_ms() == 7.5
    assert time.clock().readings().between_steps_ms() is None
    clock = time.clock(skip=0, count=2)
    for _ in range(2):
        step = clock.begin_step(follows=False)  # another model's came between
        assert step is not None
        for phase, number in (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)):
            time.call(step, phase, number, {"a": 1.0})
        step.end()
    assert clock.readings().between_steps_ms() is None


def test_a_capture_is_left_alone() -> None:
    time = Time()
    events = host_events(lambda: time.now)
    clock = time.clock(events=events)
    step = time.step(clock)
    assert step is not None
    step.end()
    with mock.patch.object(events, "usable", lambda: False):
        assert not clock.ready()
    assert clock.ready()
    other = time.clock(events=events)
    with mock.patch.object(events, "usable", lambda: False):
        assert other.begin_step() is None
    assert other.begin_step() is not None


def test_what_fails_is_told_once() -> None:
    time = Time()
    memory = mock.Mock(side_effect=RuntimeError("no such counter"))
    clock = time.clock(memory=memory, count=2)
    step = clock.begin_step()
    assert step is not None
    with pytest.warns(UserWarning, match="goes on with its plan as it is: RuntimeError: no such counter"):
        assert step.begin("forward", 0) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step.begin("forward", 1) is None
        step.end()
        clock.fail(RuntimeError("again"))
        assert clock.begin_step() is None
    assert clock.gave_up()


def test_what_it_is_given() -> None:
    with pytest.raises(ValueError, match="expected calls"):
        Time().clock(0)
    with pytest.raises(ValueError, match="skip of 0 or more and count of 1 or more, found 2, -1 and 3"):
        Time().clock(skip=-1, count=3)
    with pytest.raises(ValueError, match="found 2, 0 and 0"):
        Time().clock(count=0)
    clock = step_clock_for(torch.device("cpu"), 2)
    assert clock.begin_step() is None  # the first is skipped
    assert clock.begin_step() is not None


@pytest.mark.parametrize("records", [True, False])
def test_the_clock_of_a_gpu_records_unless_it_may_not(monkeypatch: pytest.MonkeyPatch, records: bool) -> None:
    begun: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(step_clock, "cuda_events", lambda device: host_events())
    monkeypatch.setattr(step_clock, "cuda_memory", lambda device: lambda: Memory(0, 0))
    monkeypatch.setattr(step_clock, "cuda_history", lambda device: lambda: begun.append("record"))
    clock = step_clock_for(torch.device("cuda"), 2, records=records)
    assert clock.begin_step() is not None and clock.begin_step() is not None
    assert len(begun) == records


@pytest.mark.parametrize("others", [0, 1000])
@pytest.mark.parametrize("gone", ["forward", "turn", "in another step"])
def test_what_the_first_call_is_given_for_the_step_alone_counts(others: int, gone: str) -> None:
    time = Time()
    known = 64 if gone == "in another step" else 0
    clock = time.clock(memory=lambda: time.memory, left_bytes=others, first_bytes=known)
    stays, gathered = torch.ones(8), torch.ones(16)
    step = clock.begin_step()
    assert step is not None
    step.given(0, [stays, gathered])
    time.call(step, "forward", 0, {"a": 1.0})
    if gone == "forward":
        gathered.untyped_storage().resize_(0)
    time.allocate(-64)
    step.given(1, [torch.ones(4)])
    time.allocate(100)
    for phase, number in (("forward", 1), ("backward", 1), ("backward", 0)):
        time.call(step, phase, number, {"a": 1.0})
        if gone == "turn":
            gathered.untyped_storage().resize_(0)
    step.end()
    live = clock.readings().live_before()
    assert live["forward"] == {"call 0/a": others + 64, "call 1/a": others + 100}
    assert live["backward"] == {"call 1/a": others + 100, "call 0/a": others + 100}
    assert clock.readings().gap_peaks()["turn entry"] == others + 100
