"""A graph with a plan of its own is held to its budget: on the CPU, with an allocator that is made up."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fxoffload
from fxoffload.compiler import planning
from fxoffload.compiler.graph_budget import GraphBudget, PlannedGraph
from fxoffload.compiler.plan_of_graph import PlanOfGraph, _plan_as_step
from fxoffload.errors import BudgetError
from fxoffload.machine.shelf import load_profile
from fxoffload.planner import SegmentStep
from fxoffload.planner.objective import Objective
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.windows import no_windows
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.tracker.chains import SizedChain
from fxoffload.runtime.tracker.hold_to_budget import HoldToBudget
from fxoffload.runtime.tracker.own_plan import OwnPlan
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.step.choice import Choice
from fxoffload.step.segment_names import lies_between
from tests.allocator import Allocator
from tests.planner.rehearsal import CPU
from tests.planner.test_chain_replan import measured
from tests.planner.test_windows import chain
from tests.support import Stack, assert_equal, batch

DEPTH, LENGTH = 4, 48
KIB = 1 << 10


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    gc.collect()
    yield
    torch.set_num_threads(threads)


class Run:
    """A model that is one graph, and steps of it. Above ``ALWAYS`` they take the plan's bytes, and ``extra`` of the
    bytes that eager code allocates and frees between forward and backward."""

    def __init__(self, **changes: object) -> None:
        before = {p.graph for p in fxoffload.plans()}
        self.allocator = Allocator()
        self.model = Stack(DEPTH)
        options = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, "profile": "h200", **changes}
        self.call = torch.compile(self.model, backend="fxoffload", options=options)
        self.extra = 0
        self.loss: Callable[[], None] = lambda: None
        self.peaks: list[int] = []
        self._before = before

    @property
    def plan(self) -> fxoffload.Plan:
        return [p for p in fxoffload.plans() if p.graph not in self._before][-1]

    def step(self, *, twice: bool = False) -> dict[str, Tensor]:
        """``twice``: a second backward goes through the same graph."""
        self.model.zero_grad()
        offloaded = fxoffload.stats().bytes_offloaded
        loss = self.call(batch(length=LENGTH)).square().mean()
        moved = fxoffload.stats().bytes_offloaded - offloaded
        newest = self.plan.calibrated or self.plan.predicted
        # Values moved beyond the plan are not there; the plan's own outside bytes are these.
        graphs = newest.peak_bytes - newest.outside_bytes - max(moved - newest.bytes_offloaded, 0)
        self.allocator.pass_by(graphs // 512 * 512 + self.extra)
        self.peaks.append(graphs + self.extra)
        self.loss()
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


@contextmanager
def held(run: Run) -> Iterator[None]:
    hold = HoldToBudget(run.allocator.read, run.allocator.history)
    with mock.patch.object(engine_for(CPU).calls, "_hold", hold):
        yield


@pytest.fixture(scope="module")
def budget() -> int:
    """Half way between the least and all."""
    torch.compiler.reset()
    with pytest.raises(BudgetError) as found:
        Run(activation_budget=1).step()
    torch.compiler.reset()
    assert found.value.inductor_bytes is not None
    return (found.value.smallest_bytes + found.value.inductor_bytes) // 2


@pytest.mark.slow_except("2048")
@pytest.mark.parametrize("left", [0, 2 * KIB])
def test_a_loss_in_eager_that_the_plan_does_not_know(budget: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are left free from the next step on, and the plan says so. No bit of a gradient changes. When it needs
    less, the plan uses no more than the rest."""
    monkeypatch.setattr(PlanOfGraph, "may_be_planned_as_step", False)
    run = Run(activation_budget=budget)
    extra = 16 * KIB
    with held(run):
        plain = run.step()
        for _ in range(3):
            assert_equal(run.step(), plain)
        assert max(run.peaks) <= budget and run.plan.calibrated is None
        run.extra = extra
        for _ in range(4):
            assert_equal(run.step(), plain)
    before, after = run.peaks[4], run.peaks[6:]
    assert before > budget >= max(after)
    plan = run.plan
    assert plan.calibrated is not None and plan.calibrated_baseline is not None
    assert plan.calibrated.bytes_offloaded > plan.predicted.bytes_offloaded
    assert plan.calibrated.outside_bytes == plan.calibrated_baseline.outside_bytes > 0
    assert plan.calibrated.peak_bytes <= budget
    assert "corrected by" in plan.summary and "outside compiled graphs" in str(plan)
    offloaded = sum(d.total_bytes for d in plan.decisions if d.action == "offload")
    assert offloaded == plan.calibrated.bytes_offloaded
    assert fxoffload.Plan.from_json(plan.to_json()) == plan
    with held(run):
        run.extra = left
        for _ in range(12):
            assert_equal(run.step(), plain)
    assert max(run.peaks[-12:]) <= budget
    assert run.plan.calibrated is not None, "it is used again"
    assert left <= run.plan.calibrated.outside_bytes <= left + budget // 256


def test_a_graph_with_its_loss_outside_is_planned_as_a_step(budget: int) -> None:
    """Its recomputation was chosen without the bytes around it."""
    run = Run(activation_budget=budget)
    with held(run):
        plain = run.step()
        own = run.plan
        run.extra = 16 * KIB
        for _ in range(8):
            assert_equal(run.step(), plain)
    step = run.plan
    assert step.graph != own.graph and step.label == "a step over 1 call of 1 graph"
    assert "with more recomputation" in step.summary
    assert step.predicted.outside_bytes > 0 and max(run.peaks[6:]) <= budget + 512, "pages of the allocator"


def test_a_budget_that_the_loss_exceeds_is_met_from_the_third_step_on(budget: int) -> None:
    """The first two are observed. The third waits for the plan that they lead to."""
    run = Run(activation_budget=budget)
    run.extra, read, history = 16 * KIB, run.allocator.read, run.allocator.history
    with held(run), mock.patch.multiple(engine_for(CPU).calls, _memory=read, _history=history):
        plain = run.step()
        for _ in range(4):
            assert_equal(run.step(), plain)
    assert run.peaks[0] > budget >= max(run.peaks[2:])
    assert run.plan.label == "a step over 1 call of 1 graph"


@pytest.mark.slow
def test_a_plan_that_meets_its_budget_with_the_loss_stays(budget: int) -> None:
    run = Run(activation_budget=budget)
    with held(run):
        for _ in range(6):
            run.step()
    assert max(run.peaks) <= budget and "a step over" not in run.plan.label
    (tracked,) = engine_for(CPU).calls._tracked_graphs
    assert tracked.is_held_alone
    assert engine_for(CPU).calls.end_step(), "nothing is awaited"


def test_the_step_of_one_call_is_measured_with_its_loss(budget: int) -> None:
    """A reading is a millisecond after the last one, and the loss takes twenty."""
    run = Run(activation_budget=budget)
    with held(run), measured(1.0) as time:
        plain = run.step()
        run.extra = 16 * KIB
        run.loss = lambda: setattr(time, "now", time.now + 20.0)
        while run.plan.calibrated is None:
            assert len(run.peaks) < 16
            assert_equal(run.step(), plain)
    plan = run.plan
    assert plan.label == "a step over 1 call of 1 graph" and plan.calibrated is not None
    assert 20.0 <= plan.calibrated.outside_ms <= 24.0
    segments = [b for b in plan.boundaries if not lies_between(b.segment)]
    assert plan.calibrated.step_ms - plan.calibrated.exposed_ms == pytest.approx(
        len(segments) + plan.calibrated.outside_ms
    )


@pytest.mark.parametrize("may_be", [False, True])
def test_a_graph_that_is_planned_as_a_step_is_measured_no_more(may_be: bool) -> None:
    own, replan = OwnPlan(1, 1, mock.Mock()), mock.Mock()
    graph: Any = lambda: SimpleNamespace(tracked=SimpleNamespace(own_plan=own), replan=replan)  # noqa: E731
    assert [_plan_as_step(graph, may_be) for _ in range(2)] == [may_be, False]
    assert replan.stop.call_count == own.join.call_count == may_be  # type: ignore[union-attr]
    assert not _plan_as_step(lambda: None, may_be)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_second_backward_does_not_hide_that_a_budget_is_exceeded(budget: int) -> None:
    """``retain_graph``: the step is none that can be planned, and its first backward has told."""
    run = Run(activation_budget=budget)
    with held(run):
        run.step()
        run.extra = 16 * KIB
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(20):
                run.step(twice=True)
    assert run.plan.summary.startswith("the fastest plan found within")
    (told,) = [str(w.message) for w in caught if "activation_budget" in str(w.message)]
    assert "found steps that change too often" in told


@pytest.mark.slow
def test_a_graph_that_fits_gives_way_to_a_loss_that_does_not() -> None:
    """The graph alone has room to spare; it is cut and kept whole, and then planned with its loss."""
    run = Run(activation_budget="1GiB")
    with held(run):
        run.step()
    budget = run.plan.predicted.peak_bytes + 8 * KIB
    torch.compiler.reset()
    run = Run(activation_budget=budget)
    with held(run), warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = run.step()
        assert not run.plan.predicted.bytes_offloaded and "give way to the loss" in run.plan.summary
        run.extra = 48 * KIB
        for _ in range(8):
            assert_equal(run.step(), plain)
    assert run.peaks[1] > budget >= max(run.peaks[6:])


def test_where_nothing_can_meet_it_one_warning_says_what_would(budget: int) -> None:
    run = Run(activation_budget=budget)
    with held(run), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.step()
        run.extra = budget
        for _ in range(8):
            run.step()
    (told,) = [str(w.message) for w in caught if "activation_budget" in str(w.message)]
    newest = run.plan.calibrated or run.plan.predicted
    assert f"({newest.peak_bytes} bytes)" in told
    assert run.peaks[-1] <= newest.peak_bytes


@pytest.mark.slow
def test_while_the_policy_is_overridden_no_step_is_judged(budget: int) -> None:
    run = Run(activation_budget=budget)
    with held(run):
        run.step()
        with fxoffload.override_policy("keep_all"):
            run.extra = budget
            run.step()
        run.extra = 0
        run.step()
    assert run.plan.calibrated is None


@pytest.mark.slow
def test_a_graph_that_was_left_to_inductor_is_told_of_once(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was predicted to fit. The budget that the message names has it planned, and is met."""
    run = Run(activation_budget="1GiB")
    with held(run):
        run.step()
    most = run.plan.predicted.peak_bytes
    torch.compiler.reset()
    monkeypatch.setattr(planning, "loss_of", lambda states: "inside")
    run = Run(activation_budget=most)
    with held(run), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.extra = 16 * KIB
        for _ in range(5):
            run.step()
    (told,) = [str(w.message) for w in caught if "as plain Inductor does" in str(w.message)]
    assert f"activation_budget={run.peaks[-1] // 512 * 512} is met as it is" in told
    named = int(told.split("activation_budget=")[2].split()[0])
    torch.compiler.reset()
    run = Run(activation_budget=named)
    with held(run), warnings.catch_warnings():
        warnings.simplefilter("error")
        run.extra = 16 * KIB
        for _ in range(5):
            run.step()
    assert max(run.peaks[2:]) <= most + 512


@pytest.mark.slow
def test_a_graph_of_inductor_that_fits_is_not_told_of(budget: int) -> None:
    run = Run(activation_budget="1GiB")
    with held(run), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            run.step()


def test_the_first_step_s_choice_is_judged_from_the_second_step_on() -> None:
    """Kernels are tuned in the first. What its steps exceed is told from its own prediction."""
    control, graph, first = control_of_a_chain()
    assert control.loop is None
    control.first_step_ended()
    assert control.loop is not None
    graph.planned = None
    assert control.loop is None
    graph.planned = first[0]
    control.exceeded(10 * KIB, 1)
    unused = control._budget - first[1].simulation.peak_bytes
    assert control.margin_bytes == 10 * KIB + unused + control._spare_bytes


def test_steps_that_wait_for_the_plan_are_judged_after_the_first() -> None:
    """The caller holds the outputs: the first step's choice stays until the calibration has counted them."""
    control, replan = mock.Mock(), mock.Mock(has_ended=False)
    graph: Any = SimpleNamespace(outputs=SimpleNamespace(are_held=True, have_gradients=False), planned="the first")
    plan: Any = SimpleNamespace(_settled="the plan", _replan=replan, _budget=control)
    backward_ended = PlanOfGraph.settling(plan, graph)
    assert backward_ended is not None
    assert not control.first_step_ended.called
    backward_ended()
    assert control.first_step_ended.called and graph.planned == "the first"
    replan.has_ended = True
    backward_ended()
    assert graph.planned == "the plan"


def test_what_measurements_explain_of_an_excess_is_not_left_free_too() -> None:
    control, *_ = control_of_a_chain()
    control.exceeded(10 * KIB, 1)
    step, most = control._scheduler.step, control.margin_bytes
    assert control.with_margin(step).forward[0].outside_bytes == control.margin_bytes <= most
    larger = replace(step, forward=with_more(step.forward), backward=with_more(step.backward))
    assert control.with_margin(larger).forward[0].outside_bytes == control.margin_bytes == control._spare_bytes


def with_more(segments: tuple[SegmentStep, ...]) -> tuple[SegmentStep, ...]:
    return tuple(replace(s, temp_bytes=s.temp_bytes + (1 << 30)) for s in segments)


def control_of_a_chain() -> tuple[GraphBudget, Any, tuple[Choice, Schedule]]:
    """A graph that makes the choice of its first step."""
    step = chain(8, 8 * KIB)
    scheduler = Scheduler(step, ProfileRates(load_profile("h200")))
    budget = 40 * KIB
    plan, first = scheduler.least_time(budget), scheduler.smallest()
    assert plan is not None
    choice = Choice(first.offload, first.windows)
    graph: Any = SimpleNamespace(planned=choice, may_follow=lambda: True)
    order = range(len(first.offload))
    least = Choice((True,) * len(order), no_windows(step))
    planned = PlannedGraph(graph, mock.Mock(), Objective(budget), order, least)
    control = GraphBudget(planned, scheduler, plan, in_background=False)
    control._start = lambda: None  # type: ignore[method-assign]
    control.first_step(choice, first)
    return control, graph, (choice, first)


@pytest.mark.slow
def test_what_was_pinned_for_a_calibrated_plan_does_not_bound_its_correction(budget: int) -> None:
    run = Run(activation_budget=budget)
    with held(run), warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = run.step()
        control = next(s.control for s in engine_for(CPU).calls._tracked_graphs if s.control is not None)
        assert isinstance(control, GraphBudget)
        now, scheduler = control.schedule, control._scheduler
        control.calibrated(scheduler.with_step(scheduler.step, now.simulation.bytes_offloaded), now)
        run.extra = 16 * KIB
        for _ in range(4):
            assert_equal(run.step(), plain)
    assert run.peaks[1] > budget >= max(run.peaks[3:])


@pytest.mark.slow
def test_a_budget_that_is_missed_on_paper_is_tried_where_the_device_tells(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is refused before it ran: what fits runs without a word, and what does not is told with the number."""
    with pytest.raises(BudgetError, match="This is an estimate; ") as found:
        Run(activation_budget=1).step()
    asked = int(0.9 * found.value.smallest_bytes)
    with pytest.raises(BudgetError):
        Run(activation_budget=asked).step()
    monkeypatch.setattr(planning, "TELLING_DEVICE_TYPES", ("cpu",))
    with pytest.raises(BudgetError):
        Run(activation_budget=asked // 2).step()
    torch.compiler.reset()
    run = Run(activation_budget=asked)
    with held(run), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.extra = (asked - found.value.smallest_bytes) // 512 * 512  # estimates were too large
        plain = run.step()
        assert run.plan.predicted.peak_bytes > asked and "which its steps will tell" in run.plan.summary
        for _ in range(3):
            assert_equal(run.step(), plain)
        assert max(run.peaks) <= asked
        assert [str(w.message) for w in caught if "activation_budget" in str(w.message)] == []
        run.extra = 0
        for _ in range(6):
            assert_equal(run.step(), plain)
    (told,) = [str(w.message) for w in caught if "activation_budget" in str(w.message)]
    named = int(told.split("(")[1].split()[0])
    assert named == run.plan.predicted.peak_bytes > asked
    assert run.peaks[-1] <= named


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_the_second_of_two_observed_steps_tells_enough_for_a_plan(is_recorded: bool, is_known: bool) -> None:
    tracked, control, chain = TrackedGraph(mock.Mock()), mock.Mock(), SizedChain()
    tracked.control, tracked.chains.known = control, mock.Mock() if is_known else None
    step: Any = SimpleNamespace(calls=[object()], record=object() if is_recorded else None)
    HoldToBudget._correct(tracked, chain, step, mock.Mock(), 5)
    control.exceeded.assert_called_once_with(5, 1, is_observed=is_recorded and is_known)
