"""The scheduler: its answer holds in the simulation, and no simple schedule is better."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxoffload.machine.shelf import load_profile
from fxoffload.planner import TrainingStep, simulate
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.windows import least_peak_bytes, windows_for
from tests.marks import examples
from tests.planner.chains import MB, decided_steps, training_steps
from tests.planner.test_windows import chain, unbounded

many = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@functools.cache
def rates() -> ProfileRates:
    return ProfileRates(load_profile("h200"))


def scheduler(step: TrainingStep, **changes: Any) -> Scheduler:
    return Scheduler(step, rates(), **changes)


def check(found: Schedule, on: Scheduler) -> None:
    """A schedule is what the simulation says of it."""
    assert len(found.offload) == len(on.step.candidates)
    again = simulate(on.step, found.offload, copies=rates(), windows=found.windows)
    assert again == found.simulation


def all_moved(step: TrainingStep) -> tuple[bool, ...]:
    return (True,) * len(step.candidates)


@many
@given(training_steps(), st.floats(0, 1.1))
def test_within_the_budget_and_no_slower_than_plain_choices(step: TrainingStep, share: float) -> None:
    on = scheduler(step)
    keep = on.keep_all()
    least = least_peak_bytes(step, all_moved(step))
    budget = round(least + share * max(keep.peak_bytes - least, MB))
    found = on.least_time(budget)
    plain = [keep.step_ms] if keep.peak_bytes <= budget else []
    windows = windows_for(step, all_moved(step), budget)
    if windows is not None:
        plain.append(simulate(step, all_moved(step), copies=rates(), windows=windows).step_ms)
    if found is None:
        assert not plain
        return
    check(found, on)
    assert found.simulation.peak_bytes <= budget
    assert found.simulation.step_ms <= min(plain, default=float("inf")) + 1e-3


@many
@given(decided_steps(), st.floats(0, 1.1), st.integers(0, 3))
def test_fixed_decisions(decided: tuple[TrainingStep, tuple[bool, ...]], share: float, every: int) -> None:
    step, decisions = decided
    pairs = list(zip(step.candidates, decisions, strict=True))
    fixed = {c.name: go for i, (c, go) in enumerate(pairs) if i % 4 >= every and (c.moved_bytes or not go)}
    on = scheduler(step, fixed={**fixed, "something else": True})
    keep = simulate(
        step, tuple(fixed.get(c.name, False) for c in step.candidates), copies=rates(), windows=unbounded(step)
    )
    for found in (
        on.least_time(round(keep.peak_bytes * (0.5 + share))),
        on.smallest(),
        on.least_peak(keep.step_ms * 2),
    ):
        if found is None:
            continue
        check(found, on)
        chosen = {c.name: go for c, go in zip(step.candidates, found.offload, strict=True)}
        assert {n: chosen[n] for n in fixed} == fixed
    assert on.with_step(step, on.host_bytes).fixed == fixed


@many
@given(training_steps())
def test_the_smallest(step: TrainingStep) -> None:
    on = scheduler(step)
    found = on.smallest()
    check(found, on)
    peak = found.simulation.peak_bytes
    assert peak <= min(on.keep_all().peak_bytes, least_peak_bytes(step, all_moved(step)))
    again = on.least_time(peak)
    assert again is not None
    assert again.simulation.peak_bytes <= peak
    assert again.key <= found.key
    assert on.least_time(peak - 1) is None


@many
@given(training_steps(), st.floats(0, 0.5))
def test_the_least_peak(step: TrainingStep, slowdown: float) -> None:
    on = scheduler(step)
    keep = on.keep_all()
    max_ms = keep.step_ms * (1 + slowdown)
    found = on.least_peak(max_ms)
    assert found is not None
    check(found, on)
    assert found.simulation.step_ms <= max_ms
    assert found.simulation.peak_bytes <= keep.peak_bytes
    windows = windows_for(step, all_moved(step), found.simulation.peak_bytes - 1)
    if windows is not None and found.simulation.peak_bytes < keep.peak_bytes:
        offload_all = simulate(step, all_moved(step), copies=rates(), windows=windows)
        # To one percent: that is how far the search goes.
        assert offload_all.step_ms > max_ms - 1e-9 or offload_all.peak_bytes > found.simulation.peak_bytes * 0.97


@many
@given(training_steps(), st.floats(0, 1.1), st.integers(0, 200), st.integers(0, 200))
def test_the_users_bounds(step: TrainingStep, share: float, down: int, up: int) -> None:
    on = scheduler(step, in_flight_budget=down * MB, prefetch_budget=up * MB)
    budget = round(on.keep_all().peak_bytes * share)
    for found in (on.least_time(budget), on.smallest()):
        if found is None:
            continue
        check(found, on)
        assert max(found.windows.in_flight, default=0) <= down * MB
        assert max(found.windows.ahead, default=0) <= up * MB


@pytest.mark.slow
@many
@given(training_steps(), st.integers(0, 100))
def test_the_host(step: TrainingStep, host: int) -> None:
    on = scheduler(step, host_bytes=host * MB)
    keep = on.keep_all()
    for found in (
        on.least_time(keep.peak_bytes),
        on.least_time(keep.peak_bytes // 2),
        on.smallest(),
        on.least_peak(keep.step_ms * 2),
    ):
        if found is None:
            continue
        check(found, on)
        assert found.simulation.bytes_offloaded <= host * MB
    assert on.with_step(step, on.host_bytes).host_bytes == host * MB


def test_a_step_without_candidates() -> None:
    step = chain(0)
    on = scheduler(step)
    found = on.least_time(0)
    assert found is not None
    assert (found.offload, found.simulation.step_ms) == ((), 0.0)
    assert on.smallest().simulation.peak_bytes == 0
    assert on.least_peak(0.0) is not None


def test_the_objective_is_a_bound() -> None:
    """Copies that hide, then copies that do not."""
    step = chain(6, 8 << 20)  # 1 ms a segment, 0.15 ms a copy
    on = scheduler(step)
    keep = on.keep_all()
    assert keep.peak_bytes == 48 << 20
    fast = on.least_peak(keep.step_ms)
    assert fast is not None
    assert fast.simulation.exposed_ms == pytest.approx(0.0, abs=1e-9)
    assert fast.simulation.peak_bytes <= 24 << 20
    assert on.smallest().simulation.peak_bytes == 8 << 20
    assert on.least_peak(keep.step_ms * 0.9) is None
