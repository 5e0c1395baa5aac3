"""Seconds that phase switches take, as bars by variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.rl.records import RlResult
from benchmarks.save_figure import save_figure
from benchmarks.schema import Record, Report

PANEL_INCHES = (7.0, 4.2)
Bars = dict[str, dict[str, float]]


def draw(report: Report, path: Path) -> None:
    """``phases``: each way, first and steady, and the exposed time around log-probs; ``rl-step``: the switching.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: another scenario, or nothing was measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for panel in _panels(report) if panel[1]]
    if not panels:
        raise ValueError(f"expected measured rows of phases or rl-step, found none in this report of {report.scenario}")
    width, height = PANEL_INCHES
    figure, axes = pyplot.subplots(1, len(panels), figsize=(width * len(panels), height), squeeze=False)
    for axis, (title, bars) in zip(axes[0], panels, strict=True):
        _panel(axis, bars)
        axis.set_title(title)
    figure.suptitle(f"{report.environment.get('gpu_name') or 'no GPU'}, torch {report.environment.get('torch')}")
    figure.tight_layout()
    save_figure(figure, path)
    pyplot.close(figure)


def _panels(report: Report) -> list[tuple[str, Bars]]:
    results = {_label(record): record.result.rl or RlResult() for record in report.records}
    if report.scenario == "rl-step":
        return [("switching in an RL step", {label: _step_bars(rl) for label, rl in results.items() if _step_bars(rl)})]
    if report.scenario != "phases":
        return []
    first = {label: _first_bars(rl) for label, rl in results.items() if _first_bars(rl)}
    steady = {label: _steady_bars(rl) for label, rl in results.items() if _steady_bars(rl)}
    return [("first cycle", first), ("later cycles", steady)]


def _label(record: Record) -> str:
    return record.variant.label if record.status == "ok" else f"{record.variant.label}\n({record.status})"


def _first_bars(rl: RlResult) -> dict[str, float]:
    found = rl.switching
    if found is None or found.first_offload_s is None or found.first_onload_s is None:
        return {}
    return {"offload": found.first_offload_s, "onload": found.first_onload_s}


def _steady_bars(rl: RlResult) -> dict[str, float]:
    found = rl.switching
    if found is None or found.offload is None or found.onload is None:
        return {}
    bars = {"offload": found.offload.seconds.median, "onload": found.onload.seconds.median}
    if found.exposed is not None:
        bars["optimizer around log-probs, exposed"] = max(0.0, found.exposed.exposed_s)
    return bars


def _step_bars(rl: RlResult) -> dict[str, float]:
    found = rl.step
    if found is None or found.switching_s is None:
        return {}
    return {phase: max(0.0, seconds - found.phase_alone_s.get(phase, 0.0)) for phase, seconds in found.phase_s.items()}


def _panel(axis: Any, bars: Bars) -> None:
    """A group of bars for each variant, with its seconds on top."""
    names = list(dict.fromkeys(name for row in bars.values() for name in row))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        # A missing measurement has no bar: one of no height would say that it took no time.
        heights = {position + index * width: row[name] for position, row in enumerate(bars.values()) if name in row}
        drawn = axis.bar(list(heights), list(heights.values()), width, label=name)
        axis.bar_label(drawn, fmt="%.2f", fontsize="x-small")
    axis.set_xticks([position + 0.4 - width / 2 for position in range(len(bars))], list(bars))
    axis.set_ylabel("seconds")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize="small")
