"""Threads that make a plan stand still while the host launches a step."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from fxoffload.runtime import background, step_first
from fxoffload.runtime.step_first import StepFirst
from tests.support import set_when_a_step_waits


class Plan:
    """Counts calls of Python functions, as fast as it may."""

    def __init__(self, steps: StepFirst) -> None:
        self.count = 0
        self._steps = steps
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.wait_for_more()

    def _run(self) -> None:
        with self._steps.planning():
            while self._is_wanted:
                self._step()

    def _step(self) -> None:
        self.count += 1

    def wait_for_more(self) -> None:
        now, end = self.count, time.monotonic() + 10.0
        while self.count == now:
            assert time.monotonic() < end, "it stands still"
            time.sleep(1e-3)

    def end(self) -> None:
        self._is_wanted = False
        self._thread.join()


@pytest.fixture
def steps() -> StepFirst:
    return StepFirst()


@pytest.fixture
def plan(steps: StepFirst) -> Iterator[Plan]:
    found = Plan(steps)
    yield found
    found.end()


def settled(plan: Plan) -> int:
    """Its count, once it has seen what it was told."""
    time.sleep(0.02)
    return plan.count


@pytest.mark.parametrize("ends", ["launched", "waits"])
def test_a_plan_stands_still_until_the_step_was_launched(
    ends: str, steps: StepFirst, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or until the host waits for the device."""
    monkeypatch.setattr(step_first, "_LAUNCH_S", 20.0)
    monkeypatch.setattr(step_first, "_MOST_WAIT_S", 20.0)
    steps.launches()
    before = settled(plan)
    time.sleep(0.04)
    assert plan.count == before
    getattr(steps, ends)()
    plan.wait_for_more()
    assert steps.waited_s > 0.05


def test_a_host_that_launches_nothing_more_is_not_waited_for(
    steps: StepFirst, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for a lock that the plan has."""
    monkeypatch.setattr(step_first, "_MOST_WAIT_S", 1e9)
    began = time.monotonic()
    steps.launches()
    settled(plan)
    plan.wait_for_more()
    assert time.monotonic() - began >= step_first._LAUNCH_S


def test_a_host_that_launches_all_the_time_leaves_a_part(
    steps: StepFirst, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_first, "_MOST_WAIT_S", 0.05)
    steps.launches()
    before, end = settled(plan), time.monotonic() + 10.0
    while plan.count == before:
        assert time.monotonic() < end, "it stands still"
        steps.launches()
        time.sleep(1e-3)


def test_without_a_plan_nothing_is_noted(steps: StepFirst) -> None:
    steps.launches()
    steps.launched()
    with steps.planning():
        steps._wait()
    assert steps.waited_s == 0.0
    steps.launches()
    steps._wait()
    assert steps.waited_s == 0.0, "the plan is made"


def test_plans_in_the_background_stand_still() -> None:
    found: list[object] = []
    background.start_planning(lambda: found.append(sys.getprofile()), name="plan").join()
    assert found == [step_first.STEP_FIRST._wait]


def test_a_plan_that_the_host_waits_for_is_not_asked(steps: StepFirst, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the host goes on."""
    monkeypatch.setattr(step_first, "_LAUNCH_S", 20.0)
    monkeypatch.setattr(step_first, "_MOST_WAIT_S", 20.0)
    is_there, goes_on, has_stood_still = threading.Event(), threading.Event(), threading.Event()
    asked: list[bool] = []

    def look() -> None:
        asked.append(sys.getprofile() is not None)

    def plan() -> None:
        with steps.planning():
            look()
            is_there.set()
            steps.give_way()
            look()
            goes_on.wait()
            has_stood_still.set()

    thread = threading.Thread(target=plan)
    with steps.waiting_for_plan(is_there.is_set):
        thread.start()
        assert is_there.wait(10.0)
    while len(asked) < 2:  # the host launches: its plan stands still until it waits for the device
        steps.waits()
        time.sleep(1e-3)
    steps.launches()
    goes_on.set()
    time.sleep(0.05)
    assert not has_stood_still.is_set()
    steps.waits()
    thread.join(10.0)
    assert has_stood_still.is_set()
    assert asked == [False, True]


@pytest.mark.parametrize("waits", [True, False])
def test_who_waits_for_a_plan_does_not_hold_it_up(waits: bool) -> None:
    found: list[bool] = []
    begin = threading.Event()

    def plan() -> None:
        begin.wait(10.0)
        len("")
        found.append(sys.getprofile() is None)

    thread = background.start_planning(plan, name="plan")
    if waits:
        set_when_a_step_waits(begin)
        background.join_planning(thread)
    else:
        begin.set()
        thread.join()
    assert found == [waits]


def test_a_wait_that_is_interrupted_is_over(steps: StepFirst) -> None:
    with pytest.raises(KeyboardInterrupt), steps.waiting_for_plan(lambda: False):
        raise KeyboardInterrupt
    seen: list[bool] = []

    def plan() -> None:
        with steps.planning():
            seen.append(sys.getprofile() is not None)

    thread = threading.Thread(target=plan)
    thread.start()
    thread.join(10.0)
    assert seen == [True]


def test_a_profile_function_of_the_users_stays(steps: StepFirst) -> None:
    seen: list[str] = []

    def run() -> None:
        mine = lambda *_: seen.append("called")  # noqa: E731
        sys.setprofile(mine)
        with steps.planning():
            assert sys.getprofile() is mine
        assert sys.getprofile() is mine
        sys.setprofile(None)
        with steps.planning():
            assert sys.getprofile() is not None
        assert sys.getprofile() is None
        seen.append("done")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen[-1] == "done"
