"""The time between the calls of a step that is observed, and since the step before."""

from __future__ import annotations

import pytest

from fxoffload.runtime.profiler.gap_times import GapTimes
from fxoffload.runtime.profiler.stream_events import host_events
from fxoffload.step.edges import CallAt

CALLS: list[CallAt] = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]


@pytest.mark.parametrize("knows_before", [True, False])
def test_every_call_has_the_time_since_the_one_before(knows_before: bool) -> None:
    now = 100.0
    events = host_events(lambda: now)
    after = events.record() if knows_before else None
    times = GapTimes(events, after)
    for gap, call in zip((30.0, 1.0, 20.0, 4.0), CALLS, strict=True):
        now += gap
        times.call_begins(call)
        now += 1000.0
        times.call_ended()
    times.end()
    found = times.ms()
    assert found.pop(("forward", 0), None) == (30.0 if knows_before else None)
    assert found == dict(zip(CALLS[1:], (1.0, 20.0, 4.0), strict=True))
    assert times.ms().keys() - {("forward", 0)} == found.keys()  # it is read once
    made = events.num_made
    for _ in range(made):
        events.record()
    assert events.num_made == made  # all of them came back


def test_of_a_step_that_is_not_the_expected_one_nothing_is_known() -> None:
    events = host_events()
    times = GapTimes(events, events.record())
    times.call_begins(("forward", 0))
    times.drop()
    assert times.ms() == {}
    assert events.num_made == 2
