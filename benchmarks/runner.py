"""The parent of a run: one variant after another, and the JSON rewritten after each."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.budgets import peaks_of, with_budget_in_bytes
from benchmarks.claims import check_claims
from benchmarks.derived import case_label, derive
from benchmarks.launch import run_variant
from benchmarks.launch_lengths import run_max_seq
from benchmarks.launch_sweep import run_sweep
from benchmarks.machine import describe_run
from benchmarks.progress import RunProgress, describe
from benchmarks.rl.claims import check_phase_claims
from benchmarks.rl.variants import SCENARIOS as PHASE_SCENARIOS
from benchmarks.scenarios import Scenario
from benchmarks.schema import (
    Case,
    Protocol,
    Record,
    Report,
    Request,
    Result,
    SweepRequest,
    Variant,
    from_json,
    to_json,
    write_atomically,
)

Kept = dict[tuple[Case, str], Record]

LEAST_TIME_S = 20.0
LINK_TIMEOUT_S = 120.0


def run(
    scenario: Scenario,
    cases: list[Case],
    variants: list[Variant],
    protocol: Protocol,
    out: Path,
    deadline_s: float,
    resume: Path | None = None,
) -> Report:
    """Measure everything that fits before the deadline. What does not fit is a row that says so.

    Results in the report at ``resume`` of the same cases and variants are taken over, if protocol, source, torch and
    GPU were the same. Its environment is kept with the new one.
    """
    earlier = from_json(Report, resume.read_text()) if resume is not None else None
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + deadline_s
    report = Report(scenario.name, describe_run(), protocol, None, [])
    texts = _read_texts(resume)
    asked = [(case, variant) for case in cases for variant in variants]
    kept = _keep(earlier, report, asked)
    wanted = [(case, variant) for case, variant in asked if (case, variant.label) not in kept]
    with RunProgress(len(wanted) + 1) as progress, _caches(protocol) as caches:
        progress.begin("link", min(LINK_TIMEOUT_S, end - time.monotonic()))
        if earlier is not None and earlier.link is not None:
            report.link = earlier.link
        else:
            report.link, report.environment["link_failure"] = _measure_link(cases[0], protocol, end - time.monotonic())
        _write(report, out)
        progress.end(f"link: {report.environment.get('link_failure') or 'ok'}")
        records = _records(scenario, wanted, protocol, end, caches, kept)
        for case, variant in wanted:
            limit_s = min(protocol.timeout_s, end - time.monotonic())
            progress.begin(f"{case_label(case)} {variant.label}", limit_s)
            record = next(records)
            report.records.append(record)
            _take_texts(record, texts)
            _write(report, out, texts)
            progress.end(describe(record))
    return report


def _records(
    scenario: Scenario,
    wanted: list[tuple[Case, Variant]],
    protocol: Protocol,
    end: float,
    caches: Path,
    kept: Kept,
) -> Iterator[Record]:
    """One process for all variants of a case, or one for each variant."""
    if not scenario.sweeps:
        measured = list(kept.values())
        for case, variant in wanted:
            found = _peaks(measured, case)
            record = _measure(Request(scenario.name, case, with_budget_in_bytes(variant, found), protocol), end)
            measured.append(record)
            yield record
        return
    for case in dict.fromkeys(case for case, _ in wanted):
        variants = [variant for of, variant in wanted if of == case]
        peaks = _peaks(kept.values(), case)
        request = SweepRequest(scenario.name, case, variants, protocol, end - time.monotonic(), peaks)
        yield from (run_max_seq if scenario.name == "max-seq" else run_sweep)(request, caches)


def _peaks(records: Iterable[Record], case: Case) -> dict[str, int]:
    """What budgets of a case may be relative to."""
    found: dict[str, int] = {}
    for record in records:
        if record.case == case:
            found |= peaks_of(record.variant.label, record.result)
    return found


def _keep(earlier: Report | None, report: Report, asked: list[tuple[Case, Variant]]) -> Kept:
    """Results that need not be measured again. They are of another environment, which is kept with the new one."""
    if earlier is None:
        return {}
    report.environment.update({f"resumed_{name}": value for name, value in earlier.environment.items()})
    if why := _why_not_kept(earlier, report):
        print(f"nothing of the earlier report is kept: {why} differs", file=sys.stderr)
        return {}
    found = {(r.case, r.variant.label): r for r in earlier.records if r.status == "ok"}
    kept = {
        (case, v.label): record
        for case, v in asked
        if (record := found.get((case, v.label))) is not None and _options(record.variant) == _options(v)
    }
    report.records.extend(kept.values())
    return kept


def _why_not_kept(earlier: Report, report: Report) -> str:
    """What makes an earlier report's rows others than this run's would be; "" where nothing does."""
    ours, theirs = (replace(one.protocol, timeout_s=0.0, caches="") for one in (report, earlier))
    if ours != theirs:
        return "the protocol"
    names = ("source_sha256", "torch", "gpu_name")
    return next((name for name in names if earlier.environment.get(name) != report.environment.get(name)), "")


def _options(variant: Variant) -> dict[str, Any]:
    """Without the budget, which a record has in bytes and its label as it was asked for."""
    return {name: value for name, value in variant.options.items() if name != "activation_budget"}


@contextlib.contextmanager
def _caches(protocol: Protocol) -> Iterator[Path]:
    """The folder of a sweep's compile caches: kept where the user named one."""
    if protocol.caches:
        yield Path(protocol.caches).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="fxoffload-caches-") as name:
        yield Path(name)


def _read_texts(resume: Path | None) -> dict[str, dict[str, str]]:
    """The whole plans of an earlier run, where they lie next to its report."""
    path = resume.with_name(f"{resume.stem}-plans.json") if resume is not None else None
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def _take_texts(record: Record, texts: dict[str, dict[str, str]]) -> None:
    """Whole plans go to a file of their own: the report would not be readable."""
    plans = [record.result.plan, *(probe.plan for probe in record.result.probes)]
    for plan in plans:
        if plan is not None and plan.texts:
            key = f"{case_label(record.case)} {record.variant.label}"
            texts[key if key not in texts else f"{key} #{len(texts)}"] = plan.texts
            plan.texts = {}


def _measure_link(case: Case, protocol: Protocol, time_left_s: float) -> tuple[dict[str, float] | None, str | None]:
    request = Request("link", case, Variant("link", "link"), replace(protocol, ranks=1, timeout_s=LINK_TIMEOUT_S))
    record = run_variant(request, time_left_s)
    return record.result.link, record.reason or None


def _measure(request: Request, end: float) -> Record:
    time_left_s = end - time.monotonic()
    if time_left_s < LEAST_TIME_S:
        reason = f"not started: {max(time_left_s, 0):.0f} s left before --deadline-s"
        return Record(request.scenario, request.case, request.variant, "skipped", reason, 0.0, Result())
    return run_variant(request, time_left_s)


def _write(report: Report, out: Path, texts: dict[str, dict[str, str]] | None = None) -> None:
    report.derived = derive(report.records, report.link)
    if report.scenario in PHASE_SCENARIOS:
        report.claims = check_phase_claims(report)
    else:
        report.claims = check_claims(report)
    write_atomically(out / f"{report.scenario}.json", to_json(report))
    if texts:
        write_atomically(out / f"{report.scenario}-plans.json", json.dumps(texts, indent=1))
