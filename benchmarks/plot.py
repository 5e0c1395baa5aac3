"""Peak memory against step time, one panel for each case: the plans' curve, torch's, and the policies' points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.derived import case_label
from benchmarks.published import EAGER_PEERS
from benchmarks.save_figure import save_figure
from benchmarks.schema import Record, Report

GIB = 1 << 30
CURVES = {"auto": ("fxoffload, plans", "C0", "o"), "torch_budget": ("torch activation_memory_budget", "C1", "s")}
NAMES = {
    "inductor": "Inductor",
    "checkpoint": "Inductor + full checkpointing",
    "keep_all": "fxoffload, keeps everything",
    "offload_all": "fxoffload, offloads everything",
    "torch_offload": "torch's activation offloading",
    **EAGER_PEERS,
}
PANEL_INCHES = (6.4, 4.8)
MARKERS = "Dv^P*Xph"


def draw(report: Report, path: Path) -> None:
    """Raises ImportError without matplotlib, ValueError where nothing has both a peak and a time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in dict.fromkeys(r.case for r in report.records) if _measured(report, case)]
    if not cases:
        raise ValueError("expected rows with a measured peak and step time, found none (a CPU has no peaks)")
    figure, panels = pyplot.subplots(
        1, len(cases), figsize=(PANEL_INCHES[0] * len(cases), PANEL_INCHES[1]), squeeze=False, layout="constrained"
    )
    for panel, case in zip(panels[0], cases, strict=True):
        _panel(panel, _measured(report, case))
        panel.set_title(case_label(case))
    figure.suptitle(f"{report.environment.get('gpu_name') or 'no GPU'}, torch {report.environment.get('torch')}")
    save_figure(figure, path)
    pyplot.close(figure)


def _measured(report: Report, case: Any) -> list[Record]:
    return [
        r for r in report.records if r.case == case and r.result.memory is not None and r.result.step_ms is not None
    ]


def _panel(panel: Any, records: list[Record]) -> None:
    for kind, (label, color, marker) in CURVES.items():
        points = sorted(_point(r) for r in records if r.variant.kind == kind)
        if points:
            panel.plot(*zip(*points, strict=True), color=color, marker=marker, label=label)
    for index, record in enumerate(r for r in records if r.variant.kind not in CURVES):
        marker = MARKERS[index // len(MARKERS) % len(MARKERS)]  # colors repeat after ten
        panel.plot(*_point(record), color=f"C{index + 2}", marker=marker, linestyle="", label=_name(record))
    plans = [r for r in records if r.result.plan is not None]
    predicted = [(p.predicted["peak_bytes"] / GIB, p.predicted["step_ms"]) for r in plans if (p := r.result.plan)]
    if predicted:
        panel.plot(*zip(*sorted(predicted), strict=True), color="C0", marker="x", linestyle=":", label="predicted")
    panel.set_xlabel("peak above the step's beginning, GiB")
    panel.set_ylabel("step, ms")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


def _name(record: Record) -> str:
    return NAMES.get(record.variant.label, record.variant.label).replace("`", "")


def _point(record: Record) -> tuple[float, float]:
    assert record.result.memory is not None and record.result.step_ms is not None
    return record.result.memory.peak_bytes / GIB, record.result.step_ms.median
