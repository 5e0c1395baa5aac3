"""Budgets of chains on a GPU hold what eager code has on the device beside the graphs, as FSDP's gathered parameters."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from tests.gpu.gpu_support import MIB, Block

pytestmark = pytest.mark.gpu

WIDTH, TOKENS, DEPTH = 1024, 8192, 8
GATHERED = 192 * MIB  # of each layer, in its forward and in its backward


class Layers(nn.Module):
    """Blocks that are compiled each on its own. Around each, hooks hold memory, as those of FSDP do: from before its
    forward to after it, and from before its backward to after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, 16) for _ in range(DEPTH))
        self.held: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda *_, i=i: self._gather(i))
            layer.register_forward_hook(lambda *_, i=i: self._free(i))
            layer.register_full_backward_pre_hook(lambda *_, i=i: self._gather(i))
            layer.register_full_backward_hook(lambda *_, i=i: self._free(i))

    def _gather(self, i: int) -> None:
        self.held[i] = torch.ones(GATHERED, dtype=torch.uint8, device="cuda")

    def _free(self, i: int) -> None:
        del self.held[i]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def run(**options: Any) -> tuple[Layers, list[int], fxoffload.Plan | None]:
    """Peaks of steps above what was allocated when they began, and the plan."""
    torch.compiler.reset()
    before = {p.graph for p in fxoffload.plans()}
    torch.manual_seed(0)
    model = Layers().to("cuda", torch.bfloat16)
    for layer in model.layers:
        layer.compile(backend="fxoffload", options={"min_bytes": 1 << 16, "profile": "h200", **options})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x.grad = torch.zeros_like(x)
    peaks = []
    for _ in range(16):
        for thread in threading.enumerate():
            if thread.name in ("fxoffload-tape-plan", "fxoffload-replan"):
                thread.join()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        model(x).backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - base)
    plans = [p for p in fxoffload.plans() if p.graph not in before]
    return model, peaks, plans[0] if plans else None


def test_a_budget_holds_what_eager_code_has_beside_the_graphs() -> None:
    _, kept, _ = run(policy="keep_all")
    budget = int(0.6 * kept[-1])
    _, peaks, plan = run(activation_budget=budget)
    assert plan is not None and plan.predicted.bytes_offloaded > 0
    assert max(peaks[3:]) <= budget, f"{[p / MIB for p in peaks]} MiB, {budget / MIB} allowed; {plan.summary}"
    # Gathered memory is in the prediction: it is more than the working set of a segment could hide.
    assert max(peaks[4:]) >= 0.85 * plan.predicted_peak_bytes
    assert plan.baseline_peak_bytes == pytest.approx(kept[-1], rel=0.05)
    assert plan.calibrated is not None
    assert plan.calibrated.peak_bytes == pytest.approx(max(peaks[-3:]), rel=0.05)
