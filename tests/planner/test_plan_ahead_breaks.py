"""``fxoffload.plan`` of a model that is compiled into several graphs: the plan of one step over them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame

import fxoffload
from fxoffload.analysis.find_frontier import FindFrontier
from fxoffload.compiler import planning
from fxoffload.compiler.plan_ahead import plan
from fxoffload.errors import BudgetError, UnsupportedError
from fxoffload.plan_report.plan import Plan
from tests.capture import WIDTH, Block, Tower, example_input

SMALL: dict[str, Any] = {"inner": "aot_eager", "min_bytes": 1, "max_slowdown": 5.0}


class Layers(nn.Module):
    """Each layer is a graph: the loop between them runs uncompiled. Unless it ``breaks`` nothing."""

    def __init__(self, num_layers: int = 5, *, breaks: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


class Towers(nn.Module):
    """Two graphs of several layers."""

    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        self.first = Tower(3)
        self.first.head = nn.Linear(WIDTH, WIDTH)
        self.second = head or Tower(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y)


def trained_plans(model: nn.Module, x: Tensor, **options: Any) -> list[Plan]:
    """The plans made in training, that of the step last."""
    chosen: dict[str, Any] = {**SMALL, **options, "device_types": ("cpu",)}
    run = torch.compile(model, backend="fxoffload", options=chosen)
    for _ in range(5):
        y = run(x)  # held until the step ends, as a plan ahead takes it to be
        y.backward(torch.ones_like(y))
        del y
        model.zero_grad()
    return fxoffload.plans()


@pytest.mark.slow_except("90KiB")
@pytest.mark.parametrize("budget", [None, "90KiB"])
def test_layers_that_are_graphs_have_the_plan_of_training(budget: str | None) -> None:
    model, x = Layers(), example_input()
    found = plan(model, example_args=(x,), activation_budget=budget, **SMALL)
    expected = trained_plans(model, x, activation_budget=budget)[-1]
    assert "over 5 calls of 2 graphs" in found.summary == expected.summary
    assert found.decisions == expected.decisions
    assert (found.predicted, found.baseline) == (expected.predicted, expected.baseline)
    assert found.smallest_budget_bytes == expected.smallest_budget_bytes
    assert found.boundaries == expected.boundaries
    assert found.label == "Layers"


@pytest.mark.slow
def test_what_was_planned_before_does_not_matter() -> None:
    """Dynamo skips a loop for good in which a graph broke, also where the next model's does not break."""
    summaries = [
        plan(Layers(2, breaks=breaks), example_args=(example_input(),), **SMALL).summary
        for breaks in (False, True, False)
    ]
    assert summaries[0] == summaries[2] != summaries[1]


@pytest.mark.slow
def test_what_breaks_the_graph_is_named() -> None:
    found = plan(Towers(), example_args=(example_input(),), **SMALL)
    (text,) = found.breaks
    assert found.loss == "outside"
    assert "planner/test_plan_ahead_breaks.py:" in text and "in forward" in text
    assert "User-inserted graph break" in text and "torch._dynamo.graph_break()" in text
    assert text in str(found) and "is not in the plan" in str(found)
    assert Plan.from_json(found.to_json()) == found
    assert not plan(Tower(3), example_args=(example_input(),), **SMALL).breaks


@pytest.mark.slow
def test_graphs_with_plans_of_their_own_are_planned_together() -> None:
    model, x = Towers(), example_input()
    found = plan(model, example_args=(x,), **SMALL)
    first, second, together = trained_plans(model, x)[-3:]
    assert "over 2 calls of 2 graphs, the least peak found within" in found.summary
    assert found.decisions == together.decisions
    assert {d for d in first.decisions if d.action == "recompute"} <= set(found.decisions)
    assert found.predicted == together.predicted
    assert found.baseline == together.baseline
    assert found.baseline_step_ms == pytest.approx(first.baseline_step_ms + second.baseline_step_ms)
    # What the first saves waits while the second runs.
    assert max(p.predicted_peak_bytes for p in (first, second)) < found.predicted_peak_bytes < found.baseline_peak_bytes


@pytest.mark.slow
def test_within_a_budget_graphs_are_planned_together() -> None:
    model, x = Towers(nn.Linear(WIDTH, 8)), example_input()
    found = plan(model, example_args=(x,), activation_budget=65_000, **SMALL)
    expected = trained_plans(model, x, activation_budget=65_000)[-1]
    assert "over 2 calls of 2 graphs, the fastest plan found within" in found.summary
    assert found.decisions == expected.decisions
    assert found.predicted == expected.predicted
    with pytest.raises(BudgetError, match="2 calls of compiled graphs") as caught:
        plan(Towers(), example_args=(x,), activation_budget=70_000, **SMALL)
    assert caught.value.smallest_bytes > 70_000


@pytest.mark.slow
def test_graphs_with_plans_of_their_own_may_recompute_more_than_these() -> None:
    model, x = Towers(), example_input()
    with mock.patch.object(FindFrontier, "__call__", autospec=True, side_effect=FindFrontier.__call__) as finds:
        found = plan(model, example_args=(x,), activation_budget=80_000, **SMALL)
    assert finds.call_count == 2  # once a graph: for its own plan, and for its variants
    expected = trained_plans(model, x, activation_budget=80_000)[-1]
    assert "1 of 2 calls recompute more" in found.summary == expected.summary
    assert found.decisions == expected.decisions
    assert found.predicted == expected.predicted


def test_a_graph_without_layers_offloads_what_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would in training, where the other graph is left to Inductor: it has its loss."""
    monkeypatch.setattr(planning, "loss_of", lambda states: "inside")
    options = {**SMALL, "max_slowdown": None, "activation_budget": "1GiB"}
    found = plan(Towers(Tower(1)), example_args=(example_input(),), **options)
    assert "each graph keeps its own plan, 1 of 2 calls have none and offload what they save" in found.summary
    actions: dict[bool, set[str]] = {False: set(), True: set()}
    for decision in found.decisions:
        actions[decision.layers == ("call 1",)].add(decision.action)
    assert actions == {False: {"keep"}, True: {"offload"}}


def test_a_graph_without_layers_is_planned_with_one_that_fits() -> None:
    """The loss of that one is outside of it: it is cut, and so they are planned together."""
    options = {**SMALL, "max_slowdown": None, "activation_budget": "1GiB"}
    found = plan(Towers(Tower(1)), example_args=(example_input(),), **options)
    assert {decision.action for decision in found.decisions} == {"keep"}


@pytest.mark.slow
def test_graphs_that_fit_alone_but_not_together_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "loss_of", lambda states: "inside")
    with pytest.warns(UserWarning, match="each of its graphs fits into the budget alone"):
        found = plan(Towers(), example_args=(example_input(),), activation_budget="90KiB", **SMALL)
    assert found.predicted_peak_bytes > 90 << 10
    assert "the predicted peak exceeds the budget" in str(found)


@pytest.mark.slow
def test_a_break_before_or_after_the_only_graph() -> None:
    class Breaks(Tower):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model, x = Breaks(3), example_input()
    found = plan(model, example_args=(x,), **SMALL)
    assert len(found.breaks) == 1
    assert found.decisions == trained_plans(model, x)[-1].decisions


@pytest.mark.slow
def test_a_break_that_reads_a_value_says_where() -> None:
    class Reads(Tower):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * y.sum().item()

    with pytest.raises(UnsupportedError, match=r"needs no tensor's value.*test_plan_ahead_breaks\.py:\d+, in forward"):
        plan(Reads(3), example_args=(example_input(),), **SMALL)


@pytest.mark.slow
def test_integers_that_are_real_have_values() -> None:
    """As sizes of images do: a model reads them to shape its work."""

    class Chunks(Tower):
        def forward(self, x: Tensor, sizes: Tensor) -> Tensor:  # type: ignore[override]
            parts = x.split((sizes * 2).tolist(), dim=1)
            return super().forward(torch.cat([p.flip(1) for p in parts], dim=1))

    x, sizes = example_input(), torch.tensor([1, 3])
    found = plan(Chunks(3), example_args=(x, sizes), **SMALL)
    assert found.breaks and sizes.tolist() == [1, 3]
    with pytest.raises(UnsupportedError, match=r"needs no tensor's value.*if it is for layerdrop: set that to 0"):
        plan(Chunks(3), example_args=(x, sizes.to("meta")), **SMALL)


@pytest.mark.slow
def test_a_step_that_no_plan_can_follow() -> None:
    """Two graphs, the first of which has no backward before the second's."""

    class Aside(Towers):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            torch._dynamo.graph_break()
            return self.second(y.detach())

    with pytest.raises(UnsupportedError, match="reverse order"):
        plan(Aside(), example_args=(example_input(),), **SMALL)


@pytest.mark.slow
def test_what_was_compiled_for_a_plan_is_forgotten() -> None:
    model, x = Towers(), example_input()
    plan(model, example_args=(x,), **SMALL)
    assert not eval_frame._debug_get_cache_entry_list(Towers.forward.__code__)
    graphs: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        run = torch.compile(model, backend=backend, dynamic=False)
        run(x)
        for _ in range(3):
            plan(model, example_args=(x,), **SMALL)
        run(x)
        assert len(graphs) == 2
        run(example_input(5))  # plans don't use up the limit
        assert len(graphs) == 4
