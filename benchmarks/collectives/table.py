"""The table of the scenario ``collectives``."""

from __future__ import annotations

from tabulate import tabulate

from benchmarks.schema import CollectiveBeside, Record, Report, Summary


def render_collectives(report: Report) -> str:
    """A row for each variant, kind of collective and way of copying."""
    rows = [_row(record, row) for record in report.records for row in record.result.collectives_beside]
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def _row(record: Record, row: CollectiveBeside) -> dict[str, str]:
    return {
        "beside": record.variant.label,
        "collective": row.kind,
        "MB": f"{row.nbytes / 1e6:.0f}",
        "copies": row.copies,
        "ms": _text(row.ms),
        "against none": "" if row.vs_none is None else _text(row.vs_none),
        "GB/s down": "" if row.d2h_gb_per_s is None else f"{row.d2h_gb_per_s:.1f}",
        "GB/s up": "" if row.h2d_gb_per_s is None else f"{row.h2d_gb_per_s:.1f}",
        "counted": str(len(row.ms.values)),
    }


def _text(found: Summary) -> str:
    return f"{found.median:.3f} [{found.q1:.3f}, {found.q3:.3f}]"
