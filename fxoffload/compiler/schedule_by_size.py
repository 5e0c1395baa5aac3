"""What moves when, for calls of other sizes than the one that was planned for.

The recompute choice is compiled in; keep, offload and windows follow the size of each call. Sizes are rounded up to a
coarse grid, and a schedule is worked out when a size of the grid comes for the first time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxoffload.compiler.batch_sizes import BatchSizes, Sizes
from fxoffload.compiler.partitioning import PartitionSettings
from fxoffload.compiler.planning import TUNING_BYTES, GraphPlanning
from fxoffload.planner.objective import Objective
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.steps import TrainingStep
from fxoffload.planner.windows import least_peak_bytes
from fxoffload.sizes import format_bytes
from fxoffload.step.choice import Choice
from fxoffload.tell import warn

log = logging.getLogger(__name__)

# By this part of plain Inductor's time a larger call may be slower than the planned one, before it gets a variant.
_CLEARLY_SLOWER = 0.05
# Where nothing was worth doing, it may be for a call that takes this many times the memory.
_PLAIN_RANGE = 4
# Most sizes that keep their schedule. Those of the grid are few. A size has a schedule of its own if the next one on
# the grid does not fit into the budget.
_MOST_CHOICES = 256


@dataclass(frozen=True)
class SizedPlan:
    """A plan, asked for other sizes.

    Attributes:
        planned: for the sizes that were compiled for.
        limit_bytes: the budget as the scheduler has it, at the planned sizes; None without one.
    """

    sizes: BatchSizes
    planned: GraphPlanning
    settings: PartitionSettings
    objective: Objective
    limit_bytes: int | None

    def schedule(self, sizes: Sizes, *, spare_bytes: int = 0) -> Schedule | None:
        """The best schedule for a call of these sizes; None where it does not fit into the budget. ``spare_bytes``: of
        the budget, left alone."""
        scheduler = self._scheduler(sizes)
        if (limit := self.limit_at(sizes)) is not None:
            return scheduler.least_time(limit - spare_bytes)
        assert self.objective.max_slowdown is not None
        found = scheduler.least_peak(self.objective.most_ms(self._plain(sizes).compute_ms))
        return found or scheduler.least_peak_without_waits()

    def limit_at(self, sizes: Sizes) -> int | None:
        """The budget for calls of these sizes: where it is activation checkpointing's peak, it depends on them."""
        checkpointed = self.planned.checkpointed
        if checkpointed is None or not self.objective.is_checkpointing:
            return self.limit_bytes
        return _peak_bytes(checkpointed.step_at(self.sizes.named(sizes), self.settings))

    def smallest(self, sizes: Sizes) -> Schedule:
        """The schedule with the least peak."""
        return self._scheduler(sizes).smallest()

    def serves(self, sizes: Sizes) -> bool:
        """Whether calls of these sizes do as well as with a plan of their own, as far as can be told without one.

        That is: within the budget, and not clearly slower than the planned ones.
        """
        if self.planned.schedule is None:
            return self._serves_plain(sizes)
        found = self.schedule(sizes)
        if found is None or self.limit_bytes is None:
            return found is not None
        planned, plain_ms = self.planned.schedule.simulation, self._plain(self.sizes.hints).compute_ms
        slowdown = max(planned.step_ms / plain_ms - 1 if plain_ms else 0.0, self.objective.max_slowdown or 0.0)
        return found.simulation.step_ms <= self._plain(sizes).compute_ms * (1 + slowdown + _CLEARLY_SLOWER)

    def _serves_plain(self, sizes: Sizes) -> bool:
        """Whether plain Inductor will do: within the budget; without one, up to some times the planned memory."""
        step, planned = self._plain(sizes), self._plain(self.sizes.hints)
        limit = self.limit_at(sizes)
        return _peak_bytes(step) <= (_PLAIN_RANGE * _peak_bytes(planned) if limit is None else limit)

    def _plain(self, sizes: Sizes) -> TrainingStep:
        """A step of plain Inductor."""
        base = self.planned.base or self.planned.partitioning
        return base.step_at(self.sizes.named(sizes), self.settings)

    def _scheduler(self, sizes: Sizes) -> Scheduler:
        scheduler = self.planned.scheduler
        assert scheduler is not None
        step = self.planned.partitioning.step_at(self.sizes.named(sizes), self.settings)
        return scheduler.with_step(step, scheduler.host_bytes)


def _peak_bytes(step: TrainingStep) -> int:
    """With everything kept."""
    return least_peak_bytes(step, (False,) * len(step.candidates))


class ScheduleBySize:
    """Answers, when a call begins, with that call's choice.

    Args:
        plan: for other sizes.
        order: positions in the partitioning's candidates of the graph's candidates.
    """

    def __init__(self, plan: SizedPlan, order: Sequence[int]) -> None:
        self._plan = plan
        self._order = tuple(order)
        self._choices: dict[Sizes, Choice] = {}
        self._lock = threading.Lock()
        self._warned = False
        self._spare_bytes = 0
        # In its first call, a graph's kernels are tuned.
        self._tunes = plan.planned.first is not None

    def is_planned(self, args: Sequence[Any]) -> bool:
        """Whether the call with these arguments has the sizes of the plan."""
        return self._plan.sizes.told_by(args) == self._plan.sizes.hints

    def leave(self, nbytes: int) -> None:
        """From now on leave this much of the budget free: steps took more than predicted."""
        with self._lock:
            self._spare_bytes = nbytes
            self._choices.clear()

    def choice(self, args: Sequence[Any]) -> Choice | None:
        """For the call with these arguments, in the order of the graph's candidates; None: as planned."""
        is_planned = self.is_planned(args)
        with self._lock:
            tunes, self._tunes = self._tunes, False
            if is_planned:
                return None
            sizes = self._plan.sizes.told_by(args)
            if tunes:
                return self._choice(self._plan.schedule(sizes, spare_bytes=TUNING_BYTES) or self._plan.smallest(sizes))
            rounded = self._plan.sizes.rounded_up(sizes)
            for known in (sizes, rounded):
                if (found := self._choices.pop(known, None)) is not None:
                    self._choices[known] = found  # the one that was asked for last stands at the end
                    return found
            return self._work_out(sizes, rounded)

    def _work_out(self, sizes: Sizes, rounded: Sizes) -> Choice:
        began = time.perf_counter()
        schedule = self._plan.schedule(rounded, spare_bytes=self._spare_bytes)
        if schedule is None and rounded != sizes:
            rounded = sizes
            schedule = self._plan.schedule(sizes, spare_bytes=self._spare_bytes)
        if schedule is None:
            schedule = self._plan.smallest(sizes)
            self._warn(sizes, schedule)
        log.info(
            "scheduled a call of sizes %s in %.2f s: %.1f ms, %.2f GiB",
            sizes,
            time.perf_counter() - began,
            schedule.simulation.step_ms,
            schedule.simulation.peak_bytes / 2**30,
        )
        found = self._choices[rounded] = self._choice(schedule)
        if len(self._choices) > _MOST_CHOICES:
            del self._choices[next(iter(self._choices))]
        return found

    def _choice(self, schedule: Schedule) -> Choice:
        return Choice(tuple(schedule.offload[i] for i in self._order), schedule.windows)

    def _warn(self, sizes: Sizes, schedule: Schedule) -> None:
        limit = self._plan.objective.budget_bytes
        if self._warned or limit is None:
            return
        if self._plan.objective.is_checkpointing:
            return log.info("a call of sizes %s takes more than activation checkpointing would", sizes)
        self._warned = True
        peak = schedule.simulation.peak_bytes + self._spare_bytes
        warn(
            f"a call of sizes {sizes} takes {format_bytes(peak)} whatever is offloaded, more "
            f"than the activation_budget of {format_bytes(limit)}; it runs with the least memory. Make the batch "
            "smaller, or raise the budget"
        )
