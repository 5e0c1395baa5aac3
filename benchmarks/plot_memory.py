"""Memory over a step, as the plans of a run simulated it, against the peaks that were then measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.derived import case_label
from benchmarks.save_figure import save_figure
from benchmarks.schema import Report
from fxoffload.plan_report.plan import Plan

GIB = 1 << 30
PANEL_INCHES = (9.0, 5.0)
SUFFIX = "-plans"
REFERENCES = ("inductor", "checkpoint")


def plans_beside(report: Path) -> Path:
    """Where ``run`` writes the whole plans of the report at ``report``."""
    return report.with_name(f"{report.stem}{SUFFIX}.json")


def report_beside(plans: Path) -> Path:
    """The report whose plans these are."""
    return plans.with_name(f"{plans.stem.removesuffix(SUFFIX)}.json")


def draw(plans: Path, report: Report | None, path: Path) -> None:
    """A panel for each case, a curve for each plan: the one that the timed steps ran. A dashed line is a peak that
    ``report`` has measured, of the plan with the same color, or of a baseline.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: ``plans`` is no file of plans, or has none.
    """
    found = _read(plans)
    if not found:
        raise ValueError(f"expected plans with a simulated step in {plans}, found none")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width, height = PANEL_INCHES
    figure, panels = pyplot.subplots(
        1, len(found), figsize=(width * len(found), height), squeeze=False, layout="constrained"
    )
    for panel, (case, curves) in zip(panels[0], found.items(), strict=True):
        _panel(panel, curves, _measured_peaks(report, case))
        panel.set_title(case)
    if report is not None:
        figure.suptitle(f"{report.environment.get('gpu_name') or 'no GPU'}, torch {report.environment.get('torch')}")
    save_figure(figure, path)
    pyplot.close(figure)


def curve(plan: Plan) -> tuple[list[float], list[float]]:
    """Milliseconds and GiB on the device: at a segment's begin, its peak in the middle (where in it is not known), and
    at its end."""
    times = [time for b in plan.boundaries for time in (b.begin_ms, (b.begin_ms + b.end_ms) / 2, b.end_ms)]
    sizes = [size / GIB for b in plan.boundaries for size in (b.live_bytes, b.peak_bytes, b.after_bytes)]
    return times, sizes


def _read(path: Path) -> dict[str, dict[str, Plan]]:
    """By case and variant. A plan that was calibrated is the one that ran in the timed steps."""
    texts: Any = json.loads(path.read_text())
    if not isinstance(texts, dict) or not all(isinstance(text, dict) for text in texts.values()):
        raise ValueError(f"expected the plans of a run in {path}, by variant, found something else")
    found: dict[str, dict[str, Plan]] = {}
    for key, versions in texts.items():
        name, size, variant = key.split(" ", 2)
        plan = Plan.from_json(versions.get("calibrated") or versions["frozen"])
        if plan.boundaries:
            found.setdefault(f"{name} {size}", {})[variant] = plan
    return found


def _measured_peaks(report: Report | None, case: str) -> dict[str, float]:
    return {
        record.variant.label: memory.peak_bytes / GIB
        for record in (report.records if report is not None else [])
        if case_label(record.case) == case and (memory := record.result.memory) is not None
    }


def _name(variant: str) -> str:
    """Of ``auto@activation_budget=1.05*checkpoint``: "fxoffload, budget of 1.05x checkpointing"."""
    name, _, budget = variant.partition("@activation_budget=")
    factor, _, of = budget.partition("*")
    amount = {"checkpoint": f"{factor}x checkpointing's peak", "smallest": "the smallest that is met"}.get(of, budget)
    if name != "auto":
        return {"inductor": "Inductor", "checkpoint": "checkpointing"}.get(variant, variant)
    return f"fxoffload, budget: {amount}" if budget else "fxoffload, default"


def _panel(panel: Any, curves: dict[str, Plan], peaks: dict[str, float]) -> None:
    for index, (variant, plan) in enumerate(curves.items()):
        times, sizes = curve(plan)
        panel.plot(times, sizes, color=f"C{index}", linewidth=1.0, label=f"{_name(variant)}, simulated")
        if variant in peaks:
            label = None if index else "the same color: peak, measured"
            panel.axhline(peaks[variant], color=f"C{index}", linestyle="--", linewidth=0.8, label=label)
    for variant, style in zip(REFERENCES, ("-.", ":"), strict=True):
        if variant in peaks:
            panel.axhline(
                peaks[variant], color="black", linestyle=style, linewidth=1.0, label=f"{_name(variant)}, peak, measured"
            )
    backwards = [b.begin_ms for plan in curves.values() for b in plan.boundaries if b.phase == "backward"]
    if backwards:
        panel.axvline(min(backwards), color="gray", linewidth=0.6)
        panel.annotate("backward", (min(backwards), 0.0), (3, 3), textcoords="offset points", fontsize="small")
    panel.set_xlabel("ms")
    panel.set_ylabel("on the device above the step's beginning, GiB")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False)
