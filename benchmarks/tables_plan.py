"""The tables of the scenarios ``plan`` and ``max-seq``."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from benchmarks.cells import gib, number, percent, scientific
from benchmarks.derived import case_label
from benchmarks.schema import Probe, Record, Report

GIB = 1 << 30


def render_plan(report: Report) -> str:
    """One row per variant, then the claims."""
    derived = {(row["case"], row["variant"]): row for row in report.derived}
    parts = []
    for case in dict.fromkeys(record.case for record in report.records):
        records = [record for record in report.records if record.case == case]
        rows = [_row(record, derived.get((case_label(case), record.variant.label), {})) for record in records]
        parts += [f"#### {case_label(case)}", tabulate(rows, headers="keys", tablefmt="github")]
        notes = [_note(record) for record in records]
        parts.append("\n".join(note for note in notes if note))
        claims = [claim for claim in report.claims if claim["case"] == case_label(case)]
        parts.append("\n".join(render_claim(claim) for claim in claims))
    return "\n\n".join(part for part in parts if part)


def render_longest(report: Report) -> str:
    """One row per probe, then for each variant what ended it."""
    rows = [_probe(record, probe) for record in report.records for probe in record.result.probes]
    parts = [
        tabulate(rows, headers="keys", tablefmt="github"),
        "\n".join(_longest(record) for record in report.records),
    ]
    return "\n\n".join(parts)


def _row(record: Record, derived: dict[str, Any]) -> dict[str, str]:
    result = record.result
    stats, traced = result.stats_per_step or {}, result.traced_peak
    return {
        "variant": record.variant.label,
        "budget": gib(result.budget_bytes),
        "step ms": number(result.step_ms.median if result.step_ms else None),
        "fwd": number(result.forward_ms.median if result.forward_ms else None),
        "bwd": number(result.backward_ms.median if result.backward_ms else None),
        "vs inductor": _change(derived.get("step_vs_inductor")),
        "vs checkpoint": _change(derived.get("step_vs_checkpoint")),
        "peak GiB": gib(result.memory.peak_bytes if result.memory else None),
        "w/o grads": gib(traced.peak_without_returned_gradients_bytes if traced else None),
        "first step": gib(result.first_step_memory.peak_bytes if result.first_step_memory else None),
        "pred. peak": percent(derived.get("predicted_peak_error")),
        "pred. time": percent(derived.get("predicted_step_error")),
        "cal. peak": percent(derived.get("calibrated_peak_error")),
        "cal. time": percent(derived.get("calibrated_step_error")),
        "exposed ms": number(stats.get("exposed_copy_ms")),
        "met": _met(derived),
        "res/alloc": number(result.long_run.reserved_vs_allocated if result.long_run else None, 3),
        "limited": _limited(record),
        "compile s": number(result.compile_s),
        "plan s": number(result.plan.planning_s if result.plan else None),
        "grad diff": scientific(derived.get("max_relative_gradient_difference_vs_inductor")),
        "status": record.status,
    }


def _met(derived: dict[str, Any]) -> str:
    found = [derived.get("peak_within_budget"), derived.get("first_step_within_budget")]
    if "peak_within_budget" not in derived:
        return "-"
    return "yes" if all(found) else "?" if None in found else "no" if not found[0] else "not at first"


def _limited(record: Record) -> str:
    run = record.result.limited_run
    return "-" if run is None else "ok" if run.completed else "no"


def _note(record: Record) -> str:
    """Why a row is not whole, and what a plan says of itself."""
    if record.reason:
        return f"- {record.variant.label}: {record.status}: {record.reason}"
    plan = record.result.plan
    if plan is None:
        return ""
    floors = "".join(f"; floor: {floor}" for floor in plan.floors)
    where = f"{plan.predicted.get('peak_segment')} ({plan.predicted.get('peak_phase')})"
    return f"- {record.variant.label}: {plan.summary}; peak in {where}{floors}"


def render_claim(claim: dict[str, Any]) -> str:
    """One line: held, not held or open, with its figures."""
    mark = {True: "held", False: "NOT held", None: "open"}[claim["held"]]
    figures = {k: v for k, v in claim["figures"].items() if k != "noise" and not isinstance(v, dict)}
    words = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )
    return f"- {mark}: {claim['claim']}" + (f" ({words})" if words else "")


def _probe(record: Record, probe: Probe) -> dict[str, str]:
    peaks = probe.phase_peak_bytes
    return {
        "variant": record.variant.label.partition("@lengths")[0],
        "tokens": str(probe.seq),
        "runs": "yes" if probe.ran else f"no ({_failed_in(probe)})",
        "steps": str(probe.num_steps) if probe.num_steps else "-",
        "step s": number(probe.step_ms / 1e3 if probe.step_ms else None, 2),
        "tokens/s": number(probe.seq / probe.step_ms * 1e3 if probe.step_ms else None, 0),
        "before GiB": gib(probe.allocated_before_bytes),
        "fwd GiB": gib(peaks.get("forward")),
        "bwd GiB": gib(peaks.get("backward")),
        "opt GiB": gib(peaks.get("optimizer")),
        "reserved GiB": gib(probe.max_reserved_bytes),
        "pred. peak GiB": gib(_predicted(probe)),
        "first step s": number(probe.first_step_ms / 1e3 if probe.first_step_ms else None),
    }


def _predicted(probe: Probe) -> int | None:
    """The plan's peak on top of the bytes before the step."""
    if probe.plan is None or probe.allocated_before_bytes is None:
        return None
    return probe.allocated_before_bytes + probe.plan.predicted["peak_bytes"]


def _longest(record: Record) -> str:
    """The longest length that ran, and why the shortest longer one did not."""
    probes = record.result.probes
    ran = max((probe.seq for probe in probes if probe.ran), default=None)
    shortest = min((p for p in probes if not p.ran and p.seq > (ran or 0)), key=lambda p: p.seq, default=None)
    words = f"- {record.variant.label}: {record.status}: longest that ran: {ran or 'none'}"
    if record.reason:
        words += f" ({record.reason})"
    if shortest is None:
        return words
    words += f"; {shortest.seq} ended in the {_failed_in(shortest)}: {shortest.reason}"
    if shortest.largest_blocks_at_failure:
        blocks = ", ".join(f"{count} x {size / GIB:.2f} GiB" for size, count in shortest.largest_blocks_at_failure)
        words += f"; of {gib(shortest.allocated_at_failure_bytes)} GiB allocated then: {blocks}"
    return words


def _failed_in(probe: Probe) -> str:
    """The first step is meant where no other is named."""
    phase = probe.failed_in or "setup"
    return f"{phase} of step {probe.num_steps + 1}" if probe.num_steps else phase


def _change(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio - 1:+.1%}"
