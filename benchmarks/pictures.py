"""Which picture a file gets: by its scenario, or memory over a step where it holds plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks import plot, plot_memory
from benchmarks.load import load
from benchmarks.rl import plot as phases_plot
from benchmarks.schema import Record, Report

BARS = ("phases", "rl-step")
WITHOUT = ("pinning", "weight-sync", "compile-time", "longest", "max-seq", "overhead", "moe-convert")


def draw(path: Path, picture: Path, also: Iterable[Path] = ()) -> None:
    """Draw the result file at ``path``: peak against time, seconds of phase switches, or (``*-plans.json``) memory over
    a step.

    Args:
        path: of the result file.
        picture: to write.
        also: result files of the same cases, for variants that were not measured in the first.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: the file is none of these, or nothing in it was measured.
    """
    if _holds_plans(path):
        beside = plot_memory.report_beside(path)
        report = load(beside) if beside.exists() else None
        plot_memory.draw(path, report if isinstance(report, Report) else None, picture)
        return
    report = load(path)
    if not isinstance(report, Report) or report.scenario in WITHOUT:
        raise ValueError(f"{report.scenario} has no picture; these have none: {', '.join(WITHOUT)}")
    for other in map(load, also):
        if isinstance(other, Report):
            report = _with_variants(report, other)
    _drawing(report)(report, picture)


def draw_all(path: Path, folder: Path) -> list[Path]:
    """Every picture that there is of the report at ``path``, in ``folder``; none where nothing can be drawn."""
    wanted = {folder / f"{path.stem}.png": path}
    plans = plot_memory.plans_beside(path)
    if plans.exists():
        wanted[folder / f"{path.stem}-memory.png"] = plans
    drawn = []
    for picture, source in wanted.items():
        try:
            draw(source, picture)
        except ValueError:  # nothing to draw: a scenario without a picture, or no peaks, as on a CPU
            continue
        drawn.append(picture)
    return drawn


def _with_variants(report: Report, other: Report) -> Report:
    def key(record: Record) -> tuple[object, str]:
        return record.case, record.variant.label

    there = {key(r) for r in report.records if r.result.step_ms is not None}
    cases = {r.case for r in report.records}
    more = [r for r in other.records if r.case in cases and key(r) not in there]
    return replace(report, records=[*report.records, *more])


def _drawing(report: Report) -> Callable[[Report, Path], None]:
    return phases_plot.draw if report.scenario in BARS else plot.draw


def _holds_plans(path: Path) -> bool:
    return path.stem.endswith(plot_memory.SUFFIX)
