"""Plans, from the options of ``torch.compile`` to the bits of the gradients, on the CPU rehearsal."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxoffload
from fxoffload.compiler import planning, session
from fxoffload.compiler.planning import Planned, Planning
from fxoffload.errors import BudgetError
from fxoffload.graphs import CompiledGraph
from fxoffload.planner.goal import PlanGoal
from tests.capture import Block, Tower, example_input
from tests.planner.rehearsal import Rehearsal
from tests.support import Observed, assert_close, assert_equal, assert_nothing_held, segment_calls, train_step

aten = torch.ops.aten
LAYERS = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compiled(model: nn.Module, **changes: Any) -> Any:
    options = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, **changes}
    return torch.compile(model, backend="fxoffload", options=options)


def tower(make: Callable[[], nn.Module] = Block, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return Tower(layers, make=make)


def scenario(model: nn.Module, call: Any, batch: int = 4) -> Callable[[], Observed]:
    return train_step(model, lambda: call(example_input(batch)).square().mean())


def only_graph() -> CompiledGraph:
    (graph,) = fxoffload.graphs()
    return graph


def plan_of(graph: CompiledGraph) -> fxoffload.Plan:
    assert graph.plan_box is not None
    return graph.plan_box.plan


def check_plan(run: Callable[[], Observed]) -> fxoffload.Plan:
    """Compile and run: the graph does what the plan says, and gets the bits that it gets with everything kept."""
    found = run()
    assert_nothing_held()
    graph = only_graph()
    plan = plan_of(graph)
    assert plan in fxoffload.plans()
    fxoffload.reset_stats()
    again = run()
    stats = fxoffload.stats()
    with fxoffload.override_policy("keep_all"):
        kept = run()
    assert fxoffload.stats().bytes_offloaded == stats.bytes_offloaded
    assert_equal(found, kept)
    assert_equal(again, kept)
    assert_nothing_held()

    assert plan.simulation is not None
    assert stats.bytes_offloaded == plan.simulation.bytes_offloaded == plan.predicted.bytes_offloaded
    assert stats.bytes_reloaded == plan.simulation.bytes_reloaded
    assert stats.bytes_reclaimed == plan.simulation.bytes_reclaimed
    assert stats.num_prefetch_misses == plan.simulation.num_prefetch_misses
    assert stats.bytes_kept_for_backward == stats.bytes_kept_host_full == 0
    check_decisions(plan, graph)
    return plan


def check_decisions(plan: fxoffload.Plan, graph: CompiledGraph) -> None:
    """Every candidate is in exactly one decision, which is what the runtime does."""
    actions: dict[str, str] = {}
    for decision in plan.decisions:
        names = decision.names
        assert names and names[0] == decision.name
        assert len(names) == max(len(decision.layers), 1)
        assert not set(names) & actions.keys()
        actions.update(dict.fromkeys(names, decision.action))
    candidates = [c.name for c in graph.saved.candidates]
    expected = {n: "offload" if go else "keep" for n, go in zip(candidates, graph.decide(), strict=True)}
    assert {n: a for n, a in actions.items() if a in ("keep", "offload")} == expected
    skipped = {s.name for s in graph.saved.skipped if not s.reason.startswith("parameter")}
    assert {n for n, a in actions.items() if a == "stay"} == skipped


# -- without compiling -------------------------------------------------------------------------------------------------


class Recorded:
    """The planning of a compile, to be run again with other goals."""

    def __init__(self, model: nn.Module, call: Callable[[Any], Tensor], **changes: Any) -> None:
        self.made: list[Planning] = []
        self.context: TracingContext | None = None
        recorded = self

        class Recording(Planning):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                recorded.made.append(self)
                recorded.context = TracingContext.get()

        torch.compiler.reset()
        with mock.patch.object(session, "Planning", Recording):
            call(compiled(model, **changes)).backward()
        self.last = self.made[-1]

    def plan(self, budget: int | None = None, slowdown: float | None = None, **changes: Any) -> Planned:
        on = self.last
        again = Planning(
            on.joint,
            on.partition,
            on.settings,
            on.rates,
            PlanGoal.of(budget, slowdown),
            recompute=changes.pop("recompute", on.recompute),
            scheduling={**on.scheduling, **changes},
        )
        with tracing(self.context):
            found = again.run()
        assert found is not None
        return found

    def smallest(self, **changes: Any) -> BudgetError:
        with pytest.raises(BudgetError) as caught:
            self.plan(1, **changes)
        return caught.value


@functools.cache
def recorded(name: str) -> Recorded:
    if name == "qwen3":
        pytest.importorskip("transformers")
        from tests.models.zoo import build

        built = build("qwen3")
        return Recorded(built.model, built.loss)
    return Recorded(tower(), lambda call: call(example_input()).square().mean())


MODELS = pytest.mark.parametrize("name", ["tower", "qwen3"])


@MODELS
def test_budgets(name: str) -> None:
    """Every budget from the smallest to what plain Inductor takes is kept, and a larger one is never slower."""
    found = recorded(name)
    error = found.smallest()
    smallest = found.plan(error.smallest_bytes)
    assert error.smallest_bytes - 64 <= smallest.plan.predicted_peak_bytes <= error.smallest_bytes
    baseline = smallest.plan.baseline
    assert error.segment and error.segment in str(error)
    before = float("inf")
    for budget in (error.smallest_bytes, (error.smallest_bytes + baseline.peak_bytes) // 2, baseline.peak_bytes - 1):
        planned = found.plan(budget)
        assert planned.schedule is not None
        assert planned.plan.predicted_peak_bytes <= budget
        assert planned.plan.activation_budget == budget
        assert planned.plan.baseline == baseline
        assert planned.plan.smallest_budget_bytes <= error.smallest_bytes
        # To the gap that the solver leaves.
        assert planned.plan.predicted_step_ms <= before * 1.01
        before = planned.plan.predicted_step_ms
    plain = found.plan(baseline.peak_bytes)
    assert plain.schedule is None
    assert "nothing is done" in plain.plan.summary
    assert plain.plan.predicted == baseline


@MODELS
def test_plans_are_equal_when_made_again(name: str) -> None:
    found = recorded(name)
    baseline = found.plan(1 << 60).plan.baseline
    one, two = (found.plan(baseline.peak_bytes * 3 // 4) for _ in range(2))
    assert one.plan == two.plan
    assert one.schedule == two.schedule
    assert one.draft.forward.code == two.draft.forward.code


def test_the_error_is_a_value_error_that_says_what_would_do() -> None:
    error = recorded("tower").smallest()
    assert isinstance(error, ValueError)
    assert str(error.smallest_bytes) in str(error)
    assert error.segment.endswith(("in the forward", "in the backward"))


@pytest.mark.parametrize("level", ["default", "cheap"])
def test_a_level_of_recomputation(level: str) -> None:
    found = recorded("tower")
    baseline = found.plan(1 << 60).plan.baseline
    error = found.smallest(recompute=level)
    planned = found.plan(error.smallest_bytes, recompute=level)
    assert planned.plan.predicted_peak_bytes <= error.smallest_bytes < baseline.peak_bytes
    recomputed = [d for d in planned.plan.decisions if d.action == "recompute"]
    assert bool(recomputed) is (level == "cheap")
    # Nothing is as fast as that, and cheap recomputation was asked for all the same.
    assert found.plan(slowdown=0.0, recompute=level).plan.baseline == baseline


def test_the_windows_are_bounded() -> None:
    found = recorded("tower")
    baseline = found.plan(1 << 60).plan.baseline
    budget = (found.smallest(recompute="default").smallest_bytes + baseline.peak_bytes) // 2
    planned = found.plan(budget, recompute="default", in_flight_budget=5000, prefetch_budget=3000)
    assert planned.schedule is not None
    assert max(planned.schedule.windows.in_flight) <= 5000
    assert max(planned.schedule.windows.ahead) <= 3000
    assert any(planned.schedule.offload)


def test_a_small_host() -> None:
    found = recorded("tower")
    budget = found.plan(1 << 60).plan.baseline_peak_bytes * 2 // 3
    free = found.plan(budget, recompute="default")
    assert free.plan.predicted.bytes_offloaded > 9000
    error = found.smallest(recompute="default", host_bytes=9000)
    assert error.smallest_bytes > budget
    planned = found.plan(error.smallest_bytes, recompute="default", host_bytes=9000)
    assert 0 < planned.plan.predicted.bytes_offloaded <= 9000
    # With recomputation to choose the budget can be met all the same.
    other = found.plan(budget, host_bytes=9000)
    assert other.plan.predicted_peak_bytes <= budget
    assert other.plan.predicted.bytes_offloaded <= 9000


@MODELS
def test_the_decisions_explain_every_candidate(name: str) -> None:
    found = recorded(name)
    error = found.smallest()
    planned = found.plan(error.smallest_bytes)
    saved = planned.draft.forward_state.saved
    assert planned.schedule is not None and planned.draft.step is not None
    rows: dict[str, list[fxoffload.Decision]] = {}
    for decision in planned.plan.decisions:
        assert decision.reason
        assert decision.producer or decision.action == "stay"
        assert decision.names and len(decision.names) == max(1, len(decision.layers))
        for name in decision.names:
            rows.setdefault(name, []).append(decision)
    assert all(len(r) == 1 for r in rows.values())
    action = {n: r[0].action for n, r in rows.items()}
    flags = zip(planned.draft.step.candidates, planned.schedule.offload, strict=True)
    for candidate, go in flags:
        assert action[candidate.name] == ("offload" if go else "keep")
    names = {n.name for c in saved.candidates for n in c.nodes} | {s.name for s in saved.skipped}
    base = found.plan(1 << 60).draft.forward_state.saved
    gone = {c.name for c in base.candidates if names.isdisjoint(n.name for n in c.nodes)}
    assert {n for n, a in action.items() if a == "recompute"} == gone
    assert gone
    nbytes = {c.name: c.nbytes for c in (*base.candidates, *saved.candidates)}
    assert all(rows[n][0].nbytes == size for n, size in nbytes.items() if n in rows)
    layers = {layer for d in planned.plan.decisions for layer in d.layers}
    assert len(layers) == len({n.meta.get("layer") for n in planned.draft.step.forward if False}) or layers
