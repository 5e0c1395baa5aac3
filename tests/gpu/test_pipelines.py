"""Steps of several microbatches in a pipeline's order, on a GPU: planned as one step, within the budget, with the same
bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fxoffload
from tests.gpu.gpu_support import (
    MIB,
    WIDTH,
    Stack,
    allocated_above,
    deterministic,
    differing,
    disturbed,
    join,
    sleep,
)

pytestmark = pytest.mark.gpu

LAYERS, STEPS = 4, 14
BATCH, LENGTH = 4, 2048  # activations are large against the part of a budget outside the graphs
FOLLOWED_FROM = 4  # the first step that follows the plan
SHARE = 0.6  # of what plain Inductor takes


def inputs(seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)


def run(module: Stack, order: str, seed: int) -> list[Tensor]:
    """One step: its losses, and the gradients. "F" is the next microbatch's forward, a digit the backward of that."""
    module.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for one in order:
        if one == "F":
            losses.append(module(inputs(seed + len(losses))))
        else:
            losses[int(one)].backward()
    return [*(loss.detach().clone() for loss in losses), *(p.grad for p in module.parameters() if p.grad is not None)]


def compiled(**options: object) -> Stack:
    """Each layer is compiled on its own."""
    torch.manual_seed(0)
    module = Stack(LAYERS).to("cuda", torch.bfloat16)
    for layer in module.layers:
        layer.compile(**options)
    return module


@pytest.mark.parametrize("order", ["FF0F1F23", "FF01"])
def test_a_budget_is_met_by_all_microbatches_together(order: str) -> None:
    plain = compiled()
    run(plain, order, 0)
    budget = int(SHARE * allocated_above(lambda: run(plain, order, 0)))
    torch.compiler.reset()
    before = {p.graph for p in fxoffload.plans()}
    options = {"min_bytes": 1 << 16, "profile": "h200", "activation_budget": budget}
    module = compiled(backend="fxoffload", options=options)
    peaks = []
    for i in range(STEPS):
        peaks.append(allocated_above(lambda i=i: run(module, order, 10 * i)))
        join("fxoffload-chain-plan", "fxoffload-replan")
    plan = [p for p in fxoffload.plans() if p.graph not in before][-1]
    assert plan.calibrated is not None and plan.measured_step_ms is not None
    times = [plan.predicted.step_ms, plan.calibrated.step_ms, plan.measured_step_ms]
    seen = f"{[round(n / MIB, 1) for n in peaks]} MiB of {budget / MIB:.1f}; {plan.summary}; {times} ms"
    print(seen)
    assert f"over {LAYERS * order.count('F')} calls" in plan.summary, seen
    assert plan.predicted.peak_bytes <= budget, seen
    assert max(peaks[FOLLOWED_FROM:]) <= budget, seen
    with deterministic():
        for seed in (100, 200):
            with fxoffload.override_policy("keep_all"):
                kept = run(module, order, seed)
            fxoffload.reset_stats()
            with disturbed(seed):
                sleep(5.0)  # the host runs ahead of the device
                found = run(module, order, seed)
            assert differing(kept, found) == 0
            stats = fxoffload.stats()
            assert stats.bytes_offloaded == stats.bytes_reloaded + stats.bytes_reclaimed
            assert stats.bytes_offloaded > 0 or "recompute more" in plan.summary
    assert fxoffload.stats().host_bytes_in_use == 0
