"""Holds steps to the budget that they were planned for: each is judged when it is over, and its plan corrected.

When steps exceed a plan over several graphs, it is made anew (``Chains.correct``). One step runs as the first ones did
and is measured; the part of the excess that it does not explain is left free. Until the new plan is there, steps make
the choices of the least peak. A graph with a plan of its own is corrected by its ``BudgetControl``; several of them in
one step are planned together from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fxoffload.runtime.profiler.allocator_history import AllocatorHistory
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.profiler.step_peak import PeakWatch
from fxoffload.runtime.tracker.budget_loop import BudgetLoop
from fxoffload.runtime.tracker.chains import FALLEN_STEPS, ChainPlan, SizedChain
from fxoffload.runtime.tracker.own_plan import OwnPlan
from fxoffload.runtime.tracker.running_step import RunningStep
from fxoffload.runtime.tracker.step_state import StepState
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.sizes import format_bytes
from fxoffload.tell import warn

log = logging.getLogger(__name__)

# After a plan was made anew because steps allocate far less, the next time takes this many times more such steps.
_FALLEN_FACTOR = 8
_NEVER = 1 << 62


class HoldToBudget:
    """Watches the steps of one device. Not thread-safe: ``StepTracker`` has a lock.

    Args:
        memory: reads the allocator.
        history: begins a record of the allocator's events; None, or none of it, where there is none.
    """

    def __init__(self, memory: Callable[[], Memory], history: Callable[[], AllocatorHistory | None] | None) -> None:
        self._memory = memory
        self._history = history
        self._plain: tuple[OwnPlan, PeakWatch] | None = None

    def begin(self, first: TrackedGraph, chain: SizedChain, step: RunningStep, args: Sequence[Any]) -> None:
        """A step begins at ``first``; ``args``: of that call."""
        loop = _loop_of(first, chain, step) if step.sizes == chain.sizes else None
        if loop is None:
            return
        history = None if step.recording is None else step.recording.history
        is_shared = history is not None
        if history is None and loop.records_next and first.may_record and self._history is not None:
            history = self._history()
        left, others, memory = 0, 0, self._memory()
        if step.began is StepState.FOLLOWING and (known := first.chains.known) is not None:
            seen = known.seen_at(chain.sizes)
            others = seen.others_bytes - seen.carried_bytes
            left = seen.left_bytes if not chain.sizes or chain.sizes in known.seen_first else 0
        step.peak_watch = PeakWatch(
            memory,
            args,
            left_bytes=left,
            others_bytes=others,
            carried_bytes=loop.carried_bytes(memory.allocated),
            history=history,
            owns_history=not is_shared,
        )

    @staticmethod
    def forward_begins(step: RunningStep) -> None:
        """One after the first."""
        if step.peak_watch is not None:
            step.peak_watch.forward_begins()

    def forward_ended(self, step: RunningStep) -> None:
        """One of them."""
        if step.peak_watch is not None and step.peak_watch.is_recorded:
            step.peak_watch.forward_ended(self._memory())

    def first_backward_begins(self, step: RunningStep) -> None:
        """The forwards before it have ended."""
        if step.peak_watch is not None:
            step.peak_watch.first_backward_begins(self._memory())

    def end(self, step: RunningStep) -> None:
        """The last call of a step that went as expected has returned."""
        first = step.calls[0].tracked()
        chain = None if first is None else first.chains.get(step.sizes)
        if step.peak_watch is None or first is None or chain is None:
            return
        if (loop := _loop_of(first, chain, step)) is not None:
            step.peak, step.judged_by = step.peak_watch.end(self._memory(), loop.is_open), loop

    def judge(self, first: TrackedGraph, chain: SizedChain, step: RunningStep) -> None:
        """That step is over."""
        loop, peak, watch = _loop_of(first, chain, step), step.peak, step.peak_watch
        if loop is None or peak is None or watch is None or loop is not step.judged_by:
            return  # another plan is followed by now
        excess = loop.ended(peak, is_recorded=watch.is_recorded)
        if excess:
            log.info("a step took %s more than its budget", format_bytes(excess))
            self._correct(first, chain, step, loop, excess)
            return
        if not loop.records_next:
            chain.num_corrections = 0
        # Where sizes vary, so do the allocations of steps.
        if loop.num_fallen < chain.fallen_steps or first.sizes is not None:
            return
        if chain.plan is None and not peak.is_exact and loop.asks():
            return
        loop.num_fallen, chain.fallen_steps = 0, chain.fallen_steps * _FALLEN_FACTOR
        if chain.plan is None:
            if first.control is not None and len(step.calls) == 1:
                first.control.fallen(peak.least)
        elif chain.plan.costs_time:
            log.info("steps allocate far less than they did: their plan is made again")
            first.chains.correct(chain, chain.plan, 0)

    # -- graphs that are plain Inductor's ------------------------------------------------------------------------------

    def plain_begins(self, graph: OwnPlan) -> None:
        """The forward of one, while no other step runs."""
        self.drop_plain()
        loop = graph.loop
        if loop.num_skipped:
            loop.num_skipped -= 1
        elif not graph.has_exceeded:
            history = self._history() if loop.records_next and self._history is not None else None
            self._plain = graph, PeakWatch(self._memory(), history=history)

    def plain_ended(self, graph: OwnPlan) -> None:
        """Its backward has returned."""
        found, self._plain = self._plain, None
        if found is None or found[0] is not graph:
            return
        peak = found[1].end(self._memory(), graph.loop.is_open)
        if graph.loop.ended(peak, is_recorded=found[1].is_recorded):
            graph.exceeded(peak.least)

    def drop_plain(self) -> None:
        """Something else runs before its backward has returned."""
        found, self._plain = self._plain, None
        if found is not None:
            found[1].drop()

    @staticmethod
    def _correct(first: TrackedGraph, chain: SizedChain, step: RunningStep, loop: BudgetLoop, excess: int) -> None:
        plan = chain.plan
        if chain.fallen_steps > FALLEN_STEPS:
            chain.fallen_steps = _NEVER  # the memory that went away comes back
        if plan is None and len(step.calls) > 1:
            for call in step.calls:
                if (tracked := call.tracked()) is not None and tracked.own_plan is not None:
                    tracked.own_plan.together()
        elif plan is None:
            assert first.control is not None
            chain.num_corrections += 1
            is_observed = step.record is not None and first.chains.known is not None
            first.control.exceeded(excess, chain.num_corrections, is_observed=is_observed)
            if first.control is None and step.record is None:
                first.chains.observe_anew()
        elif not first.chains.correct(chain, plan, excess) and not first.chains.is_planning:
            _give_up(chain, plan, loop)


def _loop_of(first: TrackedGraph, chain: SizedChain, step: RunningStep) -> BudgetLoop | None:
    """The budget loop that judges a step that begins, or began, at ``first``; None: nothing does."""
    if step.began is StepState.FOLLOWING:
        plan = None if step.followed is None else step.followed()
        return None if plan is None or chain.plan is not plan else chain.loop_of(plan)
    return None if first.control is None else first.control.loop


def _give_up(chain: SizedChain, plan: ChainPlan, loop: BudgetLoop) -> None:
    """Warn, once: from here on it is not held to its budget."""
    chain.plan = replace(plan, is_least=True)
    warn(
        f"expected steps of {len(plan.tracked_graphs)} calls of compiled graphs within the activation_budget of "
        f"{format_bytes(loop.budget_bytes)}, found one that took {format_bytes(loop.peak_bytes)}, after "
        f"{chain.num_corrections} corrections of its plan. activation_budget={loop.peak_bytes} would be met as it is; "
        "or make the batch smaller",
    )
