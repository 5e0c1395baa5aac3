"""Holds a graph with a plan of its own to its budget: it leaves free, from then on, the bytes that a step exceeded.

A plan is exceeded by eager code around the graph (a loss, hooks), or by a working set larger than its estimate. The
place in the step is unknown, so the excess counts in every segment. Keep, offload and windows are recomputed; nothing
is compiled. Until that is done, everything is offloaded, with nothing in flight while a segment computes.

Eager code around a graph that does not return its loss takes at least the bytes of its logits. The graph's
recomputation was chosen without them. So where its sizes are fixed, it is planned anew as a step of one call, with that
code, and with variants.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler.explain import with_actions
from fxoffload.compiler.schedule_by_size import ScheduleBySize
from fxoffload.errors import in_brief
from fxoffload.plan_report.registry import PlanBox
from fxoffload.plan_report.summary import aim_of, gain_of
from fxoffload.planner.objective import Objective
from fxoffload.planner.plan import Prediction
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import SegmentStep, TrainingStep
from fxoffload.runtime import background
from fxoffload.runtime.tracker.budget_loop import MOST_CORRECTIONS, BudgetLoop
from fxoffload.sizes import format_bytes
from fxoffload.step.choice import Choice

log = logging.getLogger(__name__)

# Part of the budget that a correction leaves free besides: another schedule is off by a little more or less.
_SPARE = 1 / 256


@dataclass(frozen=True)
class PlannedGraph:
    """A graph and its plan.

    Attributes:
        order: positions in the step's candidates of the graph's candidates.
        least: the choice until a correction is there.
        by_size: schedules calls of other sizes; None: sizes are fixed.
        pin: prepares that many more bytes of host memory, and says whether they are ready.
        plan_as_step: has a graph without a loss planned as a step of one call; False: it is not to be.
    """

    graph: CompiledGraph
    box: PlanBox
    objective: Objective
    order: Sequence[int]
    least: Choice
    by_size: ScheduleBySize | None = None
    pin: Callable[[int], bool] = lambda more: True
    plan_as_step: Callable[[], bool] = lambda: False


class GraphBudget:
    """See ``fxoffload.runtime.tracker.budget_loop.BudgetControl``.

    Args:
        in_background: whether to plan on a thread of its own.

    Attributes:
        margin_bytes: that are left free by now.
    """

    def __init__(
        self, planned: PlannedGraph, scheduler: Scheduler, schedule: Schedule, *, in_background: bool = True
    ) -> None:
        assert planned.objective.budget_bytes is not None
        self.margin_bytes = 0
        self._planned = planned
        self._budget: int = planned.objective.budget_bytes
        self._scheduler, self._schedule = scheduler, schedule
        self._spare_bytes, self._num_spare = int(_SPARE * self._budget), 0
        self._in_background = in_background
        self._lock = threading.Lock()
        # That of the first plan; a calibrated scheduler has no more than is pinned by then.
        self._host_bytes = scheduler.host_bytes
        self._open_bytes = 0  # the part of the margin that the scheduler does not know of yet
        self._told_bytes = 0  # the part of the margin that the scheduler was told of last
        self._has_said = False
        self._is_least = False
        self._followed: Choice | None = None
        self._loop = BudgetLoop(self._budget)
        self._first: tuple[Choice, Schedule] | None = None
        self._judges_first = False
        self._exceeded: list[tuple[Schedule, int]] = []  # exceeded schedules, with the peaks of their steps

    @property
    def loop(self) -> BudgetLoop | None:
        """See ``BudgetControl``."""
        graph, planned = self._planned.graph, self._planned
        now = graph.planned
        if not graph.may_follow() or now is None or now is planned.least:
            return None
        if self._first is not None and now is self._first[0] and not self._judges_first:
            return None
        if now is not self._followed:
            self._followed, self._loop = now, BudgetLoop(self._budget, is_exceeded=self._is_least)
        return self._loop

    def with_margin(self, step: TrainingStep) -> TrainingStep:
        """``step``, which was measured, with the margin left free. Of the bytes of steps that exceeded the budget, the
        margin keeps those that the measurements do not explain."""
        # Of other sizes nothing was measured.
        exceeded = [] if self._planned.by_size is not None else list(self._exceeded)
        unexplained = max((peak - self._peak_of(step, ran) for ran, peak in exceeded), default=0)
        with self._lock:
            if exceeded and len(exceeded) == len(self._exceeded):
                self.margin_bytes = min(self.margin_bytes, max(unexplained, 0) + self._spare_bytes)
            self._told_bytes = self.margin_bytes
            return _raised(step, self.margin_bytes)

    def _peak_of(self, step: TrainingStep, ran: Schedule) -> int:
        return simulate(step, ran.offload, copies=self._scheduler.rates, windows=ran.windows).peak_bytes

    def baseline_with_margin(self, baseline: Prediction) -> Prediction:
        """Plain Inductor's step with the margin."""
        return _with_outside(baseline, self.margin_bytes)

    def first_step(self, choice: Choice, schedule: Schedule) -> None:
        """The first step, in which kernels are tuned, makes ``choice``: it is not judged."""
        self._first = choice, schedule

    def first_step_ended(self) -> None:
        """Steps that go on making that choice are judged."""
        self._judges_first = True

    @property
    def schedule(self) -> Schedule:
        """The schedule that the graph follows once the first step is over, or the correction there."""
        return self._schedule

    def calibrated(self, scheduler: Scheduler, schedule: Schedule) -> None:
        """The graph follows another schedule. ``scheduler``: knows of the margin."""
        with self._lock:
            self._scheduler, self._schedule = scheduler, schedule
            self._open_bytes = self.margin_bytes - self._told_bytes

    def exceeded(self, excess_bytes: int, num_corrections: int, *, is_observed: bool = False) -> None:
        """See ``BudgetControl``."""
        if self._planned.plan_as_step():
            if not is_observed:
                self._planned.graph.planned = self._planned.least
            return
        # Not what a first plan may take: what libraries allocate in the first step was there before the others began.
        ran = self._ran.simulation.peak_bytes
        is_least = ran > self._budget
        if is_least or num_corrections > MOST_CORRECTIONS:
            self._say_that_none_fits(self._loop.peak_bytes)
            return
        with self._lock:
            self._exceeded.append((self._ran, self._budget + excess_bytes))
            # The prediction may have left part of the budget unused: the step took that as well.
            error = excess_bytes + max(self._budget - ran, 0) + self._spare_bytes
            self.margin_bytes += error
            self._open_bytes += error
            self._num_spare += 1
        if self._planned.by_size is not None:
            self._planned.by_size.leave(self.margin_bytes)
        self._planned.graph.planned = self._planned.least
        self._start()

    @property
    def _ran(self) -> Schedule:
        """The schedule of the steps that are judged."""
        is_first = self._first is not None and self._planned.graph.planned is self._first[0]
        return self._first[1] if self._first is not None and is_first else self._schedule

    def fallen(self, peak_bytes: int) -> None:
        """See ``BudgetControl``. Where sizes vary, so do the steps' allocations: they say nothing."""
        if self._planned.by_size is not None or not self.margin_bytes:
            return
        with self._lock:
            # The excess of these steps over their prediction is still taken.
            needed = peak_bytes - (self._ran.simulation.peak_bytes - self.margin_bytes) + self._spare_bytes
            more = min(max(needed, 0), self.margin_bytes) - self.margin_bytes
            self._open_bytes += more
            self.margin_bytes += more
            self._num_spare = 1
        self._start()

    def _start(self) -> None:
        if self._in_background:
            background.start_planning(self._correct, name="fxoffload-replan")
        else:
            self._correct()

    def _correct(self) -> None:
        try:
            self._follow(self._corrected())
        except Exception as error:
            if background.is_ending():
                return
            background.warn(
                "fxoffload could not plan again a step that exceeds its budget, and goes on with the least memory: "
                f"{in_brief(error)}"
            )

    def _corrected(self) -> Schedule:
        with self._lock:
            step = _raised(self._scheduler.step, self._open_bytes)
            self._open_bytes = 0
        scheduler = self._scheduler = self._scheduler.with_step(step, self._host_bytes)
        found = scheduler.least_time(self._budget)
        if found is None:
            # No schedule leaves the spare part of the budget free: one that does not leave it free may do.
            found = scheduler.least_time(self._budget + self._num_spare * self._spare_bytes)
        self._is_least = found is None
        if found is None:
            found = scheduler.smallest()
            self._say_that_none_fits(found.simulation.peak_bytes)
        return found

    def _follow(self, found: Schedule) -> None:
        planned, box, before = self._planned, self._planned.box, self._schedule
        more = found.simulation.bytes_offloaded - before.simulation.bytes_offloaded
        if more > 0:
            planned.pin(more)  # where there is less room, values that find none stay
        self._schedule = found
        planned.graph.planned = Choice(tuple(found.offload[i] for i in planned.order), found.windows)
        plan = box.plan
        baseline = plan.calibrated_baseline or plan.baseline
        baseline = _with_outside(baseline, self.margin_bytes - baseline.outside_bytes)
        corrected = f", corrected by {format_bytes(self.margin_bytes)} that steps took beyond it"
        summary = f"{aim_of(planned.objective)}{corrected if self.margin_bytes else ''}: "
        offload = dict(zip((c.name for c in self._scheduler.step.candidates), found.offload, strict=True))
        box.update(
            calibrated=Prediction.of(found.simulation),
            calibrated_baseline=baseline,
            simulation=found.simulation,
            decisions=with_actions(plan.decisions, offload, self._scheduler.step, found.simulation),
            summary=summary + gain_of(found.simulation, baseline),
        )

    def _say_that_none_fits(self, least_bytes: int) -> None:
        """Once. From here on no step is found to exceed the budget."""
        has_said, self._has_said = self._has_said, True
        self._is_least, self._followed = True, None
        if not has_said:
            background.warn(
                f"expected steps within the activation_budget of {format_bytes(self._budget)}, found that the compiled "
                f"graph and what runs around it take at least {format_bytes(least_bytes)}; steps take the least that "
                f"was found. activation_budget={least_bytes} can be met; or make the batch smaller"
            )


def _raised(step: TrainingStep, nbytes: int) -> TrainingStep:
    def more(segments: Iterable[SegmentStep]) -> tuple[SegmentStep, ...]:
        return tuple(
            replace(s, temp_bytes=s.temp_bytes + nbytes, outside_bytes=s.outside_bytes + nbytes) for s in segments
        )

    return replace(step, forward=more(step.forward), backward=more(step.backward))


def _with_outside(found: Prediction, nbytes: int) -> Prediction:
    return replace(
        found,
        peak_bytes=found.peak_bytes + nbytes,
        peak_without_gradients_bytes=found.peak_without_gradients_bytes + nbytes,
        outside_bytes=found.outside_bytes + nbytes,
    )
