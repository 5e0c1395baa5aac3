"""Budgets of chains on a GPU hold extra memory outside the graphs: parameters that are gathered, as by FSDP."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from tests.gpu.gpu_support import MIB, Block

pytestmark = pytest.mark.gpu

WIDTH, TOKENS, DEPTH = 2048, 4096, 8
BUFFER = 512 * MIB


class Buffer:
    """What layers are gathered into on a stream of its own, as FSDP2 does it: each is kept until the next layer's, the
    last one until the backward begins."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.held: Tensor | None = None

    def take(self) -> None:
        with torch.cuda.stream(self.stream):
            after = torch.empty(BUFFER, dtype=torch.uint8, device="cuda")
        self.held = after

    def drop(self) -> None:
        self.held = None


class Enter(torch.autograd.Function):
    """In front of a layer: its parameters are there from here on; the backward is done with them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Gathered) -> Tensor:
        ctx.layer = layer
        layer.gather()
        if layer.buffer is not None:
            layer.buffer.take()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.layer.free()
        torch.empty(ctx.layer.passing_bytes, dtype=torch.uint8, device="cuda")
        return gradients[0], None


class Leave(torch.autograd.Function):
    """After it, the other way around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Gathered) -> Tensor:
        ctx.layer = layer
        layer.free()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.layer.gather()
        if ctx.layer.buffer is not None:
            ctx.layer.buffer.drop()
        return gradients[0], None


class Gathered(nn.Module):
    """A compiled block whose parameters have no memory but while it runs.

    Behind its backward ``passing_bytes`` are allocated and freed, as where FSDP reduces gradients.
    """

    def __init__(self, options: dict[str, Any], passing_bytes: int, buffer: Buffer | None) -> None:
        super().__init__()
        self.passing_bytes, self.buffer = passing_bytes, buffer
        self.block = Block(WIDTH, 16).to("cuda", torch.bfloat16)
        self.block.compile(backend="fxoffload", options=options)
        for p in self.block.parameters():
            p.grad = torch.zeros_like(p)
        self.whole = [p.detach().clone().cpu() for p in self.block.parameters()]
        self.free()

    def gather(self) -> None:
        for p, whole in zip(self.block.parameters(), self.whole, strict=True):
            p.untyped_storage().resize_(whole.nbytes)
            p.data.copy_(whole)

    def free(self) -> None:
        for p in self.block.parameters():
            p.untyped_storage().resize_(0)

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(self.block(Enter.apply(x, self)), self)


def run(
    *, passing_bytes: int = 0, resets: bool = True, buffered: bool = False, **options: Any
) -> tuple[list[int], fxoffload.Plan | None]:
    """Peaks of steps above the bytes at their beginning, and the plan. ``resets``: whether the process' peak is reset
    before each step; else only before the last four, and earlier ones show the process' peak so far. ``buffered``:
    layers are gathered into a ``Buffer``."""
    torch.compiler.reset()
    before = {p.graph for p in fxoffload.plans()}
    torch.manual_seed(0)
    buffer = Buffer() if buffered else None
    options = {"min_bytes": 1 << 16, "profile": "h200", **options}
    layers = nn.Sequential(*(Gathered(options, passing_bytes, buffer) for _ in range(DEPTH)))
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x.grad = torch.zeros_like(x)
    peaks = []
    torch.cuda.reset_peak_memory_stats()
    for i in range(16):
        for thread in threading.enumerate():
            if thread.name in ("fxoffload-chain-plan", "fxoffload-replan"):
                thread.join()
        torch.cuda.synchronize()
        if resets or i >= 12:
            torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        layers(x).float().square().mean().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - base)
    plans = [p for p in fxoffload.plans() if p.graph not in before]
    return peaks, plans[0] if plans else None


def test_a_budget_holds_the_extra_memory_of_eager_code() -> None:
    kept, _ = run(policy="keep_all")
    budget = int(0.6 * kept[-1])
    peaks, plan = run(activation_budget=budget)
    assert plan is not None and plan.predicted.bytes_offloaded > 0
    seen = f"{[p / MIB for p in peaks]} MiB, {budget / MIB} allowed; {plan.summary}"
    assert max(peaks[3:]) <= 1.05 * budget, seen  # memory between calls is not known before steps are measured
    assert max(peaks[-6:]) <= budget, seen
    # Gathered memory is in the prediction: it is more than the working set of a segment could hide.
    assert max(peaks[4:]) >= 0.85 * plan.predicted_peak_bytes
    assert plan.baseline_peak_bytes == pytest.approx(kept[-1], rel=0.05)
    assert plan.calibrated is not None
    assert plan.calibrated.peak_bytes == pytest.approx(max(peaks[-3:]), rel=0.06)


def test_a_budget_holds_what_passes_between_calls_of_a_process_that_never_resets_its_peak() -> None:
    passing = 256 * MIB
    kept, _ = run(policy="keep_all", passing_bytes=passing)
    budget = int(0.6 * kept[-1])
    peaks, plan = run(activation_budget=budget, passing_bytes=passing, resets=False)
    assert plan is not None and plan.predicted.bytes_offloaded > 0
    seen = f"{[p / MIB for p in peaks]} MiB, {budget / MIB} allowed; {plan.summary}"
    assert max(peaks[-4:]) <= budget, seen
    assert plan.calibrated is not None
    assert plan.calibrated.peak_bytes == pytest.approx(max(peaks[-4:]), rel=0.06), seen


def test_a_budget_holds_what_was_gathered_before_the_first_call() -> None:
    """The buffer of the first layer is there before a call says that a step begins, and is the step's all the same."""
    kept, _ = run(policy="keep_all", buffered=True)
    budget = int(0.7 * kept[-1])
    assert 0.05 * budget < BUFFER
    peaks, plan = run(activation_budget=budget, buffered=True)
    assert plan is not None and plan.predicted.bytes_offloaded > 0
    seen = f"{[p / MIB for p in peaks]} MiB, {budget / MIB} allowed; {plan.summary}"
    assert max(peaks[-6:]) <= budget, seen
    assert plan.calibrated is not None and plan.calibrated_baseline is not None
    assert plan.calibrated_baseline.peak_bytes == pytest.approx(kept[-1], rel=0.05), f"{kept[-1] / MIB} MiB, {seen}"
    assert plan.calibrated.peak_bytes == pytest.approx(max(peaks[-3:]), rel=0.06), seen
