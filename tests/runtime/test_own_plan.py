"""When graphs with plans of their own are planned together: of data, no graph is compiled."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from fxoffload.runtime.tracker.own_plan import IS_PLAIN, OwnPlan, plan_together

BUDGET = 100


def cut(peak_bytes: int, budget_bytes: int, joined: list[int]) -> Any:
    return SimpleNamespace(own_plan=OwnPlan(peak_bytes, budget_bytes, lambda: joined.append(peak_bytes)))


@pytest.mark.parametrize(
    ("peaks", "budget", "expected"),
    [
        ([60, 40], BUDGET, []),  # they fit side by side
        ([60, 41], BUDGET, [60, 41]),
        ([60, 40], 0, [60, 40]),  # without a budget, always
        ([200], BUDGET, []),  # alone
        ([], BUDGET, []),
    ],
)
def test_graphs_are_planned_together_unless_their_plans_fit(peaks: list[int], budget: int, expected: list[int]) -> None:
    joined: list[int] = []
    calls = [cut(peak, budget, joined) for peak in peaks]
    for _ in range(2):  # once
        plan_together(calls, ())
    assert joined == expected


def test_next_to_a_graph_that_is_part_of_a_plan_already() -> None:
    joined: list[int] = []
    plan_together([cut(1, BUDGET, joined), SimpleNamespace(own_plan=None)], ())
    assert joined == [1]


@pytest.mark.parametrize(("peak", "warns"), [(50, False), (51, True)])
def test_a_plain_graph_that_does_not_fit_next_to_them_is_told_once(peak: int, warns: bool) -> None:
    joined: list[int] = []
    calls, plain = [cut(50, BUDGET, joined)], OwnPlan(peak, BUDGET, IS_PLAIN)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            plan_together(calls, [plain])
    assert len(told) == warns and joined == [50] * warns
