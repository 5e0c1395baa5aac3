"""The time between the calls of a step that is observed, and since the step before."""

from __future__ import annotations

from unittest import mock

import pytest

from fxoffload.runtime.profiler import gap_times
from fxoffload.runtime.profiler.gap_times import BetweenSteps, GapTimes
from fxoffload.runtime.profiler.stream_events import host_events
from fxoffload.step.edges import CallAt
from tests.runtime.test_step_tracker import Script

CALLS: list[CallAt] = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]


def test_every_call_has_the_time_since_the_one_before() -> None:
    now = 100.0
    events = host_events(lambda: now)
    times = GapTimes(events)
    for gap, call in zip((30.0, 1.0, 20.0, 4.0), CALLS, strict=True):
        now += gap
        times.call_begins(call)
        now += 1000.0
        times.call_ended()
    times.end()
    assert times.ms() == dict(zip(CALLS[1:], (1.0, 20.0, 4.0), strict=True))
    assert times.ms() == dict(zip(CALLS[1:], (1.0, 20.0, 4.0), strict=True))  # it is read once
    made = events.num_made
    for _ in range(made):
        events.record()
    assert events.num_made == made  # all of them came back


def test_of_a_step_that_is_not_the_expected_one_nothing_is_known() -> None:
    events = host_events()
    times = GapTimes(events)
    times.call_begins(("forward", 0))
    times.drop()
    assert times.ms() == {}


@mock.patch.object(gap_times, "_MOST_PAIRS", 4)
def test_the_least_time_between_the_newest_steps() -> None:
    now = 0.0
    events = host_events(lambda: now)
    between = BetweenSteps(events)
    assert between.least_ms() is None
    found = []
    for ms, follows in ((5.0, True), (3.0, False), (90.0, True), (8.0, True), (9.0, True), (7.0, True), (20.0, True)):
        between.step_ended()
        now += ms
        between.step_begins(follows=follows)
        now += 1000.0
        found.append(between.least_ms())
    # The second does not count; the first is forgotten when there are five.
    assert found == [5.0, 5.0, 5.0, 5.0, 5.0, 7.0, 7.0]
    made = events.num_made
    between.step_begins(follows=True)  # no step has ended
    between.step_ended()
    between.step_ended()  # without another one meanwhile
    assert events.num_made == made
    with mock.patch.object(events, "usable", lambda: False):
        between.step_begins(follows=True)
    assert between.least_ms() == 7.0


def test_times_between_steps_are_those_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a critic beside a policy. The time until the other one's step is neither's."""
    now = 0.0
    script = Script(monkeypatch, events=host_events(lambda: now))
    script.plan = lambda *args, **more: None

    def least(*steps: tuple[float, str]) -> list[float | None]:
        """The times of both models after steps, each of them so long after the one before."""
        nonlocal now
        for ms, step in steps:
            now += ms
            script.play(step)
        between = [script.graphs[name].chains.between for name in "ab"]
        return [None if found is None else found.least_ms() for found in between]

    assert least((0.0, "A a"), (3.0, "B b"), (4.0, "A a"), (2.0, "B b")) == [None, None]
    assert least((9.0, "B b"), (1.0, "A a"), (7.0, "A a"), (1.0, "B b")) == [7.0, 9.0]


@pytest.mark.parametrize("budget", [False, True])
def test_the_time_before_the_step_that_waits_for_a_plan_counts(budget: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before the second step is that of an optimizer that makes its state."""
    now = 0.0
    script, seen = Script(monkeypatch, budget=budget, events=host_events(lambda: now)), []
    script.plan = lambda tracked_graphs, found, *_: seen.append(found.between.least_ms())
    for ms in (0.0, 40.0, 20.0, 30.0):
        now += ms
        script.play("A B b a")
    assert seen == [20.0 if budget else 40.0]
