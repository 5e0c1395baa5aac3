"""Which picture a file gets: by its scenario, or memory over a step where it holds plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import plot, plot_memory
from benchmarks.load import load
from benchmarks.rl import plot as phases_plot
from benchmarks.schema import Report

BARS = ("phases", "rl-step")
WITHOUT = ("pinning", "weight-sync", "compile-time", "longest", "max-seq", "overhead", "moe-convert")


def draw(path: Path, picture: Path) -> None:
    """Draw the result file at ``path``: peak against time, seconds of phase switches, or (``*-plans.json``) memory over
    a step.

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


def _drawing(report: Report) -> Callable[[Report, Path], None]:
    return phases_plot.draw if report.scenario in BARS else plot.draw


def _holds_plans(path: Path) -> bool:
    return path.stem.endswith(plot_memory.SUFFIX)
