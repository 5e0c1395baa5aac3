"""Lets a compiled graph be part of a plan for the whole step, or says why it is none."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler import told
from fxoffload.compiler.chain_graphs import GraphDescription
from fxoffload.compiler.plan_chain import plan_chain
from fxoffload.errors import in_brief
from fxoffload.plan_report.registry import PlanBox
from fxoffload.planner.windows import no_windows
from fxoffload.runtime.tracker.own_plan import OwnPlan
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.step.choice import Choice
from fxoffload.step.edges import Edges

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMember:
    """A graph of a step.

    Attributes:
        graph: as compiled.
        tracked: the same, in steps.
        budget_bytes: the user's; None: there is none.
        own: its plan, if it has one for itself.
        own_budget_bytes: that ``own`` was made for; 0: none.
        observes: whether steps are observed from the first one on, although there is ``own``.
    """

    graph: CompiledGraph
    tracked: TrackedGraph
    budget_bytes: int | None
    own: PlanBox | None
    own_budget_bytes: int
    observes: bool = False

    def _keep_own_plan(self, own: PlanBox, join: Callable[[], None] | str) -> None:
        self.tracked.own_plan = OwnPlan(own.plan.predicted.peak_bytes, self.own_budget_bytes, join)

    def stay_out(self, reason: str) -> None:
        """It is part of no such plan. The user is told where a budget was promised and the graph runs with others."""
        if self.own is None:
            told.no_common_plan(self.budget_bytes, reason)
        elif self.budget_bytes is not None:
            self._keep_own_plan(self.own, reason)

    def fail(self, error: Exception) -> None:
        """It could not be described."""
        is_no_loss = self.own is not None and self.budget_bytes is None
        log.log(
            logging.INFO if is_no_loss else logging.WARNING,
            "a graph runs without a part in a plan over several graphs: %s",
            in_brief(error),
        )
        self.stay_out(str(error))

    def join(self, description: GraphDescription, edges: Edges) -> None:
        """It is part of the step's plan: at once, or with a plan of its own when a step runs it with others."""
        self.tracked.sizes = None if description.sized is None else description.sized.sizes
        if self.own is not None:
            self.tracked.edges = edges
            self._keep_own_plan(self.own, functools.partial(self._join, description, edges))
            if self.observes:
                self._observe(description, edges)
            return
        self._join(description, edges)
        # Until a plan is there: the least that offloading takes, so that the first steps fit too if they can. It is
        # also what says how much of the device is not the graphs': nothing is under way when a call begins.
        self.tracked.at_first = Choice(self.graph.actions["auto"], no_windows(description.step))

    def _join(self, description: GraphDescription, edges: Edges) -> None:
        self._observe(description, edges)
        self.tracked.control = None

    def _observe(self, description: GraphDescription, edges: Edges) -> None:
        tracked = self.tracked
        tracked.description, tracked.edges = description, edges
        tracked.planner = plan_chain
        tracked.may_follow, tracked.may_keep = self.graph.may_follow, self.graph.may_keep
        if self.budget_bytes is not None:
            tracked.gives_up = functools.partial(told.irregular_steps, self.budget_bytes)
        elif description.is_checkpointed and self.own is None:
            tracked.gives_up = told.checkpointing_stays
