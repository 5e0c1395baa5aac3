"""Plans once more, with measured times: the rules that graphs and chains of graphs share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from fxoffload.compiler.explain import floors_of
from fxoffload.compiler.graph_budget import GraphBudget
from fxoffload.plan_report.registry import PlanBox
from fxoffload.plan_report.summary import aim_of
from fxoffload.planner.frontier import in_measured_time
from fxoffload.planner.objective import Objective
from fxoffload.planner.plan import Basis, Decision, Prediction
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import TrainingStep
from fxoffload.runtime import background
from fxoffload.runtime.tracker.chains import PlanObserver
from fxoffload.sizes import format_bytes
from fxoffload.step.readings import Readings

log = logging.getLogger(__name__)

# A new schedule has to be better by this part of the step, or of the peak, to replace the one that runs.
_BETTER = 0.003
# A step this much slower than predicted hides more copies: the estimates leave something out, such as collectives
# between machines or unknown kernels. Estimates of known kernels were between 0.97 and 1.25 of the measured times:
# they cause no new pinning.
_FAR_LONGER = 1.5
# Pinning more host memory has to gain this part of the peak.
_WORTH_PINNING = 0.05


class Recalibration(ABC):
    """Replaces a plan's schedule with one from measured times, where that is better.

    Args:
        schedule: that runs.
        scheduler: that it was made with.
        box: where the plan is shown.
        objective: of the plan.
        limit_bytes: the part of the objective's budget that the schedule may take; None: all of it, or there is no
            budget.

    Attributes:
        scheduler: with measured times, once there are some.
        exceeded: whether the schedule that ran takes more than the limit, with measured times.
        far_longer: whether steps take far longer than predicted, so that far more may move.
        control: holds a graph to its budget; None: nothing does.
        observer: of the plan; set by it.
    """

    def __init__(
        self,
        schedule: Schedule,
        scheduler: Scheduler,
        box: PlanBox,
        objective: Objective,
        limit_bytes: int | None = None,
    ) -> None:
        self._schedule = schedule
        self._scheduler = scheduler
        self._box = box
        self._objective = objective
        self._limit = objective.budget_bytes if limit_bytes is None else limit_bytes
        self.exceeded = self.far_longer = False
        self.scheduler = scheduler
        self.control: GraphBudget | None = None
        self.observer: Callable[[], PlanObserver | None] = lambda: None

    @abstractmethod
    def measured(self, readings: Readings) -> tuple[TrainingStep, Prediction]:
        """The step with measured times and working sets, and plain Inductor's prediction."""

    def rates(self, step: TrainingStep, readings: Readings) -> ProfileRates:
        """Of the machine, corrected by measurements of ``step``; as before, unless a subclass knows better."""
        return self._scheduler.rates

    @abstractmethod
    def pin(self, found: Schedule, now: Schedule) -> bool:
        """Have host memory ready for what ``found`` moves beyond ``now``, and return when it is: whether it is."""

    @abstractmethod
    def summary_of(self, found: Schedule, baseline: Prediction) -> str:
        """The plan's summary where ``found`` is followed; both are in measured time."""

    @abstractmethod
    def follow(self, found: Schedule) -> None:
        """From the next forward on ``found`` is followed."""

    def follow_first(self, found: Schedule) -> None:
        """In the first step ``found`` is followed. Values that have no room on the host stay."""
        if found.simulation.bytes_offloaded > self._schedule.simulation.bytes_offloaded:
            self.pin(found, self._schedule)
        self.follow(found)

    @abstractmethod
    def decisions(self, now: Schedule) -> tuple[Decision, ...] | None:
        """The decisions to show; None: as before."""

    @abstractmethod
    def settle(self, now: Schedule) -> None:
        """From now on steps follow ``now``, which is in measured time."""

    @property
    def spare_bytes(self) -> int:
        """The part of the limit that a new schedule leaves to the program. One that takes it does not exceed the
        limit."""
        return 0

    @property
    def expected_ms(self) -> float:
        """Estimated milliseconds of plain Inductor's step, on which the decisions rest."""
        return self._box.plan.baseline.step_ms

    @property
    def step(self) -> TrainingStep:
        """The step that is scheduled, with the latest times and working sets."""
        return self._scheduler.step

    def plan_first(self, readings: Readings, basis: Basis, limit_bytes: int | None) -> Scheduler:
        """``recalibrate`` before any step ran, with segments that ran on made-up inputs: the plan's predictions change.

        Args:
            readings: of the segments.
            basis: of the plan's predictions.
            limit_bytes: the part of the objective's budget that the schedule may take now.

        Returns:
            The scheduler of the step with these readings.
        """
        whole, self._limit = self._limit, limit_bytes
        try:
            now, baseline, self._scheduler = self._plan(readings, before_first_step=True)
        finally:
            self._limit = whole
        self._schedule = now
        predicted, plan = Prediction.of(now.simulation), self._box.plan
        frontier = in_measured_time(plan, predicted, baseline)
        is_smallest = bool(plan.frontier) and plan.frontier[0].budget_bytes <= plan.smallest_budget_bytes
        self._box.update(
            predicted=predicted,
            baseline=baseline,
            frontier=frontier,
            smallest_budget_bytes=frontier[0].budget_bytes if is_smallest else plan.smallest_budget_bytes,
            floors=tuple(floors_of(self.step, now.simulation)),
            simulation=now.simulation,
            basis=basis,
        )
        return self._scheduler

    def recalibrate(self, readings: Readings) -> None:
        """From the next forward on the new schedule is followed, where that is better."""
        now, baseline, _ = self._plan(readings)
        self._box.update(
            calibrated=Prediction.of(now.simulation), calibrated_baseline=baseline, simulation=now.simulation
        )

    def _plan(self, readings: Readings, *, before_first_step: bool = False) -> tuple[Schedule, Prediction, Scheduler]:
        """The schedule to follow, plain Inductor's step, and the scheduler, all with these readings."""
        step, baseline = self.measured(readings)
        rates, limit = self.rates(step, readings), self._limit
        offload, windows = self._schedule.offload, self._schedule.windows
        now = Schedule(offload, windows, simulate(step, offload, copies=rates, windows=windows))
        # Move no more than is pinned already, unless the budget is exceeded or the estimates were far off.
        self.exceeded = limit is not None and now.simulation.peak_bytes > limit
        self.far_longer = baseline.step_ms > _FAR_LONGER * self.expected_ms
        anew = self.exceeded or self.far_longer or before_first_step
        host_bytes = self._scheduler.host_bytes if anew else now.simulation.bytes_offloaded
        scheduler = self.scheduler = self._scheduler.with_step(step, host_bytes, rates)
        # Others say that everything is kept, or that nothing fits: that stays true.
        states_gain = aim_of(self._objective) in self._box.plan.summary
        found = self._aim(scheduler, baseline)
        if found is not None and self._is_better(found, now, baseline) and self._has_room(found, now):
            log.info(
                "planned again with measured times: %.1f -> %.1f ms", now.simulation.step_ms, found.simulation.step_ms
            )
            now, states_gain = found, True
            self.follow(found)
        self.settle(now)
        if states_gain:
            self._box.update(summary=self.summary_of(now, baseline))
        self._warn_of_the_budget(now)
        decisions = self.decisions(now)
        if decisions is not None:
            self._box.update(decisions=decisions)
        return now, baseline, scheduler

    def _warn_of_the_budget(self, now: Schedule) -> None:
        budget, limit = self._objective.budget_bytes, self._limit
        if budget is None or limit is None or now.simulation.peak_bytes <= limit or self._objective.is_checkpointing:
            return
        if self._schedule.simulation.peak_bytes > limit:
            return  # that was known, and said, when it was planned
        self.warn(
            f"by what was measured, the plan takes {format_bytes(now.simulation.peak_bytes + budget - limit)}, more "
            f"than the activation_budget of {format_bytes(budget)}, and no other choice of what to keep fits; raise it"
        )

    def warn(self, message: str) -> None:
        """The budget cannot be met."""
        background.warn(message)

    def _aim(self, scheduler: Scheduler, baseline: Prediction) -> Schedule | None:
        if self._limit is not None:
            found = scheduler.least_time(self._limit - self.spare_bytes)
            return scheduler.least_time(self._limit) if found is None and self.spare_bytes else found
        assert self._objective.max_slowdown is not None
        found = scheduler.least_peak(self._objective.most_ms(baseline.step_ms))
        # The compiled graphs alone may take longer than that, whatever moves. Then what moves costs nothing more.
        return found or scheduler.least_peak_without_waits()

    def _is_better(self, found: Schedule, now: Schedule, baseline: Prediction) -> bool:
        mine, other = now.simulation, found.simulation
        if self._limit is not None:
            return mine.peak_bytes > self._limit or other.step_ms < mine.step_ms * (1 - _BETTER)
        too_slow = mine.step_ms > self._objective.most_ms(baseline.step_ms) + _BETTER * baseline.step_ms
        part = _WORTH_PINNING if other.bytes_offloaded > mine.bytes_offloaded else _BETTER
        return too_slow or other.peak_bytes < mine.peak_bytes * (1 - part)

    def _has_room(self, found: Schedule, now: Schedule) -> bool:
        """Whether the host has room for ``found``. Where the budget is exceeded, the room that there is must do."""
        more = found.simulation.bytes_offloaded > now.simulation.bytes_offloaded
        return not more or self.pin(found, now) or self.exceeded
