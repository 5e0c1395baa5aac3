"""``fxoffload bench`` on a GPU, small: peaks are measured, the second plan keeps checkpointing's, bits return."""

from __future__ import annotations

import dataclasses

import pytest

from fxoffload.bench import run, sizing
from fxoffload.bench.show import render

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(900)
def test_a_small_bench() -> None:
    work = dataclasses.replace(sizing._work(1024, 4096), layers=4)
    report = run.bench(180.0, work=work)
    text = render(report)
    assert "REHEARSAL" not in text and report.machine.gpu
    plain, checkpoint, default, budgeted, phases = report.rows
    for row in (plain, checkpoint, default):
        assert row.status == "ok" and row.steps is not None and row.steps.peak_bytes, text
    assert plain.steps and checkpoint.steps and checkpoint.steps.peak_bytes and plain.steps.peak_bytes
    assert checkpoint.steps.peak_bytes < plain.steps.peak_bytes
    assert "DIFFER" not in text
    if budgeted.status == "ok":
        assert budgeted.steps and budgeted.steps.peak_bytes and budgeted.activation_budget
        assert budgeted.steps.peak_bytes <= budgeted.activation_budget, text
    else:  # so small a model may need more than checkpointing takes
        assert "activation_budget of at least" in budgeted.reason, text
    assert phases.switches is not None and phases.switches.equal, text
    assert phases.switches.link_down_gb_per_s and phases.switches.link_up_gb_per_s
