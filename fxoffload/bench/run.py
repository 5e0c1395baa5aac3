"""The variants in turn, each in a process of its own (a rehearsal: in this one), and the report that they make."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from fxoffload import __version__
from fxoffload.bench import processes
from fxoffload.bench.records import BenchRow, BenchWork, Kind, Machine, Report, Request, Steps, Switches
from fxoffload.bench.sizing import BenchError, choose, rehearsal

BUDGET_OF_CHECKPOINT = 1.02
REHEARSED_BUDGET = 0.85  # of plain Inductor's predicted peak: a CPU has no measured peak to take
PROBE_LIMIT_S = 120.0

Tell = Callable[[str], None]


def bench(limit_s: float, tell: Tell = lambda name: None, work: BenchWork | None = None) -> Report:
    """Measure all variants; one that fails or takes more than ``limit_s`` seconds is a row that says so. A rehearsal
    has no limit.

    ``tell`` hears the name of each variant before it begins. ``work``: instead of the decoder that fits the GPU.

    Raises:
        BenchError: nothing can be measured here.
    """
    tell("looking at the machine")
    machine = _probe(min(limit_s, PROBE_LIMIT_S))
    if work is None:
        work = rehearsal() if machine.free_bytes is None else choose(machine.free_bytes)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report = Report(now, __version__, machine, work, rehearsal=work.device == "cpu")
    plain_name = "Inductor" if work.inner == "inductor" else work.inner

    def add(name: str, kind: Kind, budget: int | None = None) -> BenchRow:
        tell(name)
        ended = _run(Request(kind, work, budget), limit_s, report.rehearsal)
        row = BenchRow(name, ended.status, ended.reason, ended.wall_s, budget)
        if isinstance(ended.answer, Steps):
            row.steps = ended.answer
        if isinstance(ended.answer, Switches):
            row.switches = ended.answer
        report.rows.append(row)
        return row

    add(plain_name, "plain")
    checkpoint = add(f"{plain_name} + checkpointing", "checkpoint")
    default = add("fxoffload, default", "fxoffload")
    name = "fxoffload, at checkpointing's peak" if not report.rehearsal else "fxoffload, with a budget"
    budget = _budget(checkpoint, default)
    if budget is None:
        report.rows.append(BenchRow(name, "skipped", "needs checkpointing's peak, which was not measured", 0.0))
    else:
        add(name, "fxoffload", budget)
    add("phases", "phases")
    return report


def _budget(checkpoint: BenchRow, default: BenchRow) -> int | None:
    """Bytes for the second plan; None where no peak was measured or planned."""
    if checkpoint.steps is not None and checkpoint.steps.peak_bytes is not None:
        return int(BUDGET_OF_CHECKPOINT * checkpoint.steps.peak_bytes)
    planned = default.steps
    if planned is not None and planned.planned_baseline_peak_bytes and planned.smallest_budget_bytes:
        least = int(1.2 * planned.smallest_budget_bytes)
        return max(least, int(REHEARSED_BUDGET * planned.planned_baseline_peak_bytes))
    return None


def _run(request: Request, limit_s: float, rehearsal: bool) -> processes.Ended:
    if not rehearsal:
        return processes.run(request, limit_s)
    from fxoffload.bench import worker  # imports torch

    return worker.run_here(request, limit_s)


def _probe(limit_s: float) -> Machine:
    """In a process of its own: a context would take memory that the variants are measured in."""
    ended = processes.run(Request("probe"), limit_s)
    if not isinstance(ended.answer, Machine):
        raise BenchError(f"expected torch to start and say which GPU there is, found: {ended.reason}")
    return ended.answer
