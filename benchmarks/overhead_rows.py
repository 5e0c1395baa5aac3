"""Scenario ``overhead``: differences of variants' host times, per segment and per copy. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.schema import Overhead, Record

# A step whose device works on for longer than this part of the host's time was not bound by the host.
HOST_BOUND_TAIL = 0.2


def overhead_row(record: Record, same_case: Sequence[Record]) -> dict[str, Any]:
    """The record's host times against those of ``inductor`` and ``keep_all`` of the same case and run.

    The field's name tells the subtrahend. Empty for a record without host times.
    """
    mine = record.result.overhead
    if mine is None:
        return {}
    row: dict[str, Any] = {
        "host_us": mine.host_us.median,
        "cpu_us": mine.cpu_us.median,
        "tail_us": mine.tail_us.median,
        "host_bound": mine.tail_us.median <= HOST_BOUND_TAIL * mine.host_us.median,
        "num_segment_calls": mine.num_segment_calls,
        "num_copies_per_step": mine.num_copies,
    }
    inductor, keep_all = (_of_kind(same_case, kind) for kind in ("inductor", "keep_all"))
    if inductor is not None and mine.num_segment_calls:
        over = mine.host_us.median - inductor.host_us.median
        row["host_us_over_inductor"] = over
        if not mine.num_copies:  # else copies are in it
            row["host_us_over_inductor_per_segment"] = over / mine.num_segment_calls
    if keep_all is not None and mine.num_copies:
        over = mine.host_us.median - keep_all.host_us.median
        row["host_us_over_keep_all"] = over
        row["host_us_over_keep_all_per_copy"] = over / mine.num_copies
    return row


def _of_kind(records: Sequence[Record], kind: str) -> Overhead | None:
    """The first of its kind: here a variant may need options (``keep_all@min_bytes=0``)."""
    found = (r.result.overhead for r in records if r.variant.kind == kind and r.result.overhead is not None)
    return next(found, None)
