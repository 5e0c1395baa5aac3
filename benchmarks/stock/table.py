"""The tables of the scenarios ``stock`` and ``stock-fsdp``: by case its rows, its farthest error, its claims."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from benchmarks.cells import gib, number, percent
from benchmarks.derived import case_label
from benchmarks.schema import Record, Report
from benchmarks.stock.rows import peak_of, refusal
from benchmarks.tables_plan import render_claim
from benchmarks.truth import slowest_step_ms

GIB = 1 << 30


def render_stock(report: Report) -> str:
    """Markdown. Times are without AdamW, whose own time is the column ``+ AdamW``."""
    derived = {(row["case"], row["variant"]): row for row in report.derived}
    parts: list[str] = []
    for case in dict.fromkeys(record.case for record in report.records):
        label = case_label(case)
        records = [record for record in report.records if record.case == case]
        rows = [_row(r, derived.get((label, r.variant.label), {})) for r in records]
        parts += [f"#### {label}", tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)]
        parts.append("\n".join(line for r in records for line in _notes(r, derived.get((label, r.variant.label), {}))))
        parts.append("\n".join(render_claim(claim) for claim in report.claims if claim["case"] == label))
    return "\n\n".join(part for part in parts if part)


def _row(record: Record, row: dict[str, Any]) -> dict[str, str]:
    result, plan = record.result, record.result.plan
    calibrated = plan.calibrated if plan is not None else None
    return {
        "variant": record.variant.label,
        "budget GiB": gib(result.budget_bytes),
        "step ms": number(slowest_step_ms(result) if result.step_ms else None),
        "+ AdamW": number(result.optimizer_ms.median if result.optimizer_ms else None),
        "vs inductor": percent(row.get("slowdown_measured")),
        "peak GiB": gib(peak_of(result)),
        "pred. ms": number(plan.predicted["step_ms"] if plan else None),
        "error": percent(row.get("predicted_step_error")),
        "pred. GiB": gib(plan.predicted["peak_bytes"] if plan else None),
        "error ": percent(row.get("predicted_peak_error")),
        "cal. ms": number(calibrated["step_ms"] if calibrated else None),
        "error  ": percent(row.get("calibrated_step_error")),
        "cal. GiB": gib(calibrated["peak_bytes"] if calibrated else None),
        "error   ": percent(row.get("calibrated_peak_error")),
        "met from step": _met(record, row),
        "refused": _refused(record, row),
        "gain stated": percent(row.get("gain_stated")),
        "measured": percent(row.get("gain_measured")),
        "first step s": number(result.first_step_ms / 1e3 if result.first_step_ms else None),
        "steps to plan": str(row.get("plan_after_steps") or "-"),
        "slowest ms": number(row.get("slowest_step_before_plan_ms")),
        "graphs": str(result.num_graphs_first_step or "-"),
        "status": record.status,
    }


def _met(record: Record, row: dict[str, Any]) -> str:
    if "budget_met_from_step" not in row:
        return "-"
    if peak_of(record.result) is None:
        return "?"
    return str(row["budget_met_from_step"] or "never")


def _refused(record: Record, row: dict[str, Any]) -> str:
    least = refusal(record)
    if least is None:
        return "-"
    rightly = {True: "rightly", False: "WRONGLY", None: "?"}[row.get("refused_rightly")]
    return f"{rightly}: at least {gib(least)}"


def _notes(record: Record, row: dict[str, Any]) -> list[str]:
    lines = [f"- {record.variant.label}: {record.status}: {record.reason}"] if record.reason else []
    if worst := row.get("worst_estimates"):
        lines.append(f"- {record.variant.label}: estimates farthest off: {worst}")
    return lines
