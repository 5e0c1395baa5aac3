"""What eager code takes between the graphs of a step: in the budget, whatever the process has had before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fxoffload
from fxoffload.plan_report.plan import Plan
from fxoffload.torch_private.cuda import records_allocator_events
from tests.gpu.gpu_support import MIB, WIDTH, Stack, allocated_above, join, kept_peak

pytestmark = pytest.mark.gpu

DEPTH, BATCH, LENGTH = 8, 4, 2048
WIDER = 8  # than the stack: what its head makes
SHARE = 0.7  # of what plain Inductor takes
HIGH = 6 << 30
# Two are recorded, the third has it planned. Then the plan is followed, measured, and made again.
BEFORE, STEPS = 3, 20


class WithHead(Stack):
    """After it a head in eager code, which takes as much as several layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().repeat(1, 1, WIDER).softmax(-1).square().mean()


def inputs() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)


def build(**options: object) -> WithHead:
    torch.compiler.reset()
    torch.manual_seed(0)
    module = WithHead(DEPTH).to("cuda", torch.bfloat16)
    for layer in module.layers:
        if options:
            layer.compile(backend="fxoffload", options={"min_bytes": 1 << 16, "profile": "h200", **options})
        else:
            layer.compile()
    return module


@pytest.fixture
def budget() -> int:
    module = build()
    x = inputs()
    return int(SHARE * kept_peak(module, lambda: module(x)))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    torch.cuda.memory._record_memory_history(None)
    torch.compiler.reset()


def run(budget: int, unseen: int, *, is_theirs: bool = False) -> tuple[list[int], Plan]:
    """Peaks of the steps after the first ``unseen``, in which the allocator's peak is not reset; and the plan.
    ``is_theirs``: the record is taken by others."""
    before = {p.graph for p in fxoffload.plans()}
    torch.cuda.reset_peak_memory_stats()
    torch.empty(HIGH, dtype=torch.uint8, device="cuda")
    module, x, peaks = build(activation_budget=budget), inputs(), []
    for i in range(STEPS + 4):
        module.zero_grad(set_to_none=True)
        step = lambda: module(x).backward()  # noqa: E731
        if i < unseen:
            step()
            torch.cuda.synchronize()
            assert torch.cuda.max_memory_allocated() >= HIGH
        else:
            peaks.append(allocated_above(step))
        join("fxoffload-chain-plan", "fxoffload-replan")
    assert records_allocator_events() is is_theirs
    plan = [p for p in fxoffload.plans() if p.graph not in before][-1]
    print(f"{[round(n / MIB, 1) for n in peaks]} MiB of {budget / MIB:.1f}; {plan.summary}")
    return peaks, plan


def test_the_first_plan_knows_what_the_head_takes(budget: int) -> None:
    peaks, plan = run(budget, BEFORE)
    assert max(peaks) <= budget
    assert plan.predicted.bytes_offloaded > 0
    # In the first of these kernels are tuned: a schedule that leaves room for it is followed.
    assert abs(peaks[1] - plan.predicted.peak_bytes) < 0.1 * budget


def test_the_plan_from_measured_steps_knows_it(budget: int) -> None:
    peaks, plan = run(budget, STEPS)
    assert max(peaks) <= budget
    assert plan.calibrated is not None
    assert abs(max(peaks) - plan.calibrated.peak_bytes) < 0.05 * budget


def test_where_somebody_else_has_the_record_it_is_not_known(budget: int) -> None:
    """What the others show is there to be shown; and the record stays theirs."""
    torch.cuda.memory._record_memory_history(max_entries=1000)
    peaks, plan = run(budget, BEFORE, is_theirs=True)
    assert peaks[0] > budget, plan
