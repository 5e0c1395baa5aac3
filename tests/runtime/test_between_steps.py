"""Which steps the time between two steps is taken from: those that run before the plan is followed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxoffload.runtime.profiler.stream_events import host_events
from tests.runtime.test_step_tracker import Script


def test_steps_without_a_plan_count_and_those_that_follow_another_one_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    script = Script(monkeypatch)
    script.tracker._events = host_events(lambda: now)
    chains = script.graphs["a"].chains

    def step(ms: float) -> str:
        nonlocal now
        now += ms
        return script.play("A B b a")

    def least_ms() -> float | None:
        return None if chains.between is None else chains.between.least_ms()

    step(9.0)
    step(8.0)
    step(7.0)  # follows the plan
    step(1.0)
    assert least_ms() == 7.0
    (chain,) = chains.all
    plan = chain.plan
    assert plan is not None
    chain.plan, chain.meanwhile = None, replace(plan)
    chains.is_planning = True
    step(50.0)  # after one that followed the plan
    assert step(3.0) == "following complete"
    assert least_ms() == 3.0
    chain.plan, chain.meanwhile = plan, None
    step(2.0)
    step(1.0)
    assert least_ms() == 3.0
