"""The search for the least peak: never worse, within its bounds, better than the proposals where these are wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxoffload.planner import SegmentStep, StorageInfo, TrainingStep, local_search
from fxoffload.planner.local_search import lower_peak as lower
from fxoffload.planner.windows import least_peak_bytes
from tests.planner.chains import MB, decided_steps
from tests.planner.test_schedule import many, scheduler

Decisions = tuple[bool, ...]


def within(step: TrainingStep, host_bytes: int) -> Callable[[Decisions], bool]:
    return lambda d: sum(c.moved_bytes or 0 for c, go in zip(step.candidates, d, strict=True) if go) <= host_bytes


def least_of_all(step: TrainingStep, fits: Callable[[Decisions], bool]) -> int:
    """By trying every choice."""
    choices = itertools.product((False, True), repeat=len(step.candidates))
    return min(least_peak_bytes(step, choice) for choice in choices if fits(choice))


@many
@given(decided_steps(), st.floats(0, 1), st.integers(0, 3))
def test_never_worse(decided: tuple[TrainingStep, Decisions], share: float, every: int) -> None:
    step, begun = decided
    moved = sum(c.moved_bytes or 0 for c, go in zip(step.candidates, begun, strict=True) if go)
    fits = within(step, round(moved * (1 + share)))
    fixed = {c.name: go for i, (c, go) in enumerate(zip(step.candidates, begun, strict=True)) if i % 4 < every}
    peak, found = lower(step, begun, fits, fixed)
    assert peak == least_peak_bytes(step, found) <= least_peak_bytes(step, begun)
    assert fits(found)
    assert all(go == fixed.get(c.name, go) for c, go in zip(step.candidates, found, strict=True))


def layers(sizes_mb: tuple[int, ...], *, input_mb: int = 0) -> TrainingStep:
    """Each segment saves one storage, which its mirror image reads; the caller holds an input for the last backward
    segment but one, which works with 50 MB."""
    count = len(sizes_mb)
    storages = [StorageInfo(f"s{k}", n * MB, moved_bytes=n * MB) for k, n in enumerate(sizes_mb)]
    if input_mb:
        storages.insert(0, StorageInfo("input", input_mb * MB, moved_bytes=input_mb * MB, is_input=True))
    forward = [
        SegmentStep(f"f{k}", f"l{k}", 1.0, ("input",) if input_mb and not k else (), (f"s{k}",)) for k in range(count)
    ]
    backward = [
        SegmentStep(
            f"b{k}",
            f"l{k}",
            1.0,
            (f"s{k}", "input") if input_mb and k == 1 else (f"s{k}",),
            temp_bytes=50 * MB if k == 1 else 0,
        )
        for k in reversed(range(count))
    ]
    return TrainingStep(tuple(storages), tuple(forward), tuple(backward))


def test_an_input_that_the_caller_holds_anyway_stays() -> None:
    """Moving it frees nothing, and its reload takes memory as well."""
    step = layers((10, 10, 10), input_mb=30)
    assert step.candidates[0].name == "input"
    expected = least_of_all(step, lambda _: True)
    assert least_peak_bytes(step, (True,) * 4) > expected
    assert lower(step, (True,) * 4, lambda _: True, {}) == (expected, (False, True, True, True))
    assert scheduler(step).smallest().simulation.peak_bytes == expected


@pytest.mark.parametrize("begun", [(True, False, False, False), (False, False, True, False), (False,) * 4])
def test_what_takes_the_place_of_another_on_the_host(begun: Decisions) -> None:
    """There is room for one of the small ones, or for the large one; the last one is read at once."""
    step = layers((10, 10, 40, 10))
    fits = within(step, 40 * MB)
    expected = least_of_all(step, fits)
    peak, found = lower(step, begun, fits, {})
    assert peak == expected
    assert fits(found)
    assert lower(step, begun, fits, {c.name: go for c, go in zip(step.candidates, begun, strict=True)})[1] == begun


def test_the_search_is_counted_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = layers((10,) * 60)
    asked = []

    def simulated(step: TrainingStep, decisions: Decisions) -> int:
        asked.append(decisions)
        return 1000 - len(asked)  # every one is better, and the search would go on

    monkeypatch.setattr(local_search, "least_peak_bytes", simulated)
    lower(step, (False,) * 60, within(step, 100 * MB), {})
    assert len(asked) == 1 + local_search._MAX_PEAK_SEGMENTS // 120
