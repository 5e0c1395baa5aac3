"""The parent of a run: one variant after another, and the JSON rewritten after each."""

import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.derived import case_label, derive
from benchmarks.launch import run_variant
from benchmarks.machine import describe_run
from benchmarks.schema import Case, Protocol, Record, Report, Request, Result, Variant, to_json, write_atomically

LEAST_TIME_S = 20.0


def run(
    scenario: str, cases: list[Case], variants: list[Variant], protocol: Protocol, out: Path, deadline_s: float
) -> Report:
    """Measure everything that fits before the deadline. What does not fit is a row that says so."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + deadline_s
    report = Report(scenario, describe_run(), protocol, None, [])
    requests = [Request(scenario, case, variant, protocol) for case in cases for variant in variants]
    console = Console(stderr=True, soft_wrap=True)
    with _progress(console) as progress:
        task = progress.add_task("link", total=len(requests) + 1)
        report.link, report.environment["link_failure"] = _measure_link(cases[0], protocol, end - time.monotonic())
        _write(report, out)
        progress.advance(task)
        for request in requests:
            label = f"{case_label(request.case)} {request.variant.label}"
            progress.update(task, description=label)
            record = _measure(request, end)
            report.records.append(record)
            _write(report, out)
            progress.advance(task)
            console.print(f"{label}: {record.status} in {record.wall_s:.0f} s {record.reason}", markup=False)
    return report


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


def _measure_link(case: Case, protocol: Protocol, time_left_s: float) -> tuple[dict[str, float] | None, str | None]:
    request = Request("link", case, Variant("link", "link"), replace(protocol, ranks=1, timeout_s=120.0))
    record = run_variant(request, time_left_s)
    return record.result.link, record.reason or None


def _measure(request: Request, end: float) -> Record:
    time_left_s = end - time.monotonic()
    if time_left_s < LEAST_TIME_S:
        reason = f"not started: {max(time_left_s, 0):.0f} s left before --deadline-s"
        return Record(request.scenario, request.case, request.variant, "skipped", reason, 0.0, Result())
    return run_variant(request, time_left_s)


def _write(report: Report, out: Path) -> None:
    report.derived = derive(report.records, report.link)
    write_atomically(out / f"{report.scenario}.json", to_json(report))
