"""Plans a graph before it is partitioned for good: partitionings of it are compared, and one is compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.recompute_rules import OFFLOADED
from fxoffload.analysis.values import Storages
from fxoffload.compiler.choices import Choices
from fxoffload.compiler.explain import checkpointed_decisions, describe_plan
from fxoffload.compiler.graph_estimates import GraphEstimates
from fxoffload.compiler.partitioning import Partition, Partitioning, PartitionSettings, make_partitioning
from fxoffload.compiler.recompute_search import RecomputeSearch, Try, fastest, smallest
from fxoffload.compiler.returned import loss_of
from fxoffload.errors import BudgetError
from fxoffload.machine.estimate_error import describe_error
from fxoffload.passes.checkpointed import clear_checkpointing, num_checkpointed
from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.registry import PlanBox
from fxoffload.plan_report.summary import aim_of, gain_of, slower_than_allowed
from fxoffload.planner.frontier import frontier_of
from fxoffload.planner.objective import Objective
from fxoffload.planner.plan import FrontierPoint, Prediction
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.simulate import Simulation
from fxoffload.sizes import format_bytes
from fxoffload.tell import warn
from fxoffload.torch_private.graphs import copy_graph

log = logging.getLogger(__name__)

# Memory on a GPU around the graphs. Libraries allocate workspaces in the first step and keep them (cuBLAS: 60 MiB on an
# H200); that step has to meet the budget too. A plan of one graph that is remade from measured steps has it back. Eager
# code between graphs adds up tangents: 24 layers of a MoE at 8,192 tokens took 33 MiB more than their graphs (H200,
# 2026-11-21).
AROUND_BYTES = 64 << 20
# Bytes that tuning Triton's kernels takes in the first step (copies of outputs, a buffer to empty the cache with).
TUNING_BYTES = 256 << 20
# A plan that saves less than this part of the peak is not worth its cuts.
WORTH = 0.05
# Estimates of peaks have been a fifth too large on stock models. So a budget that is missed by no more than this part
# of the least peak is not refused on paper, if the device reports the memory that steps take.
TELLING_DEVICE_TYPES = ("cuda",)
_TOO_LARGE = 0.25
# Points of a frontier that is drawn, and of a plan that is to be compiled: its own and plain Inductor's. Each of the
# others is planned for, which takes seconds.
DRAWN_POINTS = 7
FEW_POINTS = 2


def around_bytes(device: torch.device) -> int:
    """The part of a step's budget that its graphs leave to others."""
    return AROUND_BYTES if device.type == "cuda" else 0


def bytes_for_graphs(budget_bytes: int, device: torch.device) -> int:
    """The part of a step's budget that its graphs may take."""
    return max(budget_bytes - around_bytes(device), 1)


@dataclass(frozen=True)
class GraphPlanning:
    """The result of planning.

    Attributes:
        partitioning: the one to compile.
        schedule: what moves when; None: nothing is done, and the partitioning is plain Inductor's.
        scheduler: to reschedule the same step when its times are known better.
        first: what moves when in the first step, which tunes kernels and needs room for that; None: as in every step.
        objective: that the plan was made for.
        checkpointed: the partitioning under the model's own activation checkpointing, which the plan replaces; None:
            there is none, or it is obeyed.
        checkpointing: the cost of activation checkpointing that is obeyed, in words; "" where there is none.
        describe_plain: the plan that does nothing, with a given summary; None: it is that one, or must not be.
        around_bytes: the part of the budget that is left to others.
    """

    partitioning: Partitioning
    schedule: Schedule | None
    scheduler: Scheduler | None
    plan: Plan
    first: Schedule | None = None
    base: Partitioning | None = None
    objective: Objective = field(default_factory=Objective)
    checkpointed: Partitioning | None = None
    checkpointing: str = ""
    describe_plain: Callable[[str], Plan] | None = None
    around_bytes: int = 0


class NotWorthItError(Exception):
    """A plan gains too little with measured segments. The graph is to be compiled as plain Inductor has it.

    Attributes:
        box: the plan that says so.
    """

    def __init__(self, box: PlanBox) -> None:
        super().__init__(box.plan.summary)
        self.box = box


class Planning:
    """Finds the plan of one joint graph.

    Args:
        joint: labelled; of tags, those that are to be obeyed. It is left as it is.
        partition: partitions (a copy of) it.
        recompute: "auto", or the level to plan with.
        scheduling: keyword arguments of every ``Scheduler``.
        num_points: of the plan's frontier: two are its own and plain Inductor's (if that may be had), more have the
            smallest budget and some between.
        checkpointed: ``joint`` with the tags of activation checkpointing that the plan replaces; None: there are none.
        estimates: of ``joint``, made so far.

    Attributes:
        asked: the objective that the user asked for.
        objective: the same; where activation checkpointing is on and nothing is asked for, no more than its predicted
            peak.
    """

    def __init__(
        self,
        joint: fx.GraphModule,
        partition: Partition,
        settings: PartitionSettings,
        rates: ProfileRates,
        objective: Objective,
        *,
        recompute: str = "auto",
        scheduling: Mapping[str, Any] | None = None,
        num_points: int = FEW_POINTS,
        checkpointed: fx.GraphModule | None = None,
        estimates: GraphEstimates | None = None,
    ) -> None:
        self.joint = joint
        self.partition = partition
        self.settings = settings
        self.rates = rates
        self.asked = self.objective = objective
        self.recompute = recompute
        self.scheduling = dict(scheduling or {})
        self.num_points = num_points
        self.around_bytes = around_bytes(settings.device)
        self.checkpointed = checkpointed
        self.estimates = estimates or GraphEstimates()
        self._obeyed: tuple[Partitioning, Scheduler] | None = None
        self._sizes_are_fixed = False

    @property
    def limit_bytes(self) -> int | None:
        """The graph's part of the budget; None: there is none. Activation checkpointing's peak is a graph's."""
        budget = self.objective.budget_bytes
        if budget is None or self.objective.is_checkpointing:
            return budget
        return bytes_for_graphs(budget, self.settings.device)

    def run(self, *, sizes_are_fixed: bool = False) -> GraphPlanning | None:
        """The plan; None where the forward saves nothing that may move, with activation checkpointing or without it.

        Args:
            sizes_are_fixed: whether all sizes are. Then steps tell what estimates cannot. The plan of the least peak
                may be tried where it exceeds the budget by a little, on paper. A graph may give way to its loss.

        Raises:
            BudgetError: no choice fits into the budget.
        """
        self._sizes_are_fixed = sizes_are_fixed
        if self.checkpointed is None:
            planned = self._run()
        else:
            planned = self._in_place_of(self.checkpointed)
        if planned is None:
            return None
        planned = replace(planned, objective=self.objective, around_bytes=self.around_bytes)
        return self._with_obeyed(planned) if num_checkpointed(self.joint) else planned

    def _in_place_of(self, checkpointed: fx.GraphModule) -> GraphPlanning | None:
        """The plan, which replaces activation checkpointing: its own partitioning is one more choice.

        If nothing is asked for, its peak is the budget, without zeros for outputs: a plan makes none either.
        """
        partitioning = make_partitioning(checkpointed, "default", self.partition, self.settings)
        if partitioning.step is None:
            return None
        scheduler = self._scheduler(partitioning)
        found = scheduler.keep_all()
        self.objective = self.asked.at_checkpointing(found.peak_bytes)
        self._obeyed = partitioning, scheduler
        planned = self._run()
        if planned is None:
            return None
        instead = "with the recomputation of" if planned.partitioning is partitioning else "in place of"
        costs = f"{format_bytes(found.peak_bytes)} in {found.step_ms:.3g} ms"
        plan = replace(
            planned.plan,
            checkpointing=Prediction.of(found),
            summary=f"{planned.plan.summary}; {instead} activation checkpointing ({costs})",
        )
        return replace(planned, plan=plan, checkpointed=partitioning)

    def _with_obeyed(self, planned: GraphPlanning) -> GraphPlanning:
        """``planned`` with the cost of activation checkpointing that is obeyed."""
        joint, plan = copy_graph(self.joint), planned.plan
        clear_checkpointing(joint)
        plain = make_partitioning(joint, "default", self.partition, self.settings)
        if plain.step is None:
            return planned
        without = self._scheduler(plain).as_inductor()
        ours = self._scheduler(planned.base or planned.partitioning).keep_all()
        costs = (
            f"By prediction a step with it takes {ours.step_ms:.3g} ms and {format_bytes(ours.peak_bytes)}, plain "
            f"Inductor's without it {without.step_ms:.3g} ms and {format_bytes(without.peak_bytes)}; "
            f"activation_budget={ours.peak_bytes + self.around_bytes} asks for its memory at the least time. "
        )
        decisions = (*plan.decisions, *checkpointed_decisions(plain, planned.base or planned.partitioning))
        summary = f"{plan.summary}; activation checkpointing is on, what it recomputes cannot be planned"
        return replace(planned, plan=replace(plan, decisions=decisions, summary=summary), checkpointing=costs)

    def _run(self) -> GraphPlanning | None:
        began = time.perf_counter()
        base = self._partitioning("default")
        if base.step is None:
            return None
        first = self._scheduler(base)
        baseline = first.as_inductor()
        budget, limit = self.objective.budget_bytes, self.limit_bytes
        search = RecomputeSearch(
            self._partitioning,
            self._scheduler,
            (base, first),
            self._level,
            lambda: self._choices(base),
            checkpointed=self._obeyed,
        )
        if budget is not None and limit is not None and baseline.peak_bytes <= limit and not first.fixed:
            within = "activation checkpointing's peak" if self.objective.is_checkpointing else "the budget"
            fits = (
                f"plain Inductor needs {format_bytes(baseline.peak_bytes)}, which is within {within} of "
                f"{format_bytes(budget)}"
            )
            has_loss = self.objective.is_checkpointing or loss_of([base.forward_state]) == "inside"
            if has_loss or not self._sizes_are_fixed:
                return self._nothing(base, baseline, f"{fits}: nothing is done", search)
            kept = self._finish(Try(base, first, first.least_time(limit), limit), base, baseline, search)
            summary = f"{fits}; layers are cut, so that they can give way to the loss, which is outside of the graph"
            return replace(kept, plan=replace(kept.plan, summary=summary))
        if self.limit_bytes is not None:
            best = fastest(search.within(self.limit_bytes))
        else:
            best = smallest(search.as_fast(self._max_ms(baseline), baseline))
        log.info("planned in %.1f s: %d partitionings", time.perf_counter() - began, search.num_partitionings)
        if best is None:
            best = search.smallest()
            least = _simulation(best).peak_bytes
            tries = self._sizes_are_fixed and self.settings.device.type in TELLING_DEVICE_TYPES
            if not tries or self.limit_bytes is None or (1 - _TOO_LARGE) * least > self.limit_bytes:
                raise self._too_small(_simulation(best), baseline)
        return self._finish(best, base, baseline, search)

    # -- partitionings -------------------------------------------------------------------------------------------------

    @property
    def _level(self) -> str | None:
        return None if self.recompute == "auto" else self.recompute

    def _choices(self, base: Partitioning) -> Choices:
        classes = self.estimates.layer_classes(self.joint, self.settings, self.rates)
        return Choices(self.joint, base, classes, self.rates, host_bytes=self.scheduling.get("host_bytes"))

    def _max_ms(self, baseline: Simulation) -> float:
        assert self.objective.max_slowdown is not None
        return self.objective.most_ms(baseline.step_ms)

    def _partitioning(self, recompute: Mapping[str, Any] | str) -> Partitioning:
        return make_partitioning(self.joint, recompute, self.partition, self.settings)

    def _scheduler(self, partitioning: Partitioning) -> Scheduler:
        assert partitioning.step is not None
        return Scheduler(partitioning.step, self.rates, fixed=self._must_offload(partitioning), **self.scheduling)

    def _must_offload(self, partitioning: Partitioning) -> dict[str, bool]:
        """The partitioning's candidates that a user's policy wants on the host."""
        wanted = {n.name for n in self.joint.graph.nodes if n.meta.get("recompute") in OFFLOADED}
        if not wanted or partitioning.step is None:
            return {}
        nodes = partitioning.forward_state.gm.graph.nodes
        storages = Storages(nodes)
        roots = {storages.root(n) for n in nodes if n.name in wanted}
        large = {c.name for c in partitioning.step.candidates if c.moved_bytes}
        saved = partitioning.forward_state.saved.candidates
        return {c.name: True for c in saved if storages.root(c.nodes[0]) in roots and c.name in large}

    # -- results -------------------------------------------------------------------------------------------------------

    def _too_small(self, smallest: Simulation, baseline: Simulation) -> BudgetError:
        assert self.objective.budget_bytes is not None
        basis = f"This is an estimate; {describe_error(self.rates.profile.estimate_error)}"
        checkpointing = None if self._obeyed is None else self._obeyed[1].keep_all().peak_bytes
        return too_small(
            self.objective.budget_bytes, smallest, self.around_bytes, baseline.peak_bytes, basis, checkpointing
        )

    def _nothing(
        self, base: Partitioning, baseline: Simulation, summary: str, search: RecomputeSearch
    ) -> GraphPlanning:
        # Each point takes seconds, and training draws none.
        frontier = self._frontier(search, None, (baseline,)) if self.num_points > FEW_POINTS else ()
        return GraphPlanning(base, None, None, self._describe_plain(base, baseline, frontier, summary))

    def _describe_plain(
        self, base: Partitioning, baseline: Simulation, frontier: tuple[FrontierPoint, ...], summary: str
    ) -> Plan:
        return describe_plan(
            base,
            None,
            None,
            baseline=baseline,
            simulation=baseline,
            objective=self.objective,
            device=self.rates.profile.title,
            summary=summary,
            smallest_budget_bytes=frontier[0].budget_bytes if frontier else baseline.peak_bytes,
            frontier=frontier,
        )

    def _finish(self, best: Try, base: Partitioning, baseline: Simulation, search: RecomputeSearch) -> GraphPlanning:
        found = _simulation(best)
        saved = 1 - found.peak_bytes / baseline.peak_bytes if baseline.peak_bytes else 0.0
        if self.objective.budget_bytes is None and saved < WORTH and not best.scheduler.fixed:
            return self._nothing(base, baseline, not_worth_it(self.objective, saved, baseline.peak_bytes), search)
        if (told := slower_than_allowed(self.objective, found, baseline)) is not None:
            warn(told)
        gain = gain_of(found, baseline)
        if self.limit_bytes is not None and found.peak_bytes > self.limit_bytes:
            more = format_bytes(found.peak_bytes - self.limit_bytes)
            gain = f"by estimate the least that was found takes {more} more, which its steps will tell: {gain}"
        plain = () if best.scheduler.fixed else (baseline,)
        if self.num_points > FEW_POINTS:
            frontier = self._frontier(search, best, plain)
            smallest_bytes = frontier[0].budget_bytes
        else:
            own_bytes = max(best.limit_bytes or 0, found.peak_bytes)
            frontier = self._points([(own_bytes, found), *((s.peak_bytes, s) for s in plain)])
            known = [_simulation(search.least()).peak_bytes, *([] if best.limit_bytes is None else [own_bytes])]
            is_exceeded = self.limit_bytes is not None and found.peak_bytes > self.limit_bytes
            smallest_bytes = (own_bytes if is_exceeded else min(known)) + self.around_bytes
        plan = describe_plan(
            best.partitioning,
            best.schedule,
            base,
            baseline=baseline,
            simulation=found,
            objective=self.objective,
            device=self.rates.profile.title,
            summary=f"{aim_of(self.objective)}: {gain}",
            smallest_budget_bytes=smallest_bytes,
            frontier=frontier,
        )
        is_free = self.objective.budget_bytes is None and not best.scheduler.fixed
        plain_plan = partial(self._describe_plain, base, baseline, ()) if is_free else None
        return GraphPlanning(
            best.partitioning, best.schedule, best.scheduler, plan, self._first(best), base, describe_plain=plain_plan
        )

    def _frontier(
        self, search: RecomputeSearch, best: Try | None, plain: tuple[Simulation, ...]
    ) -> tuple[FrontierPoint, ...]:
        """Ascending; each as its budget's plan would be found.

        Args:
            best: the plan; None: plain Inductor's step is.
            plain: Inductor's step, where it may be had.
        """
        smallest = search.smallest()
        least = _simulation(smallest).peak_bytes
        ends = plain if best is None else (_simulation(best), *plain)
        top, steps = max(s.peak_bytes for s in ends), self.num_points - 1
        between = [fastest(search.within(least + (top - least) * i // steps)) for i in range(1, steps)]
        # The budget of a point is the one that it was found within: another of its size may be solved otherwise.
        if best is not None and best.limit_bytes is None:
            best = fastest(search.within(_simulation(best).peak_bytes)) or best
        found = [(s.peak_bytes, s) for s in plain]
        for one in (smallest, best, *between):
            if one is not None:
                found.append((one.limit_bytes or _simulation(one).peak_bytes, _simulation(one)))
        return self._points(found)

    def _points(self, found: Iterable[tuple[int, Simulation]]) -> tuple[FrontierPoint, ...]:
        """``found``: steps, with the graph's part of the budget that each is for."""
        return frontier_of(
            FrontierPoint(limit + self.around_bytes, step.peak_bytes, step.step_ms) for limit, step in found
        )

    def _first(self, best: Try) -> Schedule | None:
        if self.limit_bytes is None or self.settings.device.type != "cuda":
            return None
        return schedule_of_first_step(best.scheduler, self.limit_bytes - TUNING_BYTES)


def not_worth_it(objective: Objective, saved: float, baseline_bytes: int) -> str:
    """The summary of a plan that does nothing. ``saved``: the part of ``baseline_bytes`` that another would save."""
    return (
        f"at most {100 * (objective.max_slowdown or 0):.3g} % slowdown would save {100 * saved:.1f} % of "
        f"{format_bytes(baseline_bytes)}: not worth it, plain Inductor stays"
    )


def too_small(
    budget_bytes: int,
    smallest: Simulation,
    around_bytes: int,
    baseline_bytes: int,
    basis: str,
    checkpointing_bytes: int | None = None,
) -> BudgetError:
    """Nothing meets the budget. ``basis``: the evidence, a sentence. ``checkpointing_bytes``: the peak under activation
    checkpointing, where the model has it."""
    least = smallest.peak_bytes + around_bytes
    where = smallest.peak_place
    checkpointing = ""
    if checkpointing_bytes is not None:
        checkpointing = f", with activation checkpointing {format_bytes(checkpointing_bytes)}"
    return BudgetError(
        f"expected an activation_budget of at least {format_bytes(least)} ({least} "
        f"bytes), which {where} needs whatever is offloaded or recomputed; found "
        f"{format_bytes(budget_bytes)}. Plain Inductor takes {format_bytes(baseline_bytes)}{checkpointing}. "
        f"{basis}. Raise the budget, or make the batch smaller",
        least,
        where,
        baseline_bytes,
        checkpointing_bytes,
    )


def schedule_of_first_step(scheduler: Scheduler, limit_bytes: int) -> Schedule:
    """Meet the budget also in the step in which kernels are tuned; compute waits more.

    Where possible, meet it also if the caller holds the outputs or sends gradients through them.

    Args:
        scheduler: of a step whose outputs are let go of.
    """
    held = scheduler.with_step(scheduler.step.with_outputs_held(), scheduler.host_bytes)
    return held.least_time(limit_bytes) or scheduler.least_time(limit_bytes) or scheduler.smallest()


def _simulation(found: Try) -> Simulation:
    assert found.schedule is not None
    return found.schedule.simulation
