"""The record of a stock model: promises against measurements. One row of ``Report.derived``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.schema import Record, Result
from benchmarks.truth import slowest_step_ms

_LEAST = re.compile(r"activation_budget of at least .*?\((\d+)\s+bytes\)")
NUM_WORST = 3


def stock_row(record: Record, same_case: Sequence[Record]) -> dict[str, Any]:
    """Fields besides those of ``truth.plan_row``. Gains are parts of plain Inductor's peak; positive is less memory."""
    result, run = record.result, record.result.stock
    row: dict[str, Any] = {}
    if record.variant.options.get("activation_budget") is not None:
        row["refused"] = refusal(record) is not None
        if row["refused"]:
            row["refused_rightly"] = is_refused_rightly(record, same_case)
            row["least_budget_named_bytes"] = refusal(record)
    if run is None:
        return row
    row["plan_after_steps"] = run.plan_after_steps
    row["slowest_step_before_plan_ms"] = slowest_before_plan_ms(result)
    row["num_graphs"] = result.num_graphs_first_step
    if result.optimizer_ms is not None and result.step_ms is not None:
        row["whole_step_ms"] = slowest_step_ms(result) + result.optimizer_ms.median
    if result.budget_bytes is not None:
        row["budget_met_from_step"] = met_from_step(result)
    row["gain_stated"], row["slowdown_stated"] = stated(result)
    inductor = next((r for r in same_case if r.variant.label == "inductor"), None)
    row["gain_measured"], row["slowdown_measured"] = measured(record, inductor)
    row["worst_estimates"] = worst_estimates(result)
    return row


def refusal(record: Record) -> int | None:
    """The smallest budget that a BudgetError named; None where the budget was not refused."""
    found = _LEAST.search(record.reason)
    return int(found[1]) if found else None


def is_refused_rightly(record: Record, same_case: Iterable[Record]) -> bool | None:
    """Whether no plan of this case had a peak within the budget; None where no peak was measured."""
    budget = record.result.budget_bytes
    peaks = [p for r in same_case if r.variant.kind == "auto" and (p := peak_of(r.result)) is not None]
    return min(peaks) > budget if peaks and budget is not None else None


def peak_of(result: Result) -> int | None:
    """The largest of all ranks; above the bytes before the step."""
    if result.memory is None:
        return None
    return max([result.memory.peak_bytes, *result.peak_bytes_by_rank])


def met_from_step(result: Result) -> int | None:
    """The step, counted from 1, from which on every step was within the budget; None: the last one was not, or peaks
    were not measured."""
    budget, run = result.budget_bytes, result.stock
    peaks = [s.peak_bytes for s in run.steps] if run is not None else []
    if budget is None or not peaks or None in peaks:
        return None
    above = [index for index, peak in enumerate(peaks, 1) if peak is not None and peak > budget]
    last = above[-1] if above else 0
    return last + 1 if last < len(peaks) else None


def slowest_before_plan_ms(result: Result) -> float | None:
    """The longest step between the first, which compiles, and the one that followed the plan (that one included, on the
    host's clock); None without a plan."""
    run = result.stock
    if run is None or run.plan_after_steps is None:
        return None
    return max((s.wall_ms for s in run.steps[1 : run.plan_after_steps + 1]), default=None)


def stated(result: Result) -> tuple[float | None, float | None]:
    """Less memory and more time than plain Inductor, as the plan says; with measured times where it has them."""
    if result.plan is None:
        return None, None
    found, base = result.plan.predicted, result.plan.baseline
    if result.plan.calibrated is not None and result.plan.calibrated_baseline is not None:
        found, base = result.plan.calibrated, result.plan.calibrated_baseline
    if not base["peak_bytes"] or not base["step_ms"]:
        return None, None
    return 1 - found["peak_bytes"] / base["peak_bytes"], found["step_ms"] / base["step_ms"] - 1


def measured(record: Record, inductor: Record | None) -> tuple[float | None, float | None]:
    """The same, measured against Inductor's row."""
    if inductor is None or inductor is record or inductor.result.step_ms is None or record.result.step_ms is None:
        return None, None
    slowdown = slowest_step_ms(record.result) / slowest_step_ms(inductor.result) - 1
    mine, theirs = peak_of(record.result), peak_of(inductor.result)
    return (1 - mine / theirs if mine is not None and theirs else None), slowdown


def worst_estimates(result: Result) -> str:
    """The segments whose times the plan had farthest off, with their heavy ops."""
    if result.stock is None:
        return ""
    return "; ".join(
        f"{s.segment} ({s.phase}) {s.estimated_ms:.2f} ms for {s.measured_ms:.2f}" + (f": {s.ops}" if s.ops else "")
        for s in result.stock.segments[:NUM_WORST]
    )
