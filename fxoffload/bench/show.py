"""The report as two tables and notes below them."""

from __future__ import annotations

import math

from tabulate import tabulate

from fxoffload.bench.records import Report, Spread, Steps
from fxoffload.sizes import format_bytes

GIB = 1 << 30
# Sums in another order differ by about the last digit of the type.
NOTABLE_DIFFERENCE = {"bfloat16": 2e-2, "float32": 1e-4}


def render(report: Report) -> str:
    """The machine and the work, the variants against the first, the phases, then every row's reason."""
    work, machine = report.work, report.machine
    free = "" if machine.free_bytes is None else f", {format_bytes(machine.free_bytes)} free"
    where = "no GPU" if report.rehearsal else f"{machine.gpu}{free}"
    lines = [
        f"{where}; torch {machine.torch}; fxoffload {report.fxoffload}",
        f"{work.layers} decoder layers, hidden size {work.hidden}, {work.tokens:,} tokens, {work.dtype}: forward and "
        f"backward, medians of {work.steps} [quartiles]",
    ]
    if report.rehearsal:
        lines.append(
            "A REHEARSAL without a GPU: it shows that everything runs; its times say nothing and it has no peaks."
        )
    notes = "\n".join(f"- {row.name}: {row.status}: {row.reason}" for row in report.rows if row.reason)
    parts = ["\n".join(lines), _steps(report), _switches(report), notes]
    return "\n\n".join(part for part in parts if part)


def _steps(report: Report) -> str:
    rows = [row for row in report.rows if row.switches is None and row.name != "phases"]
    plain = rows[0].steps if rows else None
    table = [
        {
            "variant": row.name,
            "step ms": _spread(row.steps.step_ms if row.steps else None),
            "time": "" if report.rehearsal else _change(row.steps, plain),
            "peak GiB": _peak(row.steps),
            "memory": _part(row.steps, plain),
            "first step s": f"{row.steps.first_step_s:.1f}" if row.steps else "-",
            "gradients": _gradients(row.steps, plain, report.work.dtype) if row is not rows[0] else "",
            "": "" if row.status == "ok" else row.status,
        }
        for row in rows
    ]
    return tabulate(table, headers="keys", tablefmt="github", disable_numparse=True)


def _switches(report: Report) -> str:
    found = next((row.switches for row in report.rows if row.switches is not None), None)
    if found is None:
        return ""
    table = [
        {"phases": "first offload (pins host memory)", "GB/s": f"{found.first_offload_gb_per_s:.1f}", "one copy": ""},
        {"phases": "offload", "GB/s": _spread(found.offload_gb_per_s), "one copy": _rate(found.link_down_gb_per_s)},
        {"phases": "onload", "GB/s": _spread(found.onload_gb_per_s), "one copy": _rate(found.link_up_gb_per_s)},
    ]
    bits = "every bit is as it was" if found.equal else "BITS DIFFER: please report this"
    what = f"{found.moved_bytes / 1e9:.2f} GB of parameters and AdamW state to the host and back; {bits}"
    return f"{what}\n\n{tabulate(table, headers='keys', tablefmt='github', disable_numparse=True)}"


def _spread(found: Spread | None) -> str:
    if found is None:
        return "-"
    return f"{found.median:.1f} [{found.q1:.1f}, {found.q3:.1f}]"


def _change(steps: Steps | None, plain: Steps | None) -> str:
    if steps is None or plain is None or steps is plain:
        return ""
    return f"{100 * (steps.step_ms.median / plain.step_ms.median - 1):+.1f} %"


def _peak(steps: Steps | None) -> str:
    return "-" if steps is None or steps.peak_bytes is None else f"{steps.peak_bytes / GIB:.2f}"


def _part(steps: Steps | None, plain: Steps | None) -> str:
    if steps is None or plain is None or steps is plain or steps.peak_bytes is None or not plain.peak_bytes:
        return ""
    return f"{100 * steps.peak_bytes / plain.peak_bytes:.0f} %"


def _gradients(steps: Steps | None, plain: Steps | None, dtype: str) -> str:
    """Their norms against the first row's: the largest relative difference, where it is worth a look."""
    if steps is None or plain is None:
        return "-"
    pairs = zip(steps.gradient_norms, plain.gradient_norms, strict=True)
    worst = max(abs(mine - theirs) / max(theirs, 1e-30) for mine, theirs in pairs)
    return "agree" if math.isfinite(worst) and worst <= NOTABLE_DIFFERENCE[dtype] else f"DIFFER by {worst:.1e}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
