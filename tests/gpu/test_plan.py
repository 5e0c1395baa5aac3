"""Plans on a GPU: budgets are met, gradients are those of keeping everything, predictions come true."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from tests.gpu.gpu_support import allocated_above, build, fresh_input, join

pytestmark = pytest.mark.gpu

OPTIONS = {"min_bytes": 1 << 16, "profile": "h200"}


def gradients(model: nn.Module, compiled: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = compiled(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def plain_peak(model: nn.Module) -> int:
    """What the planner says of plain Inductor, and the smallest budget."""
    torch.compiler.reset()
    compiled = torch.compile(model, backend="fxoffload", options={**OPTIONS, "max_slowdown": 9.0})
    gradients(model, compiled, fresh_input(0))
    return fxoffload.plans()[-1].baseline_peak_bytes


def test_a_budget_is_met_in_every_step_and_changes_no_gradient() -> None:
    model = build(depth=16)
    budget = int(0.75 * plain_peak(model))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="fxoffload", options={**OPTIONS, "activation_budget": budget})
    peaks = []
    for step in range(12):
        x = fresh_input(step)
        model.zero_grad()
        peaks.append(allocated_above(lambda x=x: compiled(x).backward()))
        join("fxoffload-replan")
    plan = fxoffload.plans()[-1]
    assert plan.predicted_peak_bytes <= budget
    assert max(peaks[1:]) <= budget, [p / 2**20 for p in peaks]
    assert plan.calibrated is not None and plan.calibrated.peak_bytes <= budget
    assert fxoffload.stats().bytes_offloaded > 0

    x = fresh_input(99)
    torch.use_deterministic_algorithms(True)
    try:
        planned = gradients(model, compiled, x)
        with fxoffload.override_policy("keep_all"):
            kept = gradients(model, compiled, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(planned, kept, strict=True))


def test_the_calibrated_plan_is_near_what_is_measured() -> None:
    model = build(depth=16)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="fxoffload", options={**OPTIONS, "max_slowdown": 0.5})
    for step in range(16):
        gradients(model, compiled, fresh_input(step))
        join("fxoffload-replan")
    torch.cuda.synchronize()
    gradients(model, compiled, fresh_input(0))
    plan = fxoffload.plans()[-1]
    assert plan.calibrated is not None
    assert plan.measured_step_ms is not None
    # Small kernels: the host's own time between segments is part of the step and not of the prediction.
    assert plan.measured_step_ms == pytest.approx(plan.calibrated.step_ms, rel=0.5)
