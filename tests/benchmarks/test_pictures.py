"""Reports of several files, and the picture that each file gets."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.load import load
from benchmarks.machine import ROOT
from benchmarks.pictures import draw, draw_all
from benchmarks.plot_memory import curve, plans_beside, report_beside
from benchmarks.rl.plot import _panels
from benchmarks.schema import Report
from fxoffload.plan_report.plan import Plan

RESULTS = ROOT / "benchmarks" / "results"
SWEEP, PHASES = RESULTS / "2026-11-21-h200-plan-stack-sweep.json", RESULTS / "2026-11-22-h200-phases.json"
CONVERSIONS = RESULTS / "2026-11-22-cpu-moe-convert.json"
PNG = b"\x89PNG"


@pytest.mark.slow
def test_a_report_of_several_files_with_its_pictures(tmp_path: Path) -> None:
    words = ["report", str(PHASES), str(SWEEP), str(CONVERSIONS), "--plots", str(tmp_path / "plots")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    for path in (PHASES, SWEEP, CONVERSIONS):
        assert f"## {path.name}" in done.output
    assert "NOT held" in done.output and "timeout" in done.output
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {f"{PHASES.stem}.png", f"{SWEEP.stem}.png", f"{SWEEP.stem}-memory.png"}
    for name in drawn:
        assert (tmp_path / "plots" / name).read_bytes().startswith(PNG)
        assert f"({tmp_path / 'plots' / name})" in done.output


def test_show_is_a_report_of_one_file() -> None:
    shown, reported = (CliRunner().invoke(app, [word, str(SWEEP)]) for word in ("show", "report"))
    assert shown.exit_code == 0 and shown.output == reported.output
    assert "### plan" in shown.output and "## 2026" not in shown.output


def test_memory_over_a_step_is_the_plans(tmp_path: Path) -> None:
    plans = plans_beside(SWEEP)
    assert report_beside(plans) == SWEEP
    draw(plans, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(PNG)
    text = json.loads(plans.read_text())["stack 16x16384 auto"]["calibrated"]
    plan = Plan.from_json(text)
    times, sizes = curve(plan)
    assert times == sorted(times) and times[0] == 0.0
    assert times[-1] == pytest.approx((plan.calibrated or plan.predicted).step_ms)
    assert max(sizes) == pytest.approx((plan.calibrated or plan.predicted).peak_bytes / 2**30)


def test_what_was_not_measured_has_no_bar() -> None:
    report = load(PHASES)
    assert isinstance(report, Report)
    (_, first), (_, steady) = _panels(report)
    assert list(first) == list(steady) == ["fxoffload", "verl", "packed", "pageable\n(timeout)"]
    assert "optimizer around log-probs, exposed" in steady["verl"]
    assert "optimizer around log-probs, exposed" not in steady["pageable\n(timeout)"]


def test_files_without_a_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="moe-convert has no picture; these have none: pinning"):
        draw(CONVERSIONS, tmp_path / "x.png")
    assert draw_all(CONVERSIONS, tmp_path) == []
    path = tmp_path / "odd-plans.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="expected the plans of a run"):
        draw(path, tmp_path / "x.png")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"expected plans with a simulated step .* found none"):
        draw(path, tmp_path / "x.png")
    done = CliRunner().invoke(app, ["plot", str(CONVERSIONS), str(tmp_path / "x.png")])
    assert done.exit_code == 2 and not (tmp_path / "x.png").exists()
