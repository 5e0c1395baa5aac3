"""Activation checkpointing that is on is a wish: plans choose what to keep, offload and recompute of its region."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxoffload
from fxoffload.plan_report.plan import Plan
from tests.marks import slow
from tests.support import (
    Block,
    Halves,
    Observed,
    Stack,
    assert_equal,
    assert_nothing_held,
    batch,
    compiled,
    rehearsal,
    train_step,
)

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, TOKENS = 64, 40
AUTO = {"policy": "auto", "profile": "h200", "in_flight_budget": None, "prefetch_budget": None}


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def must_recompute(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


class Ordered(Block):
    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, must_recompute)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


def stack(block: type[Block] = Checkpointed, layers: int = 4, **changes: Any) -> Stack:
    return Stack(layers, WIDTH, block=block, **changes)


def stepping(model: nn.Module, call: Callable[[Tensor], Tensor], length: int = TOKENS) -> Callable[[], Observed]:
    return train_step(model, lambda: call(batch(length=length, width=WIDTH)).square().sum())


def run(model: nn.Module, **changes: Any) -> tuple[Observed, Plan | None]:
    """One step of the compiled model with the bits that it has with everything kept, and its plan."""
    before = {p.graph for p in fxoffload.plans()}
    step = stepping(model, compiled(model, **{**AUTO, **changes}))
    found = step()
    with fxoffload.override_policy("keep_all"):
        assert_equal(step(), found)
    assert_nothing_held()
    new = [p for p in fxoffload.plans() if p.graph not in before]
    torch.compiler.reset()
    return found, new[-1] if new else None


def run_by_layer(
    model: Stack, steps: int = 5, dynamic: bool | None = None, length: int = TOKENS, **changes: Any
) -> tuple[Observed, Plan | None]:
    """The same with each layer compiled on its own."""
    before = {p.graph for p in fxoffload.plans()}
    for layer in model.layers:
        layer.compile(backend="fxoffload", dynamic=dynamic, options=rehearsal(**{**AUTO, **changes}))
    for n in {TOKENS, length}:
        step = stepping(model, model, n)
        found = [step() for _ in range(steps)][-1]
    with fxoffload.override_policy("keep_all"):
        assert_equal(step(), found)
    assert_nothing_held()
    new = [p for p in fxoffload.plans() if p.graph not in before]
    torch.compiler.reset()
    return found, new[-1] if new else None


@pytest.fixture
def no_warning() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(checkpointing|activation_budget|recompute)")
        yield


def check_in_place(plan: Plan | None) -> Plan:
    """It takes no more than checkpointing, which the plan shows too."""
    assert plan is not None and plan.checkpointing is not None
    assert plan.source == "checkpointing"
    assert plan.activation_budget == plan.checkpointing.peak_bytes
    assert plan.predicted.peak_bytes <= plan.checkpointing.peak_bytes < plan.baseline.peak_bytes
    assert plan.baseline.step_ms <= plan.predicted.step_ms < plan.checkpointing.step_ms
    assert "in place of activation checkpointing" in plan.summary
    assert "checkpointed" in str(plan).partition("step ms")[0]
    return plan


# -- one graph ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("no_warning")
def test_a_graph_takes_checkpointings_memory_in_less_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxoffload.compiler")
    found, plan = run(stack())
    plan = check_in_place(plan)
    assert caplog.text.count("in place of activation checkpointing") == 1
    assert {d.action for d in plan.decisions} >= {"keep", "recompute"}

    # Everything except the goal is as without checkpointing: the bits, plain Inductor's step, the layers.
    expected, without = run(stack(Block))
    assert_equal(found, expected)
    assert without is not None and without.checkpointing is None and without.source == "default"
    assert plan.baseline == without.baseline
    layers = [{layer for d in p.decisions for layer in d.layers} for p in (plan, without)]
    assert layers[0] == layers[1]

    obeyed, told = None, ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _, obeyed = run(stack(), checkpoints="obey")
        told = "\n".join(str(w.message) for w in seen)
    assert "activation checkpointing is on in compiled code" in told
    assert obeyed is not None and obeyed.checkpointing is None
    # The plan was made from the cost of obeying.
    assert plan.checkpointing == obeyed.baseline


@pytest.mark.slow
@pytest.mark.usefixtures("no_warning")
def test_what_is_asked_for_outweighs_checkpointing() -> None:
    _, by_default = run(stack())
    assert by_default is not None and by_default.checkpointing is not None
    budget = (by_default.checkpointing.peak_bytes + by_default.baseline.peak_bytes) // 2
    _, within = run(stack(), activation_budget=budget)
    assert within is not None and within.source == "options"
    assert within.activation_budget == budget and within.checkpointing == by_default.checkpointing
    assert within.predicted.peak_bytes <= budget
    assert within.predicted.step_ms <= by_default.predicted.step_ms
    # Over plain Inductor without checkpointing.
    _, slower = run(stack(), max_slowdown=0.02)
    assert slower is not None and slower.activation_budget is None
    assert slower.predicted.step_ms <= 1.02 * slower.baseline.step_ms
    assert slower.baseline == by_default.baseline


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "whole", "dropout"),
    [slow("qwen3", True, 0.0), ("gpt2", False, 0.25), slow("gpt2", True, 0.25), slow("qwen3", False, 0.0)],
)
def test_hugging_face_models(name: str, whole: bool, dropout: float) -> None:
    pytest.importorskip("transformers")
    from tests.models.zoo import build

    found = {}
    for checkpointing in (True, False):
        torch.compiler.reset()
        built = build(name, layers=2, dropout=dropout)
        model = built.model
        if checkpointing:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        module: Any = model
        options = rehearsal(**AUTO) if checkpointing else rehearsal(policy="keep_all")
        if whole:
            module = torch.compile(model, backend="fxoffload", options=options)
        else:
            for layer in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
                layer.compile(backend="fxoffload", options=options)
        before = {p.graph for p in fxoffload.plans()}
        step = train_step(model, lambda module=module, built=built: built.loss(module))
        found[checkpointing] = [step() for _ in range(1 if whole or not checkpointing else 5)][-1]
        if checkpointing:
            with fxoffload.override_policy("keep_all"):
                assert_equal(step(), found[True])
            (plan,) = [p for p in fxoffload.plans() if p.graph not in before]
            assert plan.checkpointing is not None and "activation checkpointing" in plan.summary
            assert plan.predicted.peak_bytes <= plan.checkpointing.peak_bytes
            assert plan.predicted.step_ms <= plan.checkpointing.step_ms
    # Dropout's masks are those of a model without checkpointing.
    assert_equal(found[True], found[False])


@pytest.mark.filterwarnings("ignore:.*context_fn", "ignore:.*activation checkpointing is on")
def test_a_policy_of_the_users_is_an_order() -> None:
    model = stack()
    for i in (1, 3):
        model.layers[i] = Ordered(WIDTH)
    _, plan = run(model, activation_budget="1GiB")
    assert plan is not None and plan.checkpointing is not None
    assert plan.predicted.step_ms < plan.checkpointing.step_ms
    saved = {layer: set[str]() for layer in ("layers.0", "layers.1", "layers.2", "layers.3")}
    for decision in plan.decisions:
        for layer in decision.layers if decision.action in ("keep", "offload") else ():
            saved[layer].add(decision.producer)
    wide = "aten.addmm.default"
    assert wide in saved["layers.0"] & saved["layers.2"]
    assert wide not in saved["layers.1"] | saved["layers.3"]


@pytest.mark.slow
def test_a_plan_ahead() -> None:
    found = fxoffload.plan(stack(), {"x": batch(length=TOKENS, width=WIDTH)}, inner="aot_eager", min_bytes=1)
    check_in_place(found)
    with pytest.warns(UserWarning, match="activation checkpointing is on in compiled code"):
        obeyed = fxoffload.plan(
            stack(), {"x": batch(length=TOKENS, width=WIDTH)}, inner="aot_eager", min_bytes=1, checkpoints="obey"
        )
    assert obeyed.checkpointing is None
    assert obeyed.baseline == found.checkpointing


@pytest.mark.slow
def test_sizes_that_vary() -> None:
    """Each size has checkpointing's own peak at that size."""
    model = stack(layers=2)
    call = compiled(model, dynamic=True, **AUTO)
    expected = stack(Block, layers=2)
    for length in (40, 24, 160):
        found = stepping(model, call, length)()
        assert_equal(found, stepping(expected, compiled(expected, dynamic=True, policy="keep_all"), length)())
    assert_nothing_held()
    plans = [p for p in fxoffload.plans() if p.checkpointing is not None][-2:]
    assert all(p.checkpointing and p.predicted.peak_bytes <= p.checkpointing.peak_bytes for p in plans)


# -- a step over several graphs ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_layers_compiled_on_their_own(dropout: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxoffload.compiler")
    found, plan = run_by_layer(stack(layers=6, dropout=dropout))
    check_in_place(plan)
    assert caplog.text.count("in place of activation checkpointing") == 1
    if not dropout:  # which draws in another order where layers are not compiled
        expected, without = run_by_layer(stack(Block, layers=6))
        assert_equal(found, expected)
        assert plan is not None and without is not None
        assert plan.baseline.peak_bytes == without.baseline.peak_bytes


@pytest.mark.slow
def test_layers_on_their_own_with_other_objectives() -> None:
    _, by_default = run_by_layer(stack(layers=6))
    _, slower = run_by_layer(stack(layers=6), max_slowdown=0.1)
    assert by_default is not None and slower is not None and slower.checkpointing == by_default.checkpointing
    assert slower.predicted.step_ms <= 1.1 * slower.baseline.step_ms
    assert by_default.checkpointing is not None
    budget = (by_default.checkpointing.peak_bytes + by_default.baseline.peak_bytes) // 2
    _, within = run_by_layer(stack(layers=6), activation_budget=budget)
    assert within is not None and within.activation_budget == budget
    assert within.predicted.peak_bytes <= budget
    assert within.predicted.step_ms <= by_default.predicted.step_ms


@pytest.mark.slow
def test_layers_on_their_own_whose_sizes_vary() -> None:
    _, plan = run_by_layer(stack(layers=4), dynamic=True, length=96)
    assert plan is not None and plan.checkpointing is not None
    assert plan.predicted.peak_bytes <= plan.checkpointing.peak_bytes


@pytest.mark.filterwarnings("ignore:.*activation checkpointing is on")
@pytest.mark.parametrize("off", [{"checkpoints": "obey"}, {"disable": ("tape_recompute",)}], ids=["obey", "piece"])
def test_layers_on_their_own_that_obey(off: dict[str, Any]) -> None:
    _, plan = run_by_layer(stack(layers=3), **off)
    assert plan is not None and plan.checkpointing is None


@pytest.mark.usefixtures("no_warning")
def test_one_layer_leaves_nothing_to_choose(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxoffload.compiler")
    model = stack(layers=1)
    _, plan = run_by_layer(model)
    assert plan is None
    assert "activation checkpointing of a graph of one layer is obeyed until its step is planned" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("no_warning")
def test_graphs_with_plans_of_their_own_are_planned_together() -> None:
    """Each would fill checkpointing's peak of its own while the others wait."""
    model = Halves(block=lambda: Checkpointed(WIDTH))
    call = compiled(model, **AUTO)
    step = stepping(model, call)
    before = {p.graph for p in fxoffload.plans()}
    found = [step() for _ in range(6)][-1]
    with fxoffload.override_policy("keep_all"):
        assert_equal(step(), found)
    *alone, together = [p for p in fxoffload.plans() if p.graph not in before]
    assert len(alone) == 2 and all(p.source == together.source == "checkpointing" for p in alone)
    assert all("since then planned together" in p.summary for p in alone)
    assert together.checkpointing is not None
    # Together they hold less than their separate plans, whose recompute choices stay.
    assert together.predicted.peak_bytes < 1.01 * together.checkpointing.peak_bytes
    assert together.checkpointing.peak_bytes < sum(p.predicted.peak_bytes for p in alone)
