"""Frontiers of budgets: without dominated points, and in measured time."""

from __future__ import annotations

from dataclasses import replace

from fxoffload.planner.frontier import frontier_of, in_measured_time
from fxoffload.planner.plan import FrontierPoint
from tests.planner.test_plan import GIB, bare_plan, prediction


def test_points_that_are_worse_than_another_are_left_out() -> None:
    best, least = FrontierPoint(100, 100, 1.0), FrontierPoint(50, 50, 2.0)
    slower, larger = FrontierPoint(80, 80, 2.0), FrontierPoint(40, 60, 3.0)
    assert frontier_of([best, slower, larger, least]) == (least, best)


def test_a_measured_step_stretches_the_others_and_is_one_of_them() -> None:
    drafted, measured, plain = (prediction(1, 1.25), prediction(1.25, 5.5), prediction(2, 1.0))
    frontier = (
        FrontierPoint(GIB // 2, GIB // 2, 2.0),
        FrontierPoint(GIB + 9, GIB, 1.25),
        FrontierPoint(2 * GIB, 2 * GIB, 1.0),
    )
    plan = replace(bare_plan(), baseline=plain, predicted=drafted, frontier=frontier)
    assert in_measured_time(plan, measured, replace(plain, step_ms=5.0)) == (
        FrontierPoint(GIB // 2, GIB // 2, 10.0),
        FrontierPoint(5 * GIB // 4 + 9, 5 * GIB // 4, 5.5),
        FrontierPoint(2 * GIB, 2 * GIB, 5.0),
    )
