"""Plans over several graphs on a GPU: calibrated and measured numbers are those of steps, and no step waits."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from tests.gpu.gpu_support import Stack, join, sleep

pytestmark = pytest.mark.gpu

# A layer takes milliseconds. The device stands before each step, so that even a slow host is ahead of it. Otherwise the
# host sets the length of steps, which no plan knows.
AHEAD_MS = 200.0
WIDTH, TOKENS, DEPTH = 2048, 8192, 8
OPTIONS = {"min_bytes": 1 << 16, "profile": "h200", "max_slowdown": 0.3}
# Skipped, measured, planned again, skipped, measured, read; and some in which the thread plans.
STEPS = 24


def build(**changes: object) -> Stack:
    torch.manual_seed(0)
    model = Stack(DEPTH, WIDTH, 16).to("cuda", torch.bfloat16)
    for layer in model.layers:
        layer.compile(backend="fxoffload", options={**OPTIONS, **changes})
    return model


def step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    sleep(AHEAD_MS)
    model(x).backward()


def device_ms(model: nn.Module, x: Tensor) -> float:
    """What a step takes once the device has come to it."""
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sleep(AHEAD_MS)
    began.record()
    model(x).backward()
    ended.record()
    assert not began.query(), "expected the host to be ahead"
    torch.cuda.synchronize()
    return began.elapsed_time(ended)


@pytest.mark.parametrize("disable", [("tape_recompute",), ()])
def test_a_chain_is_calibrated_and_measured(disable: tuple[str, ...]) -> None:
    torch.compiler.reset()
    before = {p.graph for p in fxoffload.plans()}
    model = build(disable=disable)
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        step(model, x)  # two are recorded, and planned when the third begins
    join("fxoffload-chain-plan")
    (plan,) = [p for p in fxoffload.plans() if p.graph not in before]
    assert plan.calibrated is None and f"over {DEPTH} calls" in plan.summary
    step(model, x)  # variants are compiled
    torch.cuda.synchronize()
    highest = torch.cuda.max_memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STEPS):
            step(model, x)
            time.sleep(AHEAD_MS / 1e3 + 0.1)  # the device passes the step
            join("fxoffload-replan")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() >= highest, "the user's counter was reset"
    (plan,) = [p for p in fxoffload.plans() if p.graph not in before]
    assert plan.calibrated is not None and plan.calibrated_baseline is not None
    assert plan.measured_step_ms is not None and plan.measured_exposed_ms is not None
    took = statistics.median(device_ms(model, x) for _ in range(7))
    assert plan.measured_step_ms == pytest.approx(took, rel=0.1)
    assert plan.calibrated.step_ms == pytest.approx(took, rel=0.1)
    assert plan.measured_exposed_ms < 0.5 * plan.measured_step_ms
    fxoffload.reset_stats()
    step(model, x)
    torch.cuda.synchronize()
    assert fxoffload.stats().bytes_offloaded == plan.calibrated.bytes_offloaded
    assert plan.calibrated.bytes_offloaded > 0 or not disable


def test_a_piece_that_is_off() -> None:
    torch.compiler.reset()
    before = {p.graph for p in fxoffload.plans()}
    model = build(disable=("calibration", "tape_recompute"))
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        step(model, x)
    join("fxoffload-chain-plan")
    for _ in range(8):
        step(model, x)
    torch.cuda.synchronize()
    step(model, x)
    (plan,) = [p for p in fxoffload.plans() if p.graph not in before]
    assert plan.calibrated is None and plan.measured_step_ms is None
