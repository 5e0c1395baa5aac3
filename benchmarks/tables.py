"""A report as a Markdown table. Every row that failed says why."""

from typing import Any

from tabulate import tabulate

from benchmarks.cells import gib, number, scientific
from benchmarks.changing_lengths.table import render_lengths
from benchmarks.collectives.table import render_collectives
from benchmarks.derived import case_label
from benchmarks.rl.tables import render_phases
from benchmarks.rl.variants import SCENARIOS as PHASE_SCENARIOS
from benchmarks.scenarios import COLLECTIVES, FSDP_LENGTHS, STOCK_SCENARIOS, current_name
from benchmarks.schema import Record, Report, Summary
from benchmarks.stock.table import render_stock
from benchmarks.tables_plan import render_claim, render_longest, render_plan

GIB = 1 << 30
OF_SOME_SCENARIOS = ("warm compile s", "host us", "us/segment", "us/copy", "gradients")


def render(report: Report) -> str:
    """Link rates, one row per record, then the derived rows that have something to say."""
    if current_name(report.scenario) in ("plan", "budget-sweep", "max-seq"):
        body = render_longest(report) if current_name(report.scenario) == "max-seq" else render_plan(report)
        return "\n\n".join([f"### {report.scenario}", _header(report), body])
    if report.scenario in STOCK_SCENARIOS:
        return "\n\n".join([f"### {report.scenario}", _header(report), render_stock(report)])
    if report.scenario in PHASE_SCENARIOS:
        return "\n\n".join([f"### {report.scenario}", _header(report), render_phases(report)])
    if report.scenario in (COLLECTIVES, FSDP_LENGTHS):
        failures = "\n".join(_failure(record) for record in report.records if record.reason)
        claims = "\n".join(render_claim(claim) for claim in report.claims)
        table = render_collectives(report) if report.scenario == COLLECTIVES else render_lengths(report)
        parts = [f"### {report.scenario}", _header(report), table, claims, failures]
        return "\n\n".join(part for part in parts if part)
    derived = {(row["case"], row["variant"]): row for row in report.derived}
    rows = [_row(record, derived.get((case_label(record.case), record.variant.label), {})) for record in report.records]
    table = tabulate(_without_empty(rows), headers="keys", tablefmt="github", disable_numparse=True)
    parts = [f"### {report.scenario}", _header(report), table]
    if report.scenario == "compile-time":
        parts.append(tabulate([_shares(record) for record in report.records], headers="keys", tablefmt="github"))
    parts.append("\n".join(render_claim(claim) for claim in report.claims))
    details = [_details(row) for row in report.derived]
    parts.append("\n".join(line for line in details if line))
    failures = [_failure(record) for record in report.records if record.reason]
    parts.append("\n".join(failures))
    return "\n\n".join(part for part in parts if part)


def _shares(record: Record) -> dict[str, str]:
    """Percent of the first call by timer; the timers nest, see compile_profile.py."""
    shares = {name: f"{share:.0%}" for name, share in record.result.compile_shares.items()}
    return {"case": case_label(record.case), "variant": record.variant.label, **shares}


def _failure(record: Record) -> str:
    return f"- {record.variant.label} ({case_label(record.case)}): {record.status}: {record.reason}"


def _header(report: Report) -> str:
    environment = report.environment
    words = [f"{environment.get('gpu_name') or 'no GPU'}", f"torch {environment.get('torch')}"]
    if report.scenario == COLLECTIVES:
        words.append(f"{report.protocol.steps} rounds of 8 collectives each, medians [quartiles]")
    elif report.scenario == FSDP_LENGTHS:
        protocol = report.protocol
        words.append(f"{protocol.steps} timed steps behind {protocol.warmup} others of changing length")
    elif current_name(report.scenario) not in ("max-seq", *PHASE_SCENARIOS):
        others = report.protocol.warmup + 2
        more = report.protocol.calibration_steps
        plans = f" (fxoffload's after up to {more} more, for its plans)" if more else ""
        words.append(f"{report.protocol.steps} timed steps after {others} others{plans}, medians [quartiles]")
    if report.link:
        rates = {n: v for n, v in report.link.items() if n.endswith(("gb_per_s", "tflop_per_s"))}
        words.append(", ".join(f"{name} {value:.1f}" for name, value in rates.items()))
    return "; ".join(words)


def _row(record: Record, derived: dict[str, Any]) -> dict[str, str]:
    result = record.result
    stats = result.stats_per_step or {}
    traced = result.traced_peak
    return {
        "case": case_label(record.case),
        "variant": record.variant.label,
        "step ms": _summary(result.step_ms),
        "fwd ms": number(result.forward_ms.median if result.forward_ms else None),
        "bwd ms": number(result.backward_ms.median if result.backward_ms else None),
        "vs inductor": number(derived.get("step_vs_inductor"), 3),
        "peak GiB": gib(result.memory.peak_bytes if result.memory else None),
        "w/o grads GiB": gib(traced.peak_without_returned_gradients_bytes if traced else None),
        "reserved GiB": gib(result.memory.max_reserved_bytes if result.memory else None),
        "GB down/step": number((stats["bytes_offloaded"] / 1e9) if "bytes_offloaded" in stats else None, 2),
        "exposed ms": number(stats.get("exposed_copy_ms")),
        "first step s": number(result.first_step_ms / 1e3 if result.first_step_ms else None, 2),
        "compile s": number(result.compile_s, 2),
        "grad diff": scientific(derived.get("max_relative_gradient_difference_vs_inductor")),
        "warm compile s": number(derived.get("warm_compile_s"), 2),
        "host us": number(derived.get("host_us")),
        "us/segment": number(derived.get("host_us_over_inductor_per_segment")),
        "us/copy": number(derived.get("host_us_over_keep_all_per_copy")),
        "gradients": {True: "agree", False: "DIFFER", None: "-"}[derived.get("gradients_agree")],
        "status": record.status,
    }


def _without_empty(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Columns that only some scenarios measure are left out where no row has them."""
    empty = {name for name in OF_SOME_SCENARIOS if all(row[name] == "-" for row in rows)}
    return [{name: text for name, text in row.items() if name not in empty} for row in rows]


def _details(row: dict[str, Any]) -> str:
    shown = {k: v for k, v in row.items() if k not in ("case", "variant", "step_vs_inductor") and v is not None}
    if not shown:
        return ""
    values = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()]
    return f"- {row['case']} {row['variant']}: {', '.join(values)}"


def _summary(summary: Summary | None) -> str:
    return "-" if summary is None else f"{summary.median:.1f} [{summary.q1:.1f}, {summary.q3:.1f}]"
