"""How true a plan was: its predictions, before anything ran and calibrated, against later measurements."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.schema import Result

# Last steps before the timed ones: they follow the calibrated plan. In earlier ones variants compile, and the host is
# late.
_CALIBRATED_STEPS = 8


def plan_row(result: Result) -> dict[str, Any]:
    """Errors as fractions of the measured value (positive: predicted too much), and whether the budget was met.

    The budget holds for the first step and for every timed one. A peak of a step is above the bytes at its beginning.
    """
    row: dict[str, Any] = {}
    memory, first, budget = result.memory, result.first_step_memory, result.budget_bytes
    if budget is not None:
        row["budget_bytes"] = budget
        row["peak_within_budget"] = memory.peak_bytes <= budget if memory else None
        row["first_step_within_budget"] = first.peak_bytes <= budget if first else None
    if first is not None and memory is not None and memory.peak_bytes:
        row["first_step_peak_vs_peak"] = first.peak_bytes / memory.peak_bytes
    plan = result.plan
    if plan is None:
        return row
    row.update(_errors("predicted", plan.predicted, plan.between_steps_ms, result))
    if plan.calibrated is not None:
        # A graph's own plan says nothing about the time between steps, though it was measured.
        between = None if plan.between_steps_ms is None else plan.calibrated_between_steps_ms
        row.update(_errors("calibrated", plan.calibrated, between, result))
    row["predicted_exposed_ms"] = plan.predicted.get("exposed_ms")
    row["predicted_slowdown"] = _slowdown(plan.predicted, plan.baseline)
    row["calibrated_slowdown"] = _slowdown(plan.calibrated, plan.calibrated_baseline)
    row["peak_set_by"] = f"{plan.predicted.get('peak_segment')} ({plan.predicted.get('peak_phase')})"
    row["planning_s"] = plan.planning_s
    return row


def slowest_step_ms(result: Result) -> float:
    """The median step of the slowest rank: the others wait for it somewhere. Of steps in a row it is the mean: where
    one rank waits, another's median step may be a short one.

    Raises:
        ValueError: no step was timed.
    """
    if result.step_ms is None:
        raise ValueError("expected timed steps, found none")
    if result.stock is not None and result.stock.row_ms is not None:
        return result.stock.row_ms
    return max([result.step_ms.median, *result.step_ms_by_rank])


def _errors(prefix: str, said: dict[str, Any], between_ms: float | None, result: Result) -> dict[str, Any]:
    """Of several graphs a plan says the time between steps too: then AdamW counts, and what runs before the first graph
    and after the last."""
    said_ms, step_ms = said.get("step_ms"), result.step_ms.median if result.step_ms else None
    if result.stock is not None and result.stock.row_ms is not None:
        step_ms = result.stock.row_ms
    idle_ms = idle_before_steps_ms(result, prefix)
    if None not in (said_ms, step_ms, between_ms, idle_ms) and result.optimizer_ms is not None:
        said_ms, step_ms = said_ms + between_ms - idle_ms, step_ms + result.optimizer_ms.median  # type: ignore[operator]
    peak, traced = _peak_under(prefix, result), result.traced_peak
    without = traced.peak_without_returned_gradients_bytes if traced else None
    return {
        f"{prefix}_peak_error": _error(said.get("peak_bytes"), peak),
        f"{prefix}_peak_without_gradients_error": _error(said.get("peak_without_gradients_bytes"), without),
        f"{prefix}_step_error": _error(said_ms, step_ms),
    }


def _peak_under(prefix: str, result: Result) -> int | None:
    """The peak of steps that follow the plan: before it was calibrated, which may change it, or after that."""
    run = result.stock
    if prefix == "predicted" and run is not None and run.uncalibrated_peak_bytes is not None:
        return run.uncalibrated_peak_bytes
    return result.memory.peak_bytes if result.memory else None


def idle_before_steps_ms(result: Result, prefix: str) -> float | None:
    """How long the harness held the device up before a step: next to nothing where steps follow one another, 12 to 35
    ms in files of before that. None: not known.

    It counts where the plan saw the time between steps: the least before there was a plan, later the last ones' median.
    """
    run, plan = result.stock, result.plan
    if run is None or plan is None:
        return None
    if prefix == "predicted":
        return min(
            (fact.idle_ms for fact in run.steps[: plan.frozen_after_steps] if fact.idle_ms is not None), default=None
        )
    after = run.steps[plan.frozen_after_steps : plan.calibrated_after_steps][-_CALIBRATED_STEPS:]
    known = [fact.idle_ms for fact in after if fact.idle_ms is not None]
    return statistics.median(known) if known else None


def _error(said: float | None, measured: float | None) -> float | None:
    return said / measured - 1 if said is not None and measured else None


def _slowdown(plan: dict[str, Any] | None, baseline: dict[str, Any] | None) -> float | None:
    if plan is None or baseline is None or not baseline.get("step_ms"):
        return None
    return plan["step_ms"] / baseline["step_ms"] - 1
