"""Plans, from the options of ``torch.compile`` to the bits of the gradients, on the CPU rehearsal."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxoffload
from fxoffload.analysis.op_key import op_key
from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler import planning, session
from fxoffload.compiler.planning import GraphPlanning, Planning
from fxoffload.errors import BudgetError
from fxoffload.planner.objective import SHARED_RESERVE, Objective
from fxoffload.planner.simulate import simulate
from tests.capture import Block, Tower, example_input
from tests.planner.rehearsal import Rehearsal
from tests.support import Observed, assert_close, assert_equal, assert_nothing_held, train_step

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten
LAYERS = 4


_BEFORE: list[CompiledGraph] = []
_PLANS_BEFORE: set[int] = set()


@pytest.fixture(autouse=True)
def what_others_left() -> Iterator[None]:
    gc.collect()
    _BEFORE[:] = fxoffload.graphs()
    _PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    yield
    _BEFORE.clear()


def new_graphs() -> list[CompiledGraph]:
    return [g for g in fxoffload.graphs() if g not in _BEFORE]


def new_plans() -> list[fxoffload.Plan]:
    return [p for p in fxoffload.plans() if p.graph not in _PLANS_BEFORE]


def compiled(model: nn.Module, dynamic: bool | None = None, **changes: Any) -> Any:
    options = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, **changes}
    return torch.compile(model, backend="fxoffload", dynamic=dynamic, options=options)


def tower(make: Callable[[], nn.Module] = Block, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return Tower(layers, make=make)


def scenario(model: nn.Module, call: Any, batch: int = 4) -> Callable[[], Observed]:
    return train_step(model, lambda: call(example_input(batch)).square().mean())


def only_graph() -> CompiledGraph:
    (graph,) = new_graphs()
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
    assert plan in new_plans()
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
    assert stats.bytes_kept_host_full == 0
    check_decisions(plan, graph)
    return plan


def check_decisions(plan: fxoffload.Plan, graph: CompiledGraph) -> None:
    """Every candidate is in exactly one decision, which is what the runtime does."""
    actions: dict[str, str] = {}
    for decision in (d for d in plan.decisions if d.action != "mask"):
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
    """The planning of a compile, to be run again with other objectives."""

    def __init__(self, model: nn.Module, call: Callable[[Any], Tensor], **changes: Any) -> None:
        self.made: list[Planning] = []
        self.known: dict[Any, GraphPlanning] = {}
        self.context: TracingContext | None = None
        recorded = self

        class Recording(Planning):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                recorded.made.append(self)
                recorded.context = TracingContext.get()

        torch.compiler.reset()
        with mock.patch.object(session, "Planning", Recording):
            # What a test module of measured costs records, others get too.
            call(compiled(model, disable=("measured_costs",), **changes)).backward()
        self.last = self.made[-1]
        self.rates = self.last.rates

    def with_products(self, ms: float) -> Recorded:
        """The same where every product of matrices was measured, and takes ``ms``."""
        found = copy.copy(self)
        calls = self.last.joint.graph.find_nodes(op="call_function", target=aten.mm.default)
        calls += self.last.joint.graph.find_nodes(op="call_function", target=aten.addmm.default)
        times = {key: ms for node in calls if (key := op_key(node)) is not None}
        found.known, found.rates = {}, replace(self.rates, op_times=times)
        return found

    def plan(self, budget: int | None = None, slowdown: float | None = None, **changes: Any) -> GraphPlanning:
        key = (budget, slowdown, *sorted(changes.items()))
        if key not in self.known:
            self.known[key] = self.plan_anew(budget, slowdown, **changes)
        return self.known[key]

    def plan_anew(self, budget: int | None, slowdown: float | None = None, **changes: Any) -> GraphPlanning:
        on = self.last
        again = Planning(
            on.joint,
            on.partition,
            replace(on.settings, rates=self.rates),
            self.rates,
            Objective.of(budget, slowdown),
            recompute=changes.pop("recompute", on.recompute),
            num_points=changes.pop("num_points", on.num_points),
            scheduling={**on.scheduling, **changes},
        )
        with tracing(self.context):
            found = again.run(sizes_are_fixed=True)
        assert found is not None
        return found

    @functools.cache  # noqa: B019
    def smallest(self, **changes: Any) -> BudgetError:
        with pytest.raises(BudgetError) as caught:
            self.plan(1, **changes)
        return caught.value


@functools.cache
def recorded(name: str) -> Recorded:
    assert name == "tower"
    found = Recorded(tower(), lambda call: call(example_input()).square().mean())
    _BEFORE.extend(new_graphs())  # whichever test is the first to ask
    _PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    return found


@pytest.mark.slow
def test_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every budget from the smallest to what plain Inductor takes is kept, and a larger one is never slower."""
    found = recorded("tower")
    error = found.smallest()
    smallest = found.plan(error.smallest_bytes)
    assert smallest.plan.predicted_peak_bytes == error.smallest_bytes
    baseline = smallest.plan.baseline
    assert error.segment and error.segment in str(error)
    before = float("inf")
    budgets = [error.smallest_bytes, (error.smallest_bytes + baseline.peak_bytes) // 2, baseline.peak_bytes - 1]
    for budget in budgets:
        planned = found.plan(budget)
        assert planned.schedule is not None
        assert planned.plan.predicted_peak_bytes <= budget
        assert planned.plan.activation_budget == budget
        assert planned.plan.baseline == baseline
        assert planned.plan.smallest_budget_bytes <= error.smallest_bytes
        found.plan(planned.plan.smallest_budget_bytes)  # nothing is raised
        # To what drafts differ from what their choices promise.
        assert planned.plan.predicted_step_ms <= before * 1.03
        before = planned.plan.predicted_step_ms
    kept = found.plan(baseline.peak_bytes)
    assert kept.schedule is not None and not any(kept.schedule.offload), "the loss may take the rest"
    assert "give way to the loss" in kept.plan.summary
    assert kept.plan.predicted == baseline
    monkeypatch.setattr(planning, "loss_of", lambda states: "inside")
    plain = found.plan_anew(baseline.peak_bytes)
    assert plain.schedule is None
    assert "nothing is done" in plain.plan.summary
    assert plain.plan.predicted == baseline


@pytest.mark.slow
@pytest.mark.parametrize("objective", [{}, {"slowdown": 0.3}, {"recompute": "cheap"}])
def test_a_compiled_plan_names_a_smallest_budget_that_is_met(objective: dict[str, Any]) -> None:
    found = recorded("tower")
    plan = found.plan(**objective).plan
    assert len(plan.frontier) <= 2
    smallest = plan.smallest_budget_bytes
    asked = found.plan(smallest, recompute=objective.get("recompute", "auto")).plan
    assert asked.predicted_peak_bytes <= smallest == asked.smallest_budget_bytes


@pytest.mark.slow
def test_a_choice_that_another_search_does_not_make_is_no_smallest_budget() -> None:
    """Within this budget BERT was partitioned once in a way that takes less than the least that is always tried."""
    config = transformers.BertConfig(num_hidden_layers=3, vocab_size=2000)
    with torch.device("meta"):
        model = transformers.AutoModelForMaskedLM.from_config(config, dtype=torch.bfloat16).train()
    words = torch.zeros(4, 512, dtype=torch.long, device="meta")
    kwargs = {"input_ids": words, "labels": words}
    with mock.patch.object(planning, "DRAWN_POINTS", planning.FEW_POINTS):
        smallest = fxoffload.plan(model, kwargs, activation_budget=485_000_000).smallest_budget_bytes
        assert fxoffload.plan(model, kwargs, activation_budget=smallest).predicted.peak_bytes <= smallest


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", [{}, {"products": 0.004}, {"slowdown": 0.3}, {"share": 0.8}, {"recompute": "cheap"}]
)
def test_what_a_plan_offers_can_be_asked_for(objective: dict[str, Any]) -> None:
    """Every point of the frontier, the smallest budget among them, is met at the time that it says; this plan's too."""
    found, objective = recorded("tower"), dict(objective)
    if products := objective.pop("products", None):
        found = found.with_products(products)
    if share := objective.pop("share", None):
        objective["budget"] = int(share * found.plan(1 << 60).plan.baseline_peak_bytes)
    plan = found.plan(num_points=5, **objective).plan
    assert len(plan.frontier) > 2 and plan.frontier[0].budget_bytes == plan.smallest_budget_bytes
    own = max((p for p in plan.frontier if p.peak_bytes <= plan.predicted_peak_bytes), key=lambda p: p.peak_bytes)
    assert own.step_ms <= plan.predicted_step_ms + 0.001, "it lies on the frontier, or something better does"
    for one, more in itertools.pairwise(plan.frontier):
        assert one.peak_bytes < more.peak_bytes and one.step_ms > more.step_ms
    for point in plan.frontier:
        asked = found.plan(point.budget_bytes, recompute=objective.get("recompute", "auto")).plan.predicted
        assert asked.peak_bytes <= point.budget_bytes and asked.step_ms <= point.step_ms * 1.001


@pytest.mark.slow
def test_plans_are_equal_when_made_again() -> None:
    found = recorded("tower")
    baseline = found.plan(1 << 60).plan.baseline
    one, two = (found.plan_anew(baseline.peak_bytes * 3 // 4) for _ in range(2))
    assert one.plan == two.plan
    assert one.schedule == two.schedule
    assert one.partitioning.forward.code == two.partitioning.forward.code


@pytest.mark.slow
def test_the_error_is_a_value_error_that_says_what_would_do() -> None:
    error = recorded("tower").smallest()
    assert isinstance(error, ValueError)
    assert str(error.smallest_bytes) in str(error)
    assert error.segment == "the backward of layers.0" and f"which {error.segment} needs" in str(error)


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_windows_are_bounded() -> None:
    found = recorded("tower")
    baseline = found.plan(1 << 60).plan.baseline
    budget = (found.smallest(recompute="default").smallest_bytes + baseline.peak_bytes) // 2
    planned = found.plan(budget, recompute="default", in_flight_budget=5000, prefetch_budget=3000)
    assert planned.schedule is not None
    assert max(planned.schedule.windows.in_flight) <= 5000
    assert max(planned.schedule.windows.ahead) <= 3000
    assert any(planned.schedule.offload)


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_decisions_explain_every_candidate() -> None:
    found = recorded("tower")
    error = found.smallest()
    planned = found.plan(error.smallest_bytes)
    saved = planned.partitioning.forward_state.saved
    assert planned.schedule is not None and planned.partitioning.step is not None
    rows: dict[str, list[fxoffload.Decision]] = {}
    for decision in planned.plan.decisions:
        assert decision.reason
        assert decision.producer or decision.action == "stay"
        assert decision.names and len(decision.names) == max(1, len(decision.layers))
        for name in decision.names:
            rows.setdefault(name, []).append(decision)
    assert all(len(r) == 1 for r in rows.values())
    action = {n: r[0].action for n, r in rows.items()}
    flags = zip(planned.partitioning.step.candidates, planned.schedule.offload, strict=True)
    for candidate, go in flags:
        assert action[candidate.name] == ("offload" if go else "keep")
    names = {n.name for c in saved.candidates for n in c.nodes} | {s.name for s in saved.skipped}
    base = found.plan(1 << 60).partitioning.forward_state.saved
    gone = {c.name for c in base.candidates if names.isdisjoint(n.name for n in c.nodes)}
    assert {n for n, a in action.items() if a == "recompute"} == gone
    assert gone
    nbytes = {c.name: c.nbytes for c in (*base.candidates, *saved.candidates)}
    assert all(rows[n][0].nbytes == size for n, size in nbytes.items() if n in rows)
    segments = {s.layer for s in planned.partitioning.step.forward if s.layer}
    assert segments == {layer for d in planned.plan.decisions for layer in d.layers}


# -- through torch.compile ---------------------------------------------------------------------------------------------


def middle(**changes: Any) -> int:
    """A budget for ``tower()`` that something has to be done for."""
    found = recorded("tower")
    return (found.smallest(**changes).smallest_bytes + found.plan(1 << 60).plan.baseline_peak_bytes) // 2


@pytest.mark.slow
@pytest.mark.parametrize(("share", "recompute"), [(0.0, "auto"), (0.6, "auto"), (0.0, "default")])
def test_the_runtime_does_what_is_planned(share: float, recompute: str) -> None:
    known = recorded("tower")
    smallest = known.smallest(recompute=recompute).smallest_bytes
    budget = round(smallest + share * (known.plan(1 << 60).plan.baseline_peak_bytes - smallest))
    model = tower()
    run = scenario(model, compiled(model, activation_budget=budget, recompute=recompute))
    plan = check_plan(run)
    assert plan.predicted_peak_bytes <= budget == plan.activation_budget
    assert plan.source == "options"
    assert plan.predicted.bytes_offloaded > 0 or recompute == "auto"
    found = run()
    torch.compiler.reset()
    plain = scenario(model, compiled(model, policy="keep_all", recompute="default"))
    assert_equal(found, plain())


def test_the_first_step_follows_its_own_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it tunes kernels, and the budget has to hold that too."""
    first: list[Any] = []

    def tighter(self: planning.Planning, best: Any) -> Any:
        first.append(best.scheduler.smallest())
        return first[-1]

    budget = middle(recompute="default")
    torch.compiler.reset()
    fxoffload.reset_stats()  # it has trained, where no other test had asked
    monkeypatch.setattr(planning.Planning, "_first", tighter)
    model = tower()
    run = scenario(model, compiled(model, activation_budget=budget, recompute="default"))
    found = [run()]
    plan = plan_of(only_graph())
    moved = [fxoffload.stats().bytes_offloaded]
    for _ in range(2):
        fxoffload.reset_stats()
        found.append(run())
        moved.append(fxoffload.stats().bytes_offloaded)
    assert first[0].simulation.bytes_offloaded != plan.predicted.bytes_offloaded
    assert moved == [first[0].simulation.bytes_offloaded] + 2 * [plan.predicted.bytes_offloaded]
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


@pytest.mark.slow
def test_a_language_model() -> None:
    pytest.importorskip("transformers")
    from tests.models.zoo import build

    built = build("qwen3", layers=2)
    call = compiled(built.model, activation_budget=160 << 10)
    built.loss().backward()  # transformers sets flags in the first call on which a second one is compiled again
    torch.compiler.reset()
    _BEFORE.extend(new_graphs())
    plan = check_plan(train_step(built.model, lambda: built.loss(call)))
    assert plan.predicted_peak_bytes <= 160 << 10 < plan.baseline_peak_bytes


@pytest.mark.slow_except("default")
@pytest.mark.parametrize("recompute", ["default", "auto"])
def test_every_byte_of_a_plan(recompute: str) -> None:
    """What a partitioning is simulated to take is what the compiled graphs take, at every segment boundary."""
    options = {"policy": "auto", "activation_budget": middle(recompute=recompute), "recompute": recompute}
    rehearsal = Rehearsal(
        tower(),
        lambda call: call(example_input()),
        lambda out: out.square().mean(),
        options,
    )
    planned = rehearsal.graph.planned
    plan = plan_of(rehearsal.graph)
    assert planned is not None and planned.windows is not None and plan.simulation is not None
    names = [c.name for c in rehearsal.graph.saved.candidates]
    decisions = dict(zip(names, planned.offload, strict=True))
    seen, _ = rehearsal.run(decisions, planned.windows)
    expected, _ = rehearsal.simulate(decisions, planned.windows)
    assert seen == expected
    # The rehearsal makes no tangents, and holds the outputs.
    storages = rehearsal.step.storages
    more = sum(s.nbytes for s in storages if s.is_output) - sum(s.nbytes for s in storages if s.is_tangent)
    drafted = [b.live_bytes + (more if b.phase == "backward" else 0) for b in plan.simulation.boundaries]
    assert [s.live_bytes for s in seen] == drafted
    assert [s.segment for s in seen] == [b.segment for b in plan.simulation.boundaries]


@pytest.mark.slow
@pytest.mark.parametrize("holds", [False, True])
def test_outputs_that_the_caller_holds_or_lets_go_of(holds: bool) -> None:
    """They count as let go of until a step has shown otherwise. The first schedule is within the budget in any case."""
    call = compiled(tower(), max_slowdown=0.5)
    for _ in range(2):
        out = call(example_input())
        loss = out.square().mean() if holds else out.sum()  # a square saves its input
        if not holds:
            del out
        loss.backward()
    graph = only_graph()
    assert graph.outputs.are_held is holds
    step = plan_of(graph)
    assert step.simulation is not None


def test_the_schedule_of_the_first_step_holds_outputs_where_it_can() -> None:
    found = recorded("tower").plan(middle(recompute="default"), recompute="default")
    scheduler = found.scheduler
    assert scheduler is not None and not scheduler.step.holds_outputs
    held = scheduler.with_step(replace(scheduler.step, holds_outputs=True), scheduler.host_bytes)
    limit = held.smallest().simulation.peak_bytes
    first = planning.schedule_of_first_step(scheduler, limit)
    again = simulate(held.step, first.offload, copies=scheduler.rates, windows=first.windows)
    assert again.peak_bytes <= limit
    assert planning.schedule_of_first_step(scheduler, 1) == scheduler.smallest()


def test_nothing_is_done_where_plain_inductor_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the loss in the graph: else it may take the rest of the budget."""
    monkeypatch.setattr(planning, "loss_of", lambda states: "inside")
    model = tower()
    run = scenario(model, compiled(model, activation_budget="1GiB"))
    found = run()
    assert new_graphs() == []
    (plan,) = new_plans()
    assert "nothing is done" in plan.summary
    assert plan.predicted == plan.baseline
    assert {d.action for d in plan.decisions} <= {"keep", "stay"}
    stats = fxoffload.stats()
    assert (stats.num_plain_graphs, stats.bytes_offloaded, stats.num_segments_compiled) == (1, 0, 0)
    torch.compiler.reset()
    assert_equal(found, scenario(model, compiled(model, policy="keep_all", recompute="default"))())


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["raise", "fallback"])
def test_a_budget_that_cannot_be_met(on_error: str) -> None:
    model = tower()
    call = compiled(model, activation_budget=1000, on_error=on_error)
    with pytest.raises(ValueError, match="expected an activation_budget of at least") as caught:
        call(example_input())
    assert isinstance(caught.value, BudgetError)
    assert caught.value.smallest_bytes == recorded("tower").smallest().smallest_bytes
    assert caught.value.segment
    assert new_plans() == []


@pytest.mark.slow
def test_both_knobs() -> None:
    smallest = recorded("tower").smallest().smallest_bytes
    model = tower()
    call = compiled(model, activation_budget=smallest, max_slowdown=0.0)
    with pytest.warns(UserWarning, match=r"predicted slowdown of .* above max_slowdown \(0 %\); the budget wins"):
        call(example_input())
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*above max_slowdown.*")
        compiled(model, activation_budget=smallest, max_slowdown=100.0)(example_input())
    plan = plan_of(new_graphs()[-1])
    assert (plan.activation_budget, plan.max_slowdown) == (smallest, 100.0)
    assert plan.predicted_peak_bytes <= smallest


@pytest.mark.slow
def test_a_slowdown() -> None:
    model = tower()
    plan = check_plan(scenario(model, compiled(model, max_slowdown=10.0)))
    assert plan.predicted_step_ms <= 11 * plan.baseline_step_ms
    assert plan.predicted_peak_bytes < 0.8 * plan.baseline_peak_bytes
    assert (plan.activation_budget, plan.max_slowdown) == (None, 10.0)


@pytest.mark.slow
def test_plans_are_forgotten_with_their_code() -> None:
    gc.collect()
    model = tower()
    call = compiled(model, activation_budget=middle())
    call(example_input())
    (plan,) = new_plans()
    assert plan.graph >= 0
    del call, model
    torch.compiler.reset()
    gc.collect()
    assert plan not in new_plans()


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["planner", "segments", "offload", "calibration"])
def test_pieces_that_are_switched_off(piece: str) -> None:
    model = tower()
    run = scenario(model, compiled(model, activation_budget=middle(), disable=(piece,)))
    if piece == "calibration":
        check_plan(run)
        return
    found = run()
    assert new_plans() == []
    for graph in new_graphs():
        assert graph.planned is None and graph.plan_box is None
        assert graph.decide() == graph.actions["auto"]
    with fxoffload.override_policy("keep_all"):
        assert_equal(found, run())


def test_a_graph_without_layers_has_nothing_to_choose_from() -> None:
    torch.manual_seed(0)
    model = Block()
    call = compiled(model, activation_budget="1KiB")
    call(example_input()).sum().backward()
    graph = only_graph()
    assert graph.plan_box is None and graph.planned is None
    assert new_plans() == []
    assert graph.decide() == graph.actions["auto"]


@pytest.mark.slow
def test_planning_that_fails() -> None:
    model = tower()
    expected = scenario(model, compiled(model, policy="keep_all", recompute="default"))()
    torch.compiler.reset()
    fxoffload.reset_stats()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no plan today")

    with mock.patch.object(planning.Planning, "run", fail):
        run = scenario(model, compiled(model, activation_budget=middle_of_tower, on_error="fallback"))
        with pytest.warns(UserWarning, match="no plan today"):
            assert_equal(run(), expected)
        assert fxoffload.stats().num_fallbacks == 1
        assert new_plans() == []
        torch.compiler.reset()
        with pytest.raises(Exception, match="no plan today"):
            compiled(model, activation_budget=middle_of_tower)(example_input())


middle_of_tower = 80_000


@pytest.mark.slow
def test_several_forwards_before_their_backward() -> None:
    model = tower()
    call = compiled(model, activation_budget=middle())

    def losses() -> Tensor:
        return torch.stack([call(example_input(4) * (i + 1)).square().mean() for i in range(3)]).sum()

    run = train_step(model, losses)
    found = run()
    assert plan_of(only_graph()).predicted.bytes_offloaded >= 0
    with fxoffload.override_policy("keep_all"):
        assert_equal(found, run())
    assert_nothing_held()


@pytest.mark.slow
def test_another_length_than_the_one_that_was_planned() -> None:
    model = tower()
    call = torch.compile(
        model,
        backend="fxoffload",
        dynamic=True,
        options={
            "device_types": ("cpu",),
            "inner": "aot_eager",
            "min_bytes": 1,
            "activation_budget": middle(recompute="default"),
            "recompute": "default",
        },
    )
    for batch in (4, 7, 2):
        run = scenario(model, call, batch)
        found = run()
        graph = only_graph()
        assert graph.planned is not None
        with fxoffload.override_policy("keep_all"):
            assert_equal(found, run())
        assert_close(found, scenario(model, model, batch)())
        assert_nothing_held()


@pytest.mark.slow
def test_a_host_that_is_too_small_for_all() -> None:
    model = tower()
    budget = middle(recompute="default")
    needed = recorded("tower").plan(budget, recompute="default").plan.predicted.bytes_offloaded
    plan = check_plan(scenario(model, compiled(model, activation_budget=budget, host_budget=needed + (2 << 20))))
    assert plan.predicted_peak_bytes <= budget


# -- a user's policy ---------------------------------------------------------------------------------------------------


def checkpointed(policy: Callable[..., CheckpointPolicy]) -> nn.Module:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

    return tower(Checkpointed)


def roots(graph: CompiledGraph) -> list[str]:
    """Ops that make the saved values, views seen through."""
    found = []
    for candidate in graph.saved.candidates:
        node = candidate.nodes[0]
        while node.target in (aten.view.default, aten.t.default, aten.permute.default, aten._unsafe_view.default):
            node = node.args[0]  # type: ignore[assignment]
        found.append(str(node.target))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("knob", [{"activation_budget": 60_000}, {"max_slowdown": 10.0}])
def test_a_users_policy_is_obeyed(knob: dict[str, Any]) -> None:
    saved, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return saved if op is aten.addmm.default else again

    model = checkpointed(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = scenario(model, compiled(model, **knob))
        found = run()
    (plan,) = new_plans()
    for graph in new_graphs():
        made = roots(graph)
        assert made.count("aten.addmm.default") >= LAYERS
        assert not {"aten.erf.default", "aten.rsqrt.default", "aten.mul.Tensor"} & set(made)
        with fxoffload.override_policy("keep_all"):
            assert_equal(found, run())
    assert plan.predicted_peak_bytes <= plan.baseline_peak_bytes


OFFLOAD = getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", None)


@pytest.mark.slow_except("knob2")
@pytest.mark.skipif(OFFLOAD is None, reason="this torch has no MUST_CPU_OFFLOAD")
@pytest.mark.parametrize("knob", [{}, {"activation_budget": "1GiB"}, {"recompute": "default"}, {"recompute": "cheap"}])
def test_what_a_user_wants_on_the_host(knob: dict[str, Any]) -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        assert OFFLOAD is not None
        return OFFLOAD if op is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    model = checkpointed(policy)
    run = scenario(model, compiled(model, **knob))
    plan = check_plan(run)
    graph = only_graph()
    moved = [m for m, go in zip(roots(graph), graph.decide(), strict=True) if go]
    assert moved.count("aten.addmm.default") >= LAYERS
    assert plan.predicted.bytes_offloaded > 0


def test_ranks_of_one_machine_leave_a_part_of_the_slowdown_free() -> None:
    """For what waits for each other costs, which no simulation of one rank knows."""
    assert Objective.of(None, None).most_ms(100.0) == pytest.approx(102.0)
    assert Objective.of(None, None, num_processes=2).most_ms(100.0) == pytest.approx(100.0 * (1.02 - SHARED_RESERVE))
    assert Objective.of(None, 0.01, num_processes=8).most_ms(100.0) == pytest.approx(100.25)  # a quarter, at least
    assert Objective.of(1 << 30, None, num_processes=2).budget_bytes == 1 << 30
