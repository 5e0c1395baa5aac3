"""A plan as a picture: memory over the step on the left, the frontier of peak against time on the right."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fxoffload.plan_report.table import describe, gib
from fxoffload.planner.plan import why_not_measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fxoffload.planner.plan import PlanData

_DPI = 150
_GIB = 2**30


def draw(plan: PlanData, path: str | os.PathLike[str], size_inches: tuple[float, float]) -> bytes:
    """The picture, as the content of a file called ``path``.

    Raises:
        ImportError: there is no matplotlib.
        RuntimeError: the plan has no boundaries to draw.
        ValueError: matplotlib cannot write that format.
    """
    try:
        # Not pyplot: it would choose a backend, and keep the figure, for the whole process.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"expected matplotlib to draw a plan with, found none ({error}); pip install fxoffload[plot]"
        ) from error
    if not plan.boundaries:
        raise RuntimeError(
            "expected a plan with a simulation, or with the boundaries of one, found neither; "
            "plot a plan of fxoffload.plans() or fxoffload.plan()"
        )
    figure = Figure(figsize=size_inches, dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    kind, known = Path(path).suffix.removeprefix(".").lower() or "png", canvas.get_supported_filetypes()
    if kind not in known:
        raise ValueError(f"expected a file that ends in one of {', '.join(sorted(known))}, found {os.fspath(path)!r}")
    figure.suptitle(describe(plan), fontsize="medium")
    if reason := why_not_measured(plan):
        figure.supxlabel(reason, fontsize="x-small", color="tab:gray")
    memory, frontier = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_memory(memory, plan)
    _draw_frontier(frontier, plan)
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=_DPI)
    return content.getvalue()


def _draw_memory(axes: Axes, plan: PlanData) -> None:
    times: list[float] = []
    live: list[float] = []
    for b in plan.boundaries:
        # As in the trace: where the peak is inside a segment is not known.
        times += [b.begin_ms, (b.begin_ms + b.end_ms) / 2, b.end_ms]
        live += [b.live_bytes / _GIB, b.peak_bytes / _GIB, b.after_bytes / _GIB]
    axes.plot(times, live, color="tab:blue", linewidth=1.2, label="on the device")
    axes.fill_between(times, live, color="tab:blue", alpha=0.15, linewidth=0)
    begins = [*(b.begin_ms for b in plan.boundaries), plan.boundaries[-1].end_ms]
    parts = (
        ("on their way to the host", "tab:orange", [b.in_flight_bytes for b in plan.boundaries]),
        ("reloaded ahead", "tab:green", [b.ahead_bytes for b in plan.boundaries]),
        ("gradients", "tab:purple", [b.gradient_bytes for b in plan.boundaries]),
        ("outside compiled graphs", "tab:brown", [b.outside_bytes for b in plan.boundaries]),
    )
    for label, color, nbytes in parts:
        if any(nbytes):
            levels = [n / _GIB for n in (*nbytes, nbytes[-1])]
            axes.plot(begins, levels, color=color, linewidth=0.9, drawstyle="steps-post", label=label)
    _draw_measured(axes, plan)
    peak = max(b.peak_bytes for b in plan.boundaries)
    axes.axhline(peak / _GIB, color="tab:blue", linestyle=":", label=f"peak, {gib(peak)} GiB")
    _draw_budget(axes, plan)
    base = (plan.calibrated_baseline or plan.baseline).peak_bytes
    axes.axhline(base / _GIB, color="tab:gray", linestyle="-.", label=f"plain Inductor's peak, {gib(base)} GiB")
    backward = next((b.begin_ms for b in plan.boundaries if b.phase == "backward"), None)
    if backward is not None:
        axes.axvline(backward, color="tab:gray", linewidth=0.6)
        axes.annotate(
            "backward", (backward, 1), (3, -3), xycoords=("data", "axes fraction"), textcoords="offset points", va="top"
        )
    axes.set(xlabel="ms", ylabel="GiB", title="Memory over the step")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _draw_measured(axes: Axes, plan: PlanData) -> None:
    """What the allocator had at the edges of each segment of a measured step, and its exact peaks as far as known."""
    if plan.measured_step is None:
        return
    edges: list[tuple[float, float]] = []
    peaks: list[tuple[float, float]] = []
    for s in plan.measured_step.segments:
        for at, nbytes in ((s.begin_ms, s.live_bytes), (s.end_ms, s.after_bytes)):
            if nbytes is not None:
                edges.append((at, nbytes / _GIB))
        if s.peak_bytes is not None:
            peaks.append(((s.begin_ms + s.end_ms) / 2, s.peak_bytes / _GIB))
    if edges:
        axes.plot(*zip(*edges, strict=True), color="black", linewidth=0.9, label="measured, between segments")
    if peaks:
        axes.plot(*zip(*peaks, strict=True), "x", color="black", markersize=4, label="measured, most inside a segment")


def _draw_frontier(axes: Axes, plan: PlanData) -> None:
    points = sorted(plan.frontier, key=lambda p: (p.step_ms, -p.peak_bytes))
    if points:
        axes.plot(
            [p.step_ms for p in points], [p.peak_bytes / _GIB for p in points], ".-", color="tab:blue", label="frontier"
        )
    base = plan.baseline
    # Plain Inductor lies on the curve. So does the plan, if its memory as a budget is not planned for otherwise.
    for found, marker, size, fill, label in (
        (base, "s", 6, "full", "plain Inductor"),
        (plan.predicted, "*", 12, "full", "this plan"),
        (plan.checkpointing, "D", 6, "full", "activation checkpointing"),
        (plan.calibrated_baseline, "s", 6, "none", "plain Inductor, calibrated"),
        (plan.calibrated, "*", 12, "none", "this plan, calibrated"),
    ):
        if found is not None:
            color = {"*": "tab:red", "s": "tab:gray", "D": "tab:olive"}[marker]
            at = found.step_ms, found.peak_bytes / _GIB
            axes.plot(*at, marker, color=color, markersize=size, fillstyle=fill, label=label)
    if plan.measured_step_ms is not None and plan.measured_peak_bytes is not None:
        axes.plot(plan.measured_step_ms, plan.measured_peak_bytes / _GIB, "x", color="black", label="measured")
    _draw_budget(axes, plan)
    if plan.max_slowdown is not None and base.step_ms:
        label = f"max_slowdown, {100 * plan.max_slowdown:.1f} %"
        most_ms = base.step_ms * (1 + plan.max_slowdown)
        axes.axvline(most_ms, color="tab:red", linestyle=":", linewidth=1, label=label)
    axes.set(xlabel="step ms", ylabel="peak GiB", title="Peak against time")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _legend(axes: Axes) -> None:
    # Below the axes, where it hides nothing.
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)


def _draw_budget(axes: Axes, plan: PlanData) -> None:
    if plan.activation_budget is not None:
        label = f"activation_budget, {gib(plan.activation_budget)} GiB"
        axes.axhline(plan.activation_budget / _GIB, color="tab:red", linestyle="--", linewidth=1, label=label)
