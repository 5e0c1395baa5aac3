"""Graphs of several layers each that run in one step: their plans are for the step, or a warning says so."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fxoffload
from fxoffload.compiler import call_choice, plan_of_graph, planning
from fxoffload.compiler.chain_graphs import other_forms
from fxoffload.plan_report.plan import Plan
from fxoffload.runtime.engine import engine_for
from tests.planner.test_chain_replan import measured
from tests.support import Block, Halves, Stack, batch

OPTIONS: dict[str, Any] = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1}
# A half of ``Halves`` takes 1.25 MB, all of it 2.38.
ONE_HALF = 1_250_048
BUCKET_BYTES = 1 << 14
STEPS = 5  # in one they are seen together, two are recorded; the fourth is planned


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """What fxoffload warns of."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if "activation_budget" in str(w.message)]


def step(model: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Loss and gradients."""
    for p in module.parameters():
        p.grad = None
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def peak_of(run: Callable[[], object]) -> int:
    """Most bytes that the CPU's allocator had above those at the beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]  # the stub lacks it
            most = max(most, now)
    return most


def plans_since(before: set[int]) -> list[Plan]:
    return [p for p in fxoffload.plans() if p.graph not in before]


def known() -> set[int]:
    return {p.graph for p in fxoffload.plans()}


@pytest.mark.slow
@pytest.mark.parametrize("budget", [900_000, 1_240_000])
def test_a_budget_is_for_the_step_and_not_for_each_graph(budget: int) -> None:
    module, x, before = Halves(), batch(length=480), known()
    model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "activation_budget": budget})
    with told() as warned:
        for _ in range(STEPS):
            step(model, module, x)
    assert warned == []
    first, second, together = plans_since(before)
    assert all("planned together" in p.summary for p in (first, second))
    assert "over 2 calls of 2 graphs" in together.summary
    assert together.predicted.peak_bytes <= budget < together.baseline.peak_bytes
    fxoffload.reset_stats()
    found: list[Tensor] = []
    peak = peak_of(lambda: found.extend(step(model, module, x)))
    assert fxoffload.stats().bytes_offloaded == together.predicted.bytes_offloaded > 0
    with fxoffload.override_policy("keep_all"):
        kept = step(model, module, x)
    assert len(found) == len(kept) > 12
    assert all(map(torch.equal, found, kept))
    torch.compiler.reset()
    plain = torch.compile(module, backend="fxoffload", options={**OPTIONS, "policy": "keep_all"})
    step(plain, module, x)
    most = peak_of(lambda: step(plain, module, x))
    # Extra memory (the loss, and gradients that add up) is the same in both.
    assert most - peak == pytest.approx(together.baseline.peak_bytes - together.predicted.peak_bytes, rel=0.05)


def test_without_a_budget_the_plan_is_for_the_step_too() -> None:
    module, x, before = Halves(), batch(length=48), known()
    model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "max_slowdown": 5.0})
    for _ in range(STEPS):
        step(model, module, x)
    first, second, together = plans_since(before)
    assert "over 2 calls of 2 graphs, the least peak found" in together.summary
    # Plain Inductor's step, and not that of graphs which recompute what their own plans say.
    assert together.baseline.step_ms == pytest.approx(first.baseline.step_ms + second.baseline.step_ms)
    assert together.predicted.peak_bytes < 0.7 * together.baseline.peak_bytes
    fxoffload.reset_stats()
    found = step(model, module, x)
    assert fxoffload.stats().bytes_offloaded == together.predicted.bytes_offloaded > 0
    with fxoffload.override_policy("keep_all"):
        assert all(map(torch.equal, found, step(model, module, x)))


def test_forms_that_a_plan_of_its_own_replaces() -> None:
    """Plain Inductor's where it differs; activation checkpointing's, which the step is compared with, in any case."""

    def form(step: str) -> Any:
        return SimpleNamespace(step=step)

    def names(base: str | None, checkpointed: str | None) -> set[str]:
        planned = SimpleNamespace(
            partitioning=form("own"), base=base and form(base), checkpointed=checkpointed and form(checkpointed)
        )
        return set(other_forms(planned, None))  # type: ignore[arg-type]

    assert names("plain", None) == {"plain"}
    assert names("own", None) == names(None, None) == set()
    assert names("own", "own") == {"checkpointed"}


@pytest.fixture
def group() -> Iterator[None]:
    """One rank; DDP's buckets are small."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", BUCKET_BYTES):
        yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_the_buckets_of_ddp() -> None:
    """DDPOptimizer makes a graph of each, of three layers."""
    module, x, before, budget = Stack(6), batch(length=48), known(), 120_000
    ddp = DistributedDataParallel(module, bucket_cap_mb=BUCKET_BYTES / 2**20)
    model = torch.compile(ddp, backend="fxoffload", options={**OPTIONS, "activation_budget": budget})
    with told() as warned:
        for _ in range(STEPS):
            step(model, module, x)
    assert warned == []
    first, second, together = plans_since(before)
    assert "over 2 calls of 2 graphs" in together.summary
    assert together.predicted.peak_bytes <= budget < first.baseline.peak_bytes < together.baseline.peak_bytes
    assert budget < second.baseline.peak_bytes
    fxoffload.reset_stats()
    found = step(model, module, x)
    assert fxoffload.stats().bytes_offloaded == together.predicted.bytes_offloaded > 0
    with fxoffload.override_policy("keep_all"):
        assert all(map(torch.equal, found, step(model, module, x)))


@pytest.mark.slow
def test_a_graph_that_follows_the_plan_of_a_step_is_not_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It then takes more or less than planned. Where that plan is lost it is measured again, unless it was for good."""

    class Follower:
        clock, calibration, stopped = object(), None, False
        begun = 0

        def step_begins(self, **_: object) -> None:
            self.begun += 1

        def stop(self) -> None:
            self.stopped, self.clock = True, None

    followers: list[Follower] = []

    def follow(*_: object) -> Follower:
        followers.append(Follower())
        return followers[-1]

    monkeypatch.setattr(plan_of_graph, "replan_for", follow)
    monkeypatch.setattr(call_choice, "_FOR_GOOD", 6)
    module, x, before = Halves(breaks=False), batch(length=48), known()
    model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "max_slowdown": 5.0})

    def steps(count: int, forwards: int) -> int:
        """Returns how many were measured by themselves."""
        begun = sum(f.begun for f in followers)
        for _ in range(count):
            sum(model(x).square().mean() for _ in range(forwards)).backward()  # type: ignore[union-attr]
        return sum(f.begun for f in followers) - begun

    def said() -> bool:
        return "planned together" in plans_since(before)[0].summary

    assert (steps(3, 2), said()) == (6, False)
    assert (steps(1, 2), said()) == (0, True)
    assert (steps(4, 1) > 0, said()) == (True, False)
    assert not any(f.stopped for f in followers)
    steps(STEPS + 3, 2)
    assert said() and all(f.stopped for f in followers)


@pytest.mark.slow
def test_a_forward_without_a_backward_beside_a_step_changes_no_plan() -> None:
    """Validation that forgot ``no_grad``, whose result is still there when the next step begins."""
    module, x, before = Halves(breaks=False), batch(length=480), known()
    model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "activation_budget": 1_600_000})
    with told() as warned:
        for _ in range(STEPS):
            step(model, module, x)
            left = model(x)
    assert warned == []
    (plan,) = plans_since(before)
    assert "together" not in plan.summary
    fxoffload.reset_stats()
    step(model, module, x)
    assert fxoffload.stats().bytes_offloaded == plan.predicted.bytes_offloaded > 0
    del left


@pytest.mark.slow
def test_the_plan_is_made_again_with_measured_times() -> None:
    """As that of any chain; the graphs have several segments both ways."""
    with measured(1e-3), told() as warned:
        module, x, before, budget = Halves(), batch(length=480), known(), 1_240_000
        model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "activation_budget": budget})
        for _ in range(14):
            step(model, module, x)
        together = plans_since(before)[-1]
        assert together.calibrated is not None and together.measured_step_ms is not None
        assert together.calibrated.peak_bytes <= budget
        assert together.calibrated_baseline is not None
        assert together.calibrated_baseline.peak_bytes == together.baseline.peak_bytes  # the graphs recompute
        fxoffload.reset_stats()
        found = step(model, module, x)
        assert fxoffload.stats().bytes_offloaded == together.calibrated.bytes_offloaded > 0
        with fxoffload.override_policy("keep_all"):
            assert all(map(torch.equal, found, step(model, module, x)))
    assert warned == []


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["inside", "outside"])
def test_graphs_that_fit_alone(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its loss, each half would be plain Inductor's: together they take what keep_all takes, and nothing can move.
    Without, each is cut, and they are planned together."""
    monkeypatch.setattr(planning, "loss_of", lambda states: loss)
    module, x, before, budget = Halves(), batch(length=480), known(), 1_600_000
    model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "activation_budget": budget})
    with told() as warned:
        for _ in range(STEPS):
            step(model, module, x)
    if loss == "inside":
        assert len(warned) == 2, "once for each"
        assert all("fits into the budget alone" in text for text in warned)
        return
    assert warned == []
    *alone, together = plans_since(before)
    assert all(p.predicted == p.baseline and "give way to the loss" in p.summary for p in alone)
    assert together.predicted.peak_bytes <= budget < together.baseline.peak_bytes


@pytest.mark.slow
def test_three_graphs_of_which_one_fits_alone() -> None:
    """It does not return the loss, and is cut too."""

    class Thirds(Halves):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            for layer in self.third:
                x = layer(x)
            return x

    module, x, before = Thirds(), batch(length=480), known()
    module.third = nn.ModuleList(Block() for _ in range(2))
    model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "activation_budget": 1_240_000})
    with told() as warned:
        for _ in range(STEPS):
            step(model, module, x)
    assert warned == []
    assert "over 3 calls of 3 graphs" in plans_since(before)[-1].summary


@pytest.mark.slow
def test_what_a_user_keeps_is_no_sign_of_a_backward_to_come() -> None:
    class Features(Halves):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            features = self.first[0](x)
            return super().forward(features), features

    module, x = Features(breaks=False), batch(length=16)
    model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "activation_budget": 400_000})
    kept = []
    with told() as warned:
        for _ in range(12):
            result, features = model(x)
            kept.append(features.detach())
            result.square().mean().backward()
            del result, features
    assert warned == []
    assert len(engine_for(torch.device("cpu")).calls._plain.waiting()) <= 1


@pytest.mark.slow
def test_what_fits_side_by_side_stays_as_it_is() -> None:
    module, x, before = Halves(), batch(length=480), known()
    model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "activation_budget": 2 * ONE_HALF})
    with told() as warned:
        for _ in range(STEPS):
            step(model, module, x)
    assert warned == []
    assert len(plans_since(before)) == 2


@pytest.mark.slow
def test_a_half_and_layers_that_are_compiled_on_their_own() -> None:
    module, x, before, budget = Halves(breaks=False), batch(length=480), known(), 1_200_000
    options = {**OPTIONS, "activation_budget": budget}

    def first(x: Tensor) -> Tensor:
        for layer in module.first:
            x = layer(x)
        return x

    half = torch.compile(first, backend="fxoffload", options=options)
    for layer in module.second:
        layer.compile(backend="fxoffload", options=options)

    def model(x: Tensor) -> Tensor:
        x = half(x)
        for layer in module.second:
            x = layer(x)
        return x

    for _ in range(STEPS + 2):
        step(model, module, x)
    together = plans_since(before)[-1]
    assert fxoffload.stats().bytes_offloaded > 0
    assert "over 4 calls of 2 graphs" in together.summary
    assert together.predicted.peak_bytes <= budget
    found = step(model, module, x)
    with fxoffload.override_policy("keep_all"):
        assert all(map(torch.equal, found, step(model, module, x)))


@pytest.mark.slow
def test_two_models_in_turn_are_not_planned_together() -> None:
    """Actor and critic, each with a backward of its own after its forward."""
    modules, x, before = [Halves(breaks=False), Halves(breaks=False, half=4)], batch(length=480), known()
    models = [
        torch.compile(m, backend="fxoffload", options={**OPTIONS, "activation_budget": 1_240_000}) for m in modules
    ]
    with told() as warned:
        for _ in range(STEPS):
            for model, module in zip(models, modules, strict=True):
                step(model, module, x)
    assert warned == []
    assert [("over" in p.summary, "together" in p.summary) for p in plans_since(before)] == [(False, False)] * 2


@pytest.mark.slow
def test_validation_without_no_grad_is_not_planned_with_training() -> None:
    """Another graph (dropout), whose results are gone when the next step begins."""
    module, x, before = Stack(6, dropout=0.5), batch(length=480), known()
    model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "activation_budget": 1_240_000})
    with told() as warned:
        for _ in range(20):
            module.eval()
            model(x)
            module.train()
            step(model, module, x)
    assert warned == []
    assert not any("together" in p.summary for p in plans_since(before))


@pytest.mark.slow_except("FF10")
@pytest.mark.parametrize("order", ["FF10", "FF0F1F23"])
def test_microbatches_of_a_whole_model(order: str) -> None:
    """F is the next forward, a digit the backward of that one: a plan of the graph counts one, that of the step two."""
    module, before, budget = Halves(breaks=False), known(), 1_600_000
    inputs = [batch(i, length=480) for i in range(order.count("F"))]
    model = torch.compile(module, backend="fxoffload", options={**OPTIONS, "activation_budget": budget})

    def both() -> list[Tensor]:
        for p in module.parameters():
            p.grad = None
        losses: list[Tensor] = []
        for one in order:
            if one == "F":
                losses.append(model(inputs[len(losses)]).square().mean())
            else:
                losses[int(one)].backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    for _ in range(STEPS):
        both()
    alone, together = plans_since(before)
    assert alone.predicted.peak_bytes <= budget
    assert f"over {len(inputs)} calls of 1 graph" in together.summary
    assert together.predicted.peak_bytes <= budget < together.baseline.peak_bytes
    fxoffload.reset_stats()
    found = both()
    assert fxoffload.stats().bytes_offloaded == together.predicted.bytes_offloaded > 0
    with fxoffload.override_policy("keep_all"):
        assert all(map(torch.equal, found, both()))


@pytest.mark.slow
def test_sizes_that_vary_are_told_of() -> None:
    module = Halves()
    model = torch.compile(
        module, backend="fxoffload", dynamic=True, options={**OPTIONS, "activation_budget": 1_240_000}
    )
    with told() as warned:
        for length in (480, 481):
            step(model, module, batch(length=length))
    assert any("sizes vary from call to call" in text for text in warned)


def test_an_order_that_is_never_planned_is_told_of() -> None:
    """Forward, forward, and the backwards in an order that changes from step to step."""
    module, x = Halves(breaks=False), batch(length=16)
    for layer in [*module.first, *module.second]:
        layer.compile(backend="fxoffload", options={**OPTIONS, "activation_budget": "1GiB"})

    def microbatches(*, reverses: bool) -> None:
        losses = [module(v).square().mean() for v in (x, x + 1)]
        for loss in reversed(losses) if reverses else losses:
            loss.backward()

    with told() as warned:
        for i in range(20):
            microbatches(reverses=i % 2 == 0)
    assert len(warned) == 1
    assert "found steps that change too often" in warned[0]
