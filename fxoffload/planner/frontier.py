"""The frontier of a plan: the budgets that can be asked for, with the peaks and times of their plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxoffload.planner.plan import FrontierPoint, PlanData, Prediction


def frontier_of(points: Iterable[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Ascending by budget; without points that take more memory or no less time than another."""
    found: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.budget_bytes, p.step_ms)):
        if not found or point.step_ms < found[-1].step_ms:
            while found and found[-1].peak_bytes >= point.peak_bytes:
                found.pop()
            found.append(point)
    return tuple(found)


def in_measured_time(plan: PlanData, predicted: Prediction, baseline: Prediction) -> tuple[FrontierPoint, ...]:
    """The frontier of a plan whose step was measured since. The plan's own point has its measured peak and
    time; the others take as much longer than their estimates as plain Inductor's step does.

    Args:
        predicted: the plan's step, measured.
    """
    longer = baseline.step_ms / plan.baseline.step_ms if plan.baseline.step_ms else 1.0
    points = []
    for point in plan.frontier:
        if (point.peak_bytes, point.step_ms) == (plan.predicted.peak_bytes, plan.predicted.step_ms):
            more = max(predicted.peak_bytes - point.peak_bytes, 0)
            points.append(FrontierPoint(point.budget_bytes + more, predicted.peak_bytes, predicted.step_ms))
        else:
            points.append(replace(point, step_ms=longer * point.step_ms))
    return frontier_of(points)
