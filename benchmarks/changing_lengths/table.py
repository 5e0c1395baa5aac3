"""The table of the scenario ``fsdp-lengths``."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from benchmarks.changing_lengths.records import LengthsRun
from benchmarks.schema import Record, Report

GIB, MIB = 1 << 30, 1 << 20


def render_lengths(report: Report) -> str:
    """A row for each variant: what grew is of the rank where it grew most. ``again``: what malloc handed out while
    lengths that were seen came once more."""
    plain = next((r for r in report.records if r.variant.label == "inductor"), None)
    rows = [_row(record, run, plain) for record in report.records if (run := record.result.changing_lengths)]
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def total_s(record: Record) -> float | None:
    """Of all timed steps."""
    return sum(record.result.step_ms.values) / 1e3 if record.result.step_ms else None


def _row(record: Record, run: LengthsRun, plain: Record | None) -> dict[str, str]:
    mine, theirs = total_s(record), total_s(plain) if plain is not None else None
    memory = record.result.memory
    row: dict[str, Any] = {
        "variant": record.variant.label,
        "steps": str(len(run.lengths)),
        "tokens": f"{min(run.lengths)} to {max(run.lengths)}",
        "warm-up, s": f"{run.warmup_s:.0f}",
        "all steps, s": "-" if mine is None else f"{mine:.1f}",
        "vs inductor": "-" if not (mine and theirs) else f"{mine / theirs:.3f}",
        "peak GiB": "-" if memory is None else f"{memory.peak_bytes / GIB:.2f}",
        "reserved GiB": "-" if memory is None else f"{memory.max_reserved_bytes / GIB:.2f}",
        "GB moved": f"{sum(run.offloaded_bytes) / 1e9:.0f}",
        "steps that move nothing": str(run.num_still_steps),
    }
    grown = {"device": "device_reserved", "arena": "arena", "process": "resident"}
    row |= {f"{name} grew, MiB": f"{run.most_grown(kind) / MIB:.1f}" for name, kind in grown.items()}
    again = run.most_grown_again("malloc_used")
    row["again, MiB"] = "-" if again is None else f"{again / MIB:.1f}"
    return row | {"graphs": str(max(run.graphs_by_rank)), "status": record.status}
