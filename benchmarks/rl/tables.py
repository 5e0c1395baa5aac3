"""The scenarios of phases as Markdown tables. Every row that failed says why."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from benchmarks.rl.records import Exposed, RlResult, RlStep, Spread, Streamed, Switching
from benchmarks.schema import Report

GIB, MIB = 1 << 30, 1 << 20


def render_phases(report: Report) -> str:
    """The scenario's table, its claims, and what failed."""
    if report.scenario == "pinning":
        body = _pinning(report)
    else:
        row = {"phases": _switching, "weight-sync": stream_row, "rl-step": step_row}[report.scenario]
        rows = [
            {"variant": r.variant.label, **row(r.result.rl or RlResult()), "status": r.status} for r in report.records
        ]
        body = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)
        if traces := _traces(report):
            body += "\n\n" + tabulate(traces, headers="keys", tablefmt="github", floatfmt=".1f")
        if ablations := _ablations(report):
            body += "\n\n" + tabulate(ablations, headers="keys", tablefmt="github", disable_numparse=True)
    claims = [_claim(claim) for claim in report.claims]
    failures = [f"- {r.variant.label}: {r.status}: {r.reason}" for r in report.records if r.reason]
    return "\n\n".join(part for part in (_sizes(report), body, "\n".join(claims), "\n".join(failures)) if part)


def _switching(rl: RlResult) -> dict[str, str]:
    found = rl.switching or Switching()
    exposed, first, stream, endured = found.exposed, found.first_forward, found.stream, found.endurance
    alone = found.copies_alone
    return {
        "first off s": _pair(found.first_offload_s, found.first_offload_gb_per_s),
        "first on s": _pair(found.first_onload_s, found.first_onload_gb_per_s),
        "steady off s": _way(found.offload),
        "steady on s": _way(found.onload),
        "cycles": str(len(found.offload.seconds.values)) if found.offload else "-",
        "of link": "-" if not (found.offload and found.onload) else _both(found.offload.of_link, found.onload.of_link),
        "copies alone GB/s": "-" if alone is None else f"{alone.d2h_gb_per_s:.1f} / {alone.h2d_gb_per_s:.1f}",
        "exposed/serial s": "-" if exposed is None else f"{exposed.exposed_s:.3f} / {exposed.serial_s:.3f}",
        "its calls ms": "-" if exposed is None else _calls(exposed),
        "first fwd/load s": "-" if first is None else f"{first.first_matmul.median:.4f} / {first.load_all.median:.4f}",
        "not free MiB": _both_mib(found.residue_bytes, found.residue_later_bytes),
        "host/device": _number(found.host_vs_device, 3),
        "stream GB/s": "-" if stream is None else _number(stream.gb_per_s, 1),
        "bits": "-" if found.bit_equal is None else "equal" if found.bit_equal else "DIFFER",
        "endurance": "-" if endured is None else f"{endured.cycles}: {'equal' if endured.bit_equal else 'DIFFER'}",
    }


def stream_row(rl: RlResult) -> dict[str, str]:
    """What a stream of weights took."""
    found: Streamed | None = rl.stream
    if found is None:
        return dict.fromkeys(("s", "GB/s", "of link", "peak MiB", "promised MiB", "bits"), "-")
    return {
        "s": _spread(found.seconds),
        "GB/s": _number(found.gb_per_s, 1),
        "of link": _percent(found.of_link),
        "peak MiB": _mib(found.peak_bytes),
        "promised MiB": _mib(found.promised_bytes),
        "bits": "-" if found.equal is None else "equal" if found.equal else "DIFFER",
    }


def step_row(rl: RlResult) -> dict[str, str]:
    """What a whole step took; its phases with switching and without."""
    found = rl.step or RlStep()
    phases = {f"{name} s": _both(seconds, found.phase_alone_s.get(name)) for name, seconds in found.phase_s.items()}
    return {
        "first step s": _number(found.first_step_s, 2),
        "step s": _spread(found.step),
        "alone s": _spread(found.alone),
        "switching s": _number(found.switching_s, 3),
        "of the step": _percent(found.switching_share),
        **phases,
        "KV GiB": _number(found.kv_bytes / GIB, 1),
    }


def _pinning(report: Report) -> str:
    rows = [row for record in report.records for row in (record.result.rl or RlResult()).pinning]
    kinds = ("touch", "staged", "resize_mib", "room_mib", "give_back", "small_copies")
    tables = [[row for row in rows if key in row] for key in kinds]
    return "\n\n".join(tabulate(table, headers="keys", tablefmt="github", floatfmt=".2f") for table in tables if table)


def _calls(exposed: Exposed) -> str:
    """Of the host, to begin to offload and to onload."""
    calls = (exposed.begin_offload_s, exposed.begin_onload_s)
    return " / ".join("-" if seconds is None else f"{1e3 * seconds:.1f}" for seconds in calls)


def _ablations(report: Report) -> list[dict[str, str]]:
    """Cost of the optimizer around log-probs, with and without the mechanisms for it."""
    rows = []
    for record in report.records:
        switching = record.result.rl.switching if record.result.rl is not None else None
        found = switching.exposed if switching is not None else None
        if found is None or not found.without:
            continue
        for name, seconds in {"": found.around, **found.without}.items():
            exposed = seconds.median - found.alone.median
            rows.append(
                {
                    "variant": record.variant.label,
                    "without": name or "-",
                    "forwards and a step s": _spread(seconds),
                    "exposed s": _number(exposed, 3),
                    "of serial": _percent(exposed / found.serial_s if found.serial_s else None),
                }
            )
    return rows


def _traces(report: Report) -> list[dict[str, Any]]:
    """Milliseconds of each run under the profiler."""
    rows = []
    for record in report.records:
        switching = record.result.rl.switching if record.result.rl is not None else None
        for name, found in (switching.traces if switching is not None else {}).items():
            rows.append(
                {
                    "variant": record.variant.label,
                    "under the profiler, ms": name,
                    "host": found.host_ms,
                    "first kernel": found.until_first_kernel_ms,
                    "last kernel": found.until_last_kernel_ms,
                    "kernels": found.kernels_ms,
                    "collectives": found.collectives_ms,
                    "device busy": found.device_busy_ms,
                    "copies down": found.copies_ms.get("down", 0.0),
                    "copies up": found.copies_ms.get("up", 0.0),
                    "ours, on the host": found.ours_on_host_ms,
                    "longest of ours": _longest(found.ours_ms),
                    "longest call of CUDA": _longest(found.cuda_calls_ms),
                }
            )
    return rows


def _longest(ms: dict[str, float]) -> str:
    name = max(ms, key=lambda name: ms[name], default=None)
    return "-" if name is None else f"{name} {ms[name]:.1f}"


def _sizes(report: Report) -> str:
    for record in report.records:
        found = record.result.rl.switching if record.result.rl is not None else None
        if found is not None and found.moved_bytes:
            ranks = f", each of {report.protocol.ranks} ranks" if report.protocol.ranks > 1 else ""
            parts = f"parameters {found.parameter_bytes / 1e9:.2f} GB, optimizer {found.optimizer_bytes / 1e9:.2f} GB"
            return f"{found.moved_bytes / 1e9:.2f} GB move{ranks}: {parts}; medians [quartiles]"
    return ""


def _claim(claim: dict[str, Any]) -> str:
    mark = {True: "held", False: "NOT held", None: "open"}[claim["held"]]
    figures = ", ".join(f"{name} {_figure(value)}" for name, value in claim["figures"].items())
    return f"- {claim['variant']}: {claim['claim']}: **{mark}** ({figures})"


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _pair(seconds: float | None, rate: float | None) -> str:
    return "-" if seconds is None or rate is None else f"{seconds:.2f} ({rate:.1f} GB/s)"


def _way(way: Any) -> str:
    return "-" if way is None else f"{_spread(way.seconds)} ({way.gb_per_s:.1f} GB/s)"


def _spread(found: Spread | None) -> str:
    return "-" if found is None else f"{found.median:.3f} [{found.q1:.3f}, {found.q3:.3f}]"


def _both(one: float | None, two: float | None) -> str:
    if one is not None and two is not None and max(one, two) <= 1.5 and min(one, two) >= 0.0:
        return f"{one:.3f} / {two:.3f}"
    return f"{_number(one, 2)} / {_number(two, 2)}"


def _both_mib(one: int | None, two: int | None) -> str:
    return "-" if one is None and two is None else f"{_mib(one)} / {_mib(two)}"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
