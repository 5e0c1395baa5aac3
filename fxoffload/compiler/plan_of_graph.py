"""A graph's own plan: made with its joint graph, followed from the first call on, corrected by measurements."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from fxoffload import tell
from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler.call_choice import CallChoice
from fxoffload.compiler.chain_graphs import OtherForm, other_forms
from fxoffload.compiler.graph_budget import GraphBudget, PlannedGraph
from fxoffload.compiler.measured_costs import MeasuredCosts
from fxoffload.compiler.partitioning import PartitionSettings
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.compiler.planning import (
    TUNING_BYTES,
    WORTH,
    GraphPlanning,
    NotWorthItError,
    not_worth_it,
    schedule_of_first_step,
    too_small,
)
from fxoffload.compiler.recalibrate_graph import GraphRecalibration, SegmentCode, calibration_of, replan_for
from fxoffload.compiler.recalibration import Recalibration
from fxoffload.compiler.replan import Replan
from fxoffload.compiler.schedule_by_size import ScheduleBySize
from fxoffload.compiler.size_variants import PlanForSizes
from fxoffload.counters import counters
from fxoffload.errors import BudgetError, PassError, in_brief
from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.registry import PlanBox
from fxoffload.planner.objective import Objective
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.windows import no_windows
from fxoffload.runtime.engine import Budgets, engine_for
from fxoffload.step.choice import Choice

# Most calls that follow the first step's schedule, where no calibration comes that would count the outputs.
_MOST_AT_FIRST = 32


class PlanOfGraph:
    """The plan of one compiled graph.

    Args:
        found: the plan.
        limit_bytes: part of the budget that its schedule may take; None without a budget.
        rates: that it was made with.
        settings: of its partitioning, whose device it is for.
        asked: the objective of the options. The plan's may be another, as where it replaces checkpointing.
        budgets: of host memory and windows.

    Attributes:
        box: holds the plan as it is now.
        sized: plans calls of other sizes; None where they are fixed.
        budget_bytes: that the plan was made for.
        other_forms: the graph without this plan, by fields of ``GraphDescription``; until the backward is compiled.
    """

    def __init__(
        self,
        found: PlanForSizes,
        limit_bytes: int | None,
        rates: ProfileRates,
        settings: PartitionSettings,
        asked: Objective,
        budgets: Budgets,
    ) -> None:
        basis = "operators" if rates.op_times else "estimated"
        plan = replace(found.planned.plan, basis=basis, estimate_error=rates.profile.estimate_error)
        self.box = PlanBox(plan)
        self.sized = found.sized
        self.budget_bytes = found.planned.objective.budget_bytes
        self.other_forms: dict[str, OtherForm] = other_forms(found.planned, settings)
        self._planning: GraphPlanning | None = replace(found.planned, plan=plan)
        self._describe_plain = found.planned.describe_plain
        self._range = found.range
        self._limit_bytes = limit_bytes
        self._asked = asked
        self._device = settings.device
        self._budgets = budgets
        self._engine = engine_for(settings.device)
        self._pinned_before = 0  # bytes of host memory
        self._settled: Choice | None = None  # the plan, while the first step follows another schedule
        self._budget: GraphBudget | None = None  # holds the graph to it
        self._replan: Replan | None = None
        self._calibration: Recalibration | None = None

    @property
    def plan(self) -> Plan:
        """As it is now."""
        return self.box.plan

    @property
    def planning(self) -> GraphPlanning:
        """How it came about. Not to be asked for once the backward is compiled."""
        assert self._planning is not None
        return self._planning

    @property
    def is_plain(self) -> bool:
        """Whether the plan is to do nothing."""
        return self.planning.schedule is None

    @property
    def may_be_planned_as_step(self) -> bool:
        """Whether the loss, outside of the graph, may take so much of a budget that the graph is planned anew."""
        budget, planning = self._asked.budget_bytes, self.planning
        return budget is not None and planning.schedule is not None and planning.plan.loss == "outside"

    def forget_graphs(self) -> None:
        """The backward is compiled, or will not be. Partitionings are as large as the graphs, and this may live as long
        as the code."""
        self._planning = self._describe_plain = self._calibration = None
        self.other_forms = {}

    def guard_sizes(self) -> None:
        """Have other sizes than the plan is for compiled anew."""
        if self._range is not None:
            self._range.guard()

    # -- the forward is compiled -------------------------------------------------------------------------------------

    def to_reserve(self, leaving_bytes: int) -> int:
        """Bytes of host memory for a first step where ``leaving_bytes`` leave under the plan."""
        first = self.planning.first
        self._pinned_before = self._engine.host_bytes_reserved()
        return leaving_bytes if first is None else max(leaving_bytes, first.simulation.bytes_offloaded)

    def choice(self, state: ForwardState) -> Choice:
        """The plan's choice, in the order of the forward's candidates."""
        assert self.planning.schedule is not None
        return self._choice(state, self.planning.schedule)

    def _choice(self, state: ForwardState, schedule: Schedule) -> Choice:
        step = self.planning.partitioning.step
        assert step is not None
        offload = {c.name: go for c, go in zip(step.candidates, schedule.offload, strict=True)}
        found = {c.name for c in state.saved.candidates}
        if found != offload.keys():
            raise PassError(
                f"expected the candidates of the plan, found others: {sorted(found ^ offload.keys())[:5]}", "plan"
            )
        return Choice(tuple(offload[c.name] for c in state.saved.candidates), schedule.windows)

    def follow(self, graph: CompiledGraph, state: ForwardState) -> None:
        """``graph`` follows the plan, after a first step with a schedule of its own where that needs one."""
        graph.planned, graph.plan_box = self.choice(state), self.box
        if self.planning.first is not None:
            self._settled = graph.planned
            graph.planned = self._choice(state, self.planning.first)

    def by_size(self, state: ForwardState) -> ScheduleBySize | None:
        """Schedules calls of other sizes than the planned ones; None where sizes are fixed."""
        if self.sized is None:
            return None
        sizes = self.sized.sizes.in_forward(state.gm)
        return None if sizes is None else ScheduleBySize(replace(self.sized, sizes=sizes), self._places(state))

    def correct(
        self,
        calls: CallChoice,
        state: ForwardState,
        alike: SegmentCode,
        disabled: Collection[str],
        *,
        runs_segments: bool,
    ) -> None:
        """Have the plan that ``calls`` follow corrected by measurements: of the times of steps, and of their peaks
        where it has a budget.

        Args:
            state: its forward.
            alike: the code of each segment.
            disabled: pieces that are switched off.
            runs_segments: whether ``plan_first`` is to have readings of segments.
        """
        tracked, engine, budgets = calls.tracked, self._engine, self._budgets

        # Must not hold ``self``: that holds the calibration, which holds ``pin``. The cycle would keep the graph after
        # its code is gone.
        def pin(more: int) -> bool:
            # Before the first step, reserved memory may not be pinned yet.
            is_there = engine.pin(max(engine.arena.reserved_bytes, tracked.reserved_bytes) + more, budgets)
            tracked.reserved_bytes += more * is_there
            return is_there

        about = (calls.graph, self.planning, self.box, self.planning.objective, alike)
        calibration: Recalibration | None = None
        if "calibration" not in disabled:
            records = "allocator_record" not in disabled
            self._replan = calls.replan = replan_for(*about, self._device, pin, records)
            calibration = None if self._replan is None else self._replan.calibration
        if runs_segments:
            self._calibration = calibration = calibration or calibration_of(*about, pin)
        if self._asked.budget_bytes is not None:
            tracked.control = self._budget = self._control(calls, state)
            if calibration is not None:
                calibration.control = tracked.control

    def _control(self, calls: CallChoice, state: ForwardState) -> GraphBudget:
        """Holds the graph to its budget."""
        planning, engine, budgets = self.planning, self._engine, self._budgets
        assert planning.partitioning.step is not None
        assert planning.schedule is not None and planning.scheduler is not None
        found = PlannedGraph(
            calls.graph,
            self.box,
            self._asked,
            self._places(state),
            Choice(state.actions["auto"], no_windows(planning.partitioning.step)),
            by_size=calls.by_size,
            pin=lambda more: engine.pin(engine.arena.reserved_bytes + more, budgets),
            plan_as_step=partial(_plan_as_step, weakref.ref(calls), self.may_be_planned_as_step),
        )
        in_background = self._device.type == "cuda"
        control = GraphBudget(found, planning.scheduler, planning.schedule, in_background=in_background)
        if self._settled is not None and calls.graph.planned is not None and planning.first is not None:
            control.first_step(calls.graph.planned, planning.first)
        return control

    def _places(self, state: ForwardState) -> list[int]:
        """Where each of the forward's candidates is among those of the plan."""
        assert self.planning.partitioning.step is not None
        place = {c.name: i for i, c in enumerate(self.planning.partitioning.step.candidates)}
        return [place[c.name] for c in state.saved.candidates]

    # -- the backward is compiled ------------------------------------------------------------------------------------

    def plan_first(
        self, graph: CompiledGraph, forward: ForwardState, backward: BackwardState, costs: MeasuredCosts
    ) -> None:
        """Schedule with the readings of the compiled segments, before the first step.

        Raises:
            BudgetError: the least plan exceeds the budget, as measured.
            NotWorthItError: the plan saves next to nothing, as measured.
        """
        calibration, limit, box = self._calibration, self._limit_bytes, self.box
        if calibration is None:
            return
        ran = costs.run_segments(forward, backward, calibration.step)
        if ran is None:
            return
        before, is_least = (graph.planned, self._settled), limit is not None and box.plan.predicted.peak_bytes > limit
        try:
            graph.planned, self._settled = self._settled or graph.planned, None
            scheduler = calibration.plan_first(ran.readings, "segments" if ran.are_all else box.plan.basis, limit)
            if before[1] is not None and limit is not None:
                self._settled = graph.planned
                tuned_later = 0 if ran.are_all else TUNING_BYTES
                first = schedule_of_first_step(scheduler, limit - tuned_later)
                calibration.follow_first(first)
                if self._budget is not None and graph.planned is not None:
                    self._budget.first_step(graph.planned, first)
            if is_least and ran.are_all and not self._asked.is_checkpointing:
                self._refuse_what_was_measured(scheduler)
            self._leave_what_is_not_worth_it()
        except (BudgetError, NotWorthItError):
            raise
        except Exception as error:
            graph.planned, self._settled = before
            tell.warn(
                f"fxoffload could not plan with measured segments and goes on with its plan as it is: {in_brief(error)}"
            )

    def _refuse_what_was_measured(self, scheduler: Scheduler) -> None:
        """The least that was found on paper was compiled, and its segments ran: raise where that exceeds the budget."""
        budget, limit, plan = self._asked.budget_bytes, self._limit_bytes, self.plan
        assert budget is not None and limit is not None
        smallest = scheduler.smallest().simulation
        if smallest.peak_bytes > limit:
            basis = "Its segments ran on this device"
            checkpointing = None if plan.checkpointing is None else plan.checkpointing.peak_bytes
            raise too_small(budget, smallest, budget - limit, plan.baseline.peak_bytes, basis, checkpointing)

    def _leave_what_is_not_worth_it(self) -> None:
        """Raise where the plan, with the segments' times and peaks, saves next to nothing: it would cost time for that.

        With estimates it did save something. T5's plan (2 + 2 layers), calibrated, saved 3 % for +4.6 % of time (H200,
        2026-11-29).
        """
        describe, box, plan = self._describe_plain, self.box, self.plan
        saved = 1 - plan.predicted.peak_bytes / plan.baseline.peak_bytes if plan.baseline.peak_bytes else 0.0
        if describe is None or saved >= WORTH:
            return
        summary = f"{not_worth_it(self._asked, saved, plan.baseline.peak_bytes)}, by what was measured"
        box.plan = replace(describe(summary), graph=box.index, basis=plan.basis, estimate_error=plan.estimate_error)
        if self._engine.arena.wait_until_grown() and self._engine.may_trim():
            self._engine.trim_host_memory(self._pinned_before, math.inf)
        counters.add("num_plain_graphs")
        raise NotWorthItError(box)

    def settling(self, graph: CompiledGraph) -> Callable[[], None] | None:
        """To be called after each backward: the plan takes over from the first step's schedule. None: it has.

        Normally that is after the first. Where outputs are not as the plan assumes, it waits until the calibration has
        counted them or has ended.
        """
        if self._settled is None:
            return None
        outputs, first, replan, num_calls = graph.outputs, graph.planned, self._replan, itertools.count(1)
        control = self._budget
        waiting = [self._settled]
        if replan is not None and isinstance(replan.calibration, GraphRecalibration):
            replan.calibration.first = first

        def backward_ended() -> None:
            if not waiting:
                return
            if control is not None:
                control.first_step_ended()
            is_as_planned = not (outputs.are_held or outputs.have_gradients)
            if is_as_planned or replan is None or replan.has_ended or next(num_calls) >= _MOST_AT_FIRST:
                settled = waiting.pop()
                if graph.planned is first:
                    graph.planned = settled

        return backward_ended


def _plan_as_step(graph: weakref.ref[CallChoice], may_be: bool) -> bool:
    calls = graph()
    own = None if calls is None else calls.tracked.own_plan
    if calls is None or own is None or not may_be or not own.as_step():
        return False
    if calls.replan is not None:
        calls.replan.stop()  # Until it is planned, its calls do not follow its own plan.
    return True
