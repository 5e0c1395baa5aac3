"""The longest sequence of a variant that changes the model for good: each length in a process of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.activations.kinds import is_alone
from benchmarks.bisection import bisect
from benchmarks.launch_sweep import run_sweep
from benchmarks.schema import Probe, Record, Status, SweepRequest, Variant


def run_max_seq(request: SweepRequest, caches: Path) -> Iterator[Record]:
    """As ``run_sweep``: one record for every variant of ``request``, in their order."""
    end = time.monotonic() + request.time_left_s
    for alone, variants in groupby(request.variants, key=lambda variant: is_alone(variant.kind)):
        if not alone:
            left_s = end - time.monotonic()
            yield from run_sweep(dataclasses.replace(request, variants=list(variants), time_left_s=left_s), caches)
            continue
        for variant in variants:
            yield run_alone(request, variant, end - time.monotonic(), caches)


def run_alone(request: SweepRequest, variant: Variant, time_left_s: float, caches: Path) -> Record:
    """One record with all probes of the variant, as ``LengthSearch`` makes it in a single process.

    ``timeout_s`` is for all of them together; each builds the model again.
    """
    end = time.monotonic() + min(time_left_s, request.protocol.timeout_s)
    records: dict[int, Record] = {}
    for seq in bisect(
        variant.lengths or request.protocol.lengths, request.protocol.probes, lambda seq: _ran(records[seq])
    ):
        left_s = end - time.monotonic()
        one = dataclasses.replace(
            request,
            variants=[dataclasses.replace(variant, lengths=[seq])],
            protocol=dataclasses.replace(request.protocol, timeout_s=left_s),
            time_left_s=left_s,
        )
        (records[seq],) = run_sweep(one, caches)
        if records[seq].status == "skipped":
            break  # no time is left, or the peer is not here
    return merge(variant, records)


def merge(variant: Variant, records: dict[int, Record]) -> Record:
    """The records of one variant's lengths as one; a length that did not run is an answer, not a failure."""
    last = list(records.values())[-1]
    tried = {seq: record for seq, record in records.items() if record.status != "skipped"}
    probes = [_probe(seq, record) for seq, record in tried.items()]
    ran = [seq for seq, record in tried.items() if _ran(record)]
    # A process that says why a length does not run has answered; one that died or hung has not.
    silent = [
        (seq, record) for seq, record in tried.items() if not any(p.ran or p.reason for p in record.result.probes)
    ]
    lost = "; ".join(f"{seq} tokens: {record.reason}" for seq, record in silent)
    status: Status
    if not tried:
        status, reason = "skipped", last.reason
    elif not ran:
        status, reason = "failed", lost or "search: none of the lengths that were tried runs"
    elif last.status == "skipped":
        status, reason = "partial", last.reason
    else:
        status, reason = ("partial", lost) if lost else ("ok", "")
    result = dataclasses.replace(tried[max(ran)].result if ran else last.result, probes=probes)
    return Record(
        scenario=last.scenario,
        case=last.case,
        variant=variant,
        status=status,
        reason=reason,
        wall_s=sum(record.wall_s for record in records.values()),
        result=result,
        log_tail=next((record.log_tail for record in reversed(records.values()) if record.log_tail), ""),
    )


def _ran(record: Record) -> bool:
    return any(probe.ran for probe in record.result.probes)


def _probe(seq: int, record: Record) -> Probe:
    """What the process wrote down of the length, or why it came to nothing."""
    found = next(iter(record.result.probes), Probe(seq))
    return found if found.ran or found.reason else dataclasses.replace(found, reason=record.reason)
