"""Decisions exchanged one by one: never worse, within the limit, and better where a reload just does not fit."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxoffload.planner import SegmentStep, StorageInfo, TrainingStep
from fxoffload.planner.local_search import refine
from fxoffload.planner.schedule import Schedule, Scheduler
from tests.marks import examples
from tests.planner.chains import MB, decided_steps
from tests.planner.test_schedule import check, rates

many = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(decided_steps(), st.floats(0, 1.1), st.integers(0, 4), st.integers(0, 200))
def test_never_worse(decided: tuple[TrainingStep, tuple[bool, ...]], share: float, every: int, host: int) -> None:
    step, decisions = decided
    pairs = list(zip(step.candidates, decisions, strict=True))
    fixed = {c.name: go for i, (c, go) in enumerate(pairs) if i % 4 >= every and (c.moved_bytes or not go)}
    forced = sum(c.moved_bytes or 0 for c in step.candidates if fixed.get(c.name))
    on = Scheduler(step, rates(), fixed=fixed, host_bytes=forced + host * MB)
    budget = round(on.keep_all().peak_bytes * share)
    before, after = on.least_time(budget), on.least_time(budget, refined=True)
    assert (before is None) == (after is None)
    if before is None or after is None:
        return
    check(after, on)
    assert after.key <= before.key
    assert after.simulation.peak_bytes <= budget
    chosen = {c.name: go for c, go in zip(step.candidates, after.offload, strict=True)}
    assert {n: chosen[n] for n in fixed} == fixed
    assert sum(c.moved_bytes or 0 for c in step.candidates if chosen[c.name]) <= forced + host * MB


def layers(count: int, sizes_mb: tuple[int, ...], forward_ms: float) -> TrainingStep:
    """``count`` layers, each of which saves storages of these sizes and reads them in its backward."""
    storages, forward, backward = [], [], []
    for k in range(count):
        names = tuple(f"s{k}_{i}" for i in range(len(sizes_mb)))
        storages += [StorageInfo(n, mb * MB, moved_bytes=mb * MB) for n, mb in zip(names, sizes_mb, strict=True)]
        forward.append(SegmentStep(f"f{k}", f"l{k}", forward_ms, (), names))
        backward.insert(0, SegmentStep(f"b{k}", f"l{k}", 2 * forward_ms, names))
    return TrainingStep(tuple(storages), tuple(forward), tuple(backward))


@pytest.mark.parametrize("share", [0.4, 0.5, 0.6])
def test_a_decision_taken_badly_is_turned(share: float) -> None:
    """From everything offloaded, where less is enough: what waits is kept, or another goes in its place."""
    step = layers(8, (384, 384, 128, 64), 6.0)
    on = Scheduler(step, rates())
    limit = int(on.keep_all().peak_bytes * share)
    worst = on.settle((True,) * len(step.candidates), limit)
    assert worst is not None and worst.simulation.exposed_ms > 10
    found = refine(step, worst, lambda d: on.settle(d, limit), {})
    best = on.least_time(limit)
    assert best is not None
    assert found.simulation.step_ms < worst.simulation.step_ms - 5
    assert found.simulation.step_ms <= best.simulation.step_ms * 1.02


def test_the_search_is_counted_not_timed() -> None:
    """This many tries and no more, in an order that depends on the step alone: ranks find the same."""
    step = layers(8, (384, 384, 128, 64), 2.0)
    on = Scheduler(step, rates())
    limit = int(on.keep_all().peak_bytes * 0.3)
    start = on.settle((True,) * len(step.candidates), limit)
    assert start is not None

    def searched() -> list[tuple[bool, ...]]:
        asked: list[tuple[bool, ...]] = []

        def settle(offload: tuple[bool, ...]) -> Schedule | None:
            asked.append(offload)
            return on.settle(offload, limit)

        refine(step, start, settle, {})
        return asked

    first = searched()
    assert first == searched()
    assert 0 < len(first) <= 800


def test_what_does_not_wait_is_left_alone() -> None:
    step = layers(4, (8, 8), 20.0)
    on = Scheduler(step, rates())
    found = on.least_time(on.keep_all().peak_bytes)
    assert found is not None

    def settle(_: tuple[bool, ...]) -> Schedule | None:
        raise AssertionError("nothing to gain")

    assert refine(step, found, settle, {}) is found
