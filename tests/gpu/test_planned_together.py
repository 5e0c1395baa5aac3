"""Several graphs of several layers each in one step, on GPUs: one budget for all of them, met where it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.plan_report.plan import Plan
from tests.gpu.ddp_run import FOLLOWED_FROM, MEASURED_FROM
from tests.gpu.gpu_support import (
    MIB,
    WIDTH,
    Block,
    allocated_above,
    deterministic,
    differing,
    disturbed,
    gradients,
    join,
    kept_peak,
    sleep,
)
from tests.gpu.sharded_support import Ended, launch
from tests.support import Halves

pytestmark = pytest.mark.gpu

HALF, STEPS = 4, 14
BATCH, LENGTH = 4, 2048  # activations are large against the part of a budget outside the graphs
SHARE = 0.48  # of what plain Inductor takes: a half alone takes more


class Scalar(Halves):
    """Two halves of blocks, maybe with a graph break between them; then a scalar."""

    def __init__(self, breaks: bool) -> None:
        super().__init__(breaks, HALF, Block)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


def inputs(seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def check(module: nn.Module, step: Callable[[int], Tensor], budget: int, known: set[int], calls: int = 2) -> Plan:
    """Steps follow one plan for all graphs within the budget, with the gradients of keeping. Returns the plan.

    ``step``: forwards for the inputs of a number, and the loss whose backward is to come last. ``calls``: of graphs.
    """
    peaks = []
    for i in range(STEPS):
        module.zero_grad(set_to_none=True)
        peaks.append(allocated_above(lambda i=i: step(i).backward()))
        join("fxoffload-chain-plan", "fxoffload-replan")
    plan = [p for p in fxoffload.plans() if p.graph not in known][-1]
    seen = f"{[round(n / MIB, 1) for n in peaks]} MiB of {budget / MIB:.1f}; {plan.summary}"
    print(seen)
    assert f"over {calls} calls" in plan.summary
    assert max(peaks[FOLLOWED_FROM:]) <= budget, seen
    assert plan.predicted.peak_bytes <= budget
    assert plan.calibrated is not None and plan.calibrated.peak_bytes <= budget
    fxoffload.reset_stats()
    with deterministic():
        for seed in range(100, 106):
            with fxoffload.override_policy("keep_all"):
                kept = gradients(module, lambda s=seed: step(s))
            with disturbed(seed):
                sleep(5.0)  # the host runs ahead of the device
                found = gradients(module, lambda s=seed: step(s))
            assert differing(kept, found) == 0
    stats = fxoffload.stats()
    assert stats.bytes_offloaded == stats.bytes_reloaded + stats.bytes_reclaimed > 0
    assert (stats.num_groups_on_tape, stats.host_bytes_in_use) == (0, 0)
    return plan


def known() -> set[int]:
    return {p.graph for p in fxoffload.plans()}


def test_a_graph_break() -> None:
    """Each half takes more than the budget. The code after the halves is a graph of its own."""
    module = Scalar(breaks=True).to("cuda", torch.bfloat16)
    plain = torch.compile(module)
    budget = int(SHARE * kept_peak(module, lambda: plain(inputs(0))))
    torch.compiler.reset()
    before = known()
    options = {"min_bytes": 1 << 16, "profile": "h200", "activation_budget": budget}
    model = torch.compile(module, backend="fxoffload", options=options)
    plan = check(module, lambda i: model(inputs(i)), budget, before, calls=3)
    assert "3 graphs" in plan.summary


def test_microbatches_of_a_whole_model() -> None:
    """Two forwards, then two backwards."""
    module = Scalar(breaks=False).to("cuda", torch.bfloat16)

    def both(call: Callable[[Tensor], Tensor], seed: int) -> Tensor:
        return call(inputs(2 * seed)) + call(inputs(2 * seed + 1))

    plain = torch.compile(module)
    budget = int(SHARE * kept_peak(module, lambda: both(plain, 0)))
    torch.compiler.reset()
    before = known()
    options = {"min_bytes": 1 << 16, "profile": "h200", "activation_budget": budget}
    model = torch.compile(module, backend="fxoffload", options=options)
    plan = check(module, lambda i: both(model, i), budget, before)
    assert "1 graph" in plan.summary


# -- DDP ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """What both ranks found. They run once for all tests."""
    ended = launch(tmp_path_factory.mktemp("ddp"), reshard=True, tokens=BATCH * LENGTH, program="gpu.ddp_run")
    for rank, one in enumerate(ended):
        print(f"rank {rank}, exit status {one.code}:\n{one.log[-6000:]}")
    return ended


@pytest.mark.dist(gpus=1)
def test_the_buckets_of_ddp(ranks: list[Ended]) -> None:
    assert [one.code for one in ranks] == [0, 0], "\n".join(one.log[-3000:] for one in ranks)
    for one in ranks:
        found = one.found("budget")
        budget, peaks = found["budget_mib"], found["peaks_mib"]
        assert found["told"] == []
        # Two of four layers, and the rest after the first bucket's 1 MiB.
        assert "over 3 calls of 3 graphs" in found["summaries"][-1]
        assert sum("planned together" in text for text in found["summaries"]) == 2
        assert max(peaks[MEASURED_FROM:]) <= budget, f"{peaks} of {budget}"
        assert min(found["offloaded"][FOLLOWED_FROM:]) > 0
        assert found["calibrated_mib"] <= budget


@pytest.mark.dist(gpus=1)
def test_the_first_plan_over_the_buckets_of_ddp_meets_the_budget(ranks: list[Ended]) -> None:
    for found in (one.found("budget") for one in ranks):
        assert max(found["peaks_mib"][FOLLOWED_FROM:]) <= found["budget_mib"]


@pytest.mark.dist(gpus=1)
def test_gradients_under_ddp_are_those_of_keeping(ranks: list[Ended]) -> None:
    found = [one.found("budget") for one in ranks]
    for one in found:
        assert not any(one["differing"]), one["differing"]
        assert (one["groups_on_tape"], one["host_bytes_in_use"]) == (0, 0)
    assert found[0]["gradients"] == found[1]["gradients"], "DDP leaves every rank with the same"
