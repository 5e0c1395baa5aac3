"""Has steps over several calls planned, and their plans made ready.

On a GPU a plan is made on a thread of its own. Steps go on with the graphs as they are compiled. Under a budget of the
user's they wait for a plan that meets it: with those graphs, or else with variants. Variants that are not compiled by
then are compiled before the first step that follows the plan.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fxoffload.errors import in_brief
from fxoffload.progress import working
from fxoffload.runtime import background
from fxoffload.runtime.tracker.chains import ChainPlan, Known, Seen, SizedChain, Sizes, why_not_ready
from fxoffload.runtime.tracker.running_step import RunningStep
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.runtime.transactions import Latch
from fxoffload.tell import warn

log = logging.getLogger(__name__)


class PlanMaker:
    """Of one device. Plans are begun and taken under the lock of ``StepTracker``, and made ready without it.

    Args:
        begins_at: whether a step that may follow a plan begins with the call of a graph that begins now.

    Attributes:
        in_background: whether plans are made on a thread of its own.
        thread: the latest of those; None: there was none.
    """

    def __init__(self, begins_at: Callable[[TrackedGraph], bool], *, in_background: bool) -> None:
        self.in_background = in_background
        self.thread: threading.Thread | None = None
        self._begins_at = begins_at

    # -- to be made ----------------------------------------------------------------------------------------------------

    def observed(self, first: TrackedGraph, step: RunningStep) -> None:
        """A step that began at ``first`` was observed. Two that are alike are planned."""
        chains = first.chains
        record = step.record if step.is_regular else None
        before, chains.before = chains.before, record
        if before is None or record is None or not before.same_chain(record):
            return
        merged = before.merged(record)
        if merged is None:
            return
        chains.before = None
        chains.known = Known(record.tracked_graphs, merged, [before.sizes, record.sizes])
        chains.known.measured(step.sizes, record.live, record.sizes)
        self.plan_if_due(first, chains.at(step.sizes))

    def plan_if_due(self, first: TrackedGraph, chain: SizedChain) -> None:
        """Make a plan for a chain that begins at ``first``, if it needs one, and is known."""
        if not first.is_held_alone and first.chains.may_plan(chain):
            self.plan(first, chain)

    def measured(self, first: TrackedGraph, chain: SizedChain, step: RunningStep) -> None:
        """A step of ``chain`` ran: plan its sizes, if it was measured for that."""
        known = step.known
        if known is None or first.chains.known is not known:
            return
        known.measured(chain.sizes, step.live_bytes, step.graphs_and_sizes()[1])
        self.plan_if_due(first, chain)

    def plan(self, first: TrackedGraph, chain: SizedChain) -> None:
        """Make a plan for a chain that begins at ``first``, from its recordings."""
        known = first.chains.known
        assert known is not None
        tracked_graphs = [tracked for ref in known.tracked_graphs if (tracked := ref()) is not None]
        if len(tracked_graphs) < len(known.tracked_graphs):
            first.chains.forget_known()  # it was compiled anew
            return
        first.chains.begin_planning(chain)
        seen = replace(known.seen_at(chain.sizes), margin_bytes=chain.margin_bytes, between=first.chains.between)
        args = (tracked_graphs, chain, seen, known.sizes_at(chain.sizes))
        if self.in_background:
            if first.has_budget and chain.meanwhile is None:
                first.chains.await_plan(chain)
            try:
                self.thread = background.start_planning(self._make, *args, name="fxoffload-chain-plan")
            except RuntimeError:  # the process may have no more threads
                first.chains.end_planning(chain, None)
                raise
        else:
            self._make(*args)

    def _make(
        self, tracked_graphs: Sequence[TrackedGraph], chain: SizedChain, seen: Seen, sizes: Sequence[Sizes]
    ) -> None:
        first, plan = tracked_graphs[0], None
        assert first.planner is not None

        def meanwhile(plan: ChainPlan) -> None:
            chain.meanwhile = chain.meanwhile or plan
            first.chains.go_on(chain)
            background.check()

        try:
            with working(f"planning a step of {len(tracked_graphs)} compiled graphs", in_background=self.in_background):
                plan = first.planner(tracked_graphs, seen, sizes, meanwhile if self.in_background else None)
        except Exception as error:
            if background.is_ending():
                return
            background.warn(
                f"fxoffload could not plan a step of {len(tracked_graphs)} compiled graphs and goes on without a plan: "
                f"{in_brief(error)}"
            )
        finally:
            first.chains.end_planning(chain, plan)

    # -- to be ready ---------------------------------------------------------------------------------------------------

    def awaited(self, tracked: TrackedGraph, args: Sequence[Any]) -> Latch | None:
        """What the step that begins at ``tracked`` has to wait for; None: nothing, or no step begins."""
        chains = tracked.chains
        chain = chains.get(tracked.planned_sizes(args))
        awaited = None if chain is None else chain.awaited
        if awaited is None or not self._begins_at(tracked):
            return None
        # A step may follow the plan for larger sizes, which meets the budget.
        return None if chains.larger(tracked.sizes_of(args)) is not None else awaited

    def prepare(self, tracked: TrackedGraph, args: Sequence[Any]) -> None:
        """Get the plans of ``tracked`` ready to be followed, where a step begins. May take minutes.

        Where sizes vary, plans for other sizes too: they run the same variants, which are compiled once, and a size
        may be long in coming back.
        """
        chains = tracked.chains
        if not chains.may_prepare:
            return
        chains.may_prepare = False  # before reading plans: another one may be made meanwhile
        mine = chains.get(tracked.planned_sizes(args))
        others = [c for c in chains.all if c is not mine]
        is_done = False
        try:
            is_done = all(self._make_ready(tracked, chain) for chain in (mine, *others) if chain is not None)
        finally:
            if not is_done or any(chain.awaited is not None for chain in chains.all):
                chains.may_prepare = True

    def _make_ready(self, tracked: TrackedGraph, chain: SizedChain) -> bool:
        """Returns whether there may be more to make ready: a step begins here."""
        while (plan := chain.plan) is not None and plan.prepare is not None:
            if not self._begins_at(tracked):
                return False
            with plan.lock:
                prepare = plan.prepare
                if prepare is None:
                    continue  # another thread was here first
                try:
                    prepare()
                except Exception as error:
                    warn(why_not_ready(plan, error))
                    if chain.plan is plan:
                        tracked.chains.take(chain, None if plan.otherwise is None else plan.otherwise())
                plan.prepare = plan.otherwise = None
                if chain.plan is plan:
                    chain.meanwhile = None
        return True
