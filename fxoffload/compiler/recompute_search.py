"""Chooses the recompute variant that a graph is compiled under: the solver proposes, a partitioning of each gives its
cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fxoffload.compiler.choices import Choices
from fxoffload.compiler.partitioning import Partitioning
from fxoffload.compiler.search_rounds import CLOSE, SearchAim, ms_of, search_choices
from fxoffload.planner import solve
from fxoffload.planner.problem import Solution
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.simulate import Simulation

log = logging.getLogger(__name__)

# How often a smallest budget is raised to what its partitionings need.
_MAX_RAISES = 3
_UNLIMITED = 1 << 62

_CHECKPOINTED = "checkpointed"

Recompute = Mapping[str, Any] | str


@dataclass(frozen=True)
class Try:
    """A partitioned recompute choice, and its best schedule for an objective; None where none meets it.

    Attributes:
        limit_bytes: the limit that it was found within; asked for again, it is found again.
        promised: the solver's solution for this choice; None where it was not asked.
    """

    partitioning: Partitioning
    scheduler: Scheduler
    schedule: Schedule | None
    limit_bytes: int | None = None
    promised: Solution | None = None


class RecomputeSearch:
    """Finds recompute choices and schedules for one joint graph. Each choice is partitioned once.

    Args:
        base: plain Inductor's partitioning, with a step.
        level: "default": no other choice; another level: that one alone. None: the solver chooses.
        choices: of the solver; not asked for under a level.
        checkpointed: the partitioning under the model's own activation checkpointing, one more choice.
    """

    def __init__(
        self,
        partitioning: Callable[[Recompute], Partitioning],
        scheduler: Callable[[Partitioning], Scheduler],
        base: tuple[Partitioning, Scheduler],
        level: str | None,
        choices: Callable[[], Choices],
        *,
        checkpointed: tuple[Partitioning, Scheduler] | None = None,
    ) -> None:
        self._partitioning_of = partitioning
        self._scheduler_of = scheduler
        self._level = level
        self._choices = choices() if level is None else None
        self._partitioned: dict[Hashable, tuple[Partitioning, Scheduler] | None] = {"default": base}
        self._within: dict[int, list[Try]] = {}
        if checkpointed is not None:
            self._partitioned[_CHECKPOINTED] = checkpointed

    @property
    def num_partitionings(self) -> int:
        """How many were made."""
        return len(self._partitioned)

    # -- for a budget --------------------------------------------------------------------------------------------------

    def within(self, limit_bytes: int) -> list[Try]:
        """Choices with their fastest schedules within ``limit_bytes``. Where none meets it, the least of all is
        among them. Each limit is searched once."""
        if limit_bytes not in self._within:
            self._within[limit_bytes] = [replace(t, limit_bytes=limit_bytes) for t in self._search_within(limit_bytes)]
        return self._within[limit_bytes]

    def _search_within(self, limit_bytes: int) -> list[Try]:
        aim = SearchAim(limit_bytes=limit_bytes)
        tries = self._search(aim)
        if (choices := self._choices) is not None:
            tries.extend(self._as_checkpointed(fastest(tries), aim.schedule))
            if all(t.schedule is None for t in tries) and (least := self._least(choices, aim.schedule)) is not None:
                tries.append(least)
        return tries

    def _search(self, aim: SearchAim, slack_ms: float = 0.0) -> list[Try]:
        """``slack_ms``: see ``search_choices``."""

        def schedule(scheduler: Scheduler, asked: SearchAim = aim) -> Schedule | None:
            found = asked.schedule(scheduler)
            if found is None and asked.limit_bytes is None and (scheduler.fixed or self._level is not None):
                # The user's own choice takes longer than that in any case.
                return scheduler.least_time(_UNLIMITED)
            return found

        known, choices = self._at_level(schedule), self._choices
        if choices is None:
            return list(known)

        def attempt(solution: Solution, asked: SearchAim) -> Try | None:
            """The solver's choice, partitioned. None if it saves nothing that may move."""
            found = self._try(solution.variants, choices.recompute(solution.variants), partial(schedule, asked=asked))
            return None if found is None else replace(found, promised=solution)

        enough_ms = self._known("default")[1].keep_all().step_ms * (1 + CLOSE)
        return search_choices(choices.problem, aim, attempt, known, enough_ms=enough_ms, slack_ms=slack_ms)

    def _as_checkpointed(self, best: Try | None, aim: Callable[[Scheduler], Schedule | None]) -> Iterator[Try]:
        """Checkpointing's choice, where that may be faster than the best so far."""
        known = self._partitioned.get(_CHECKPOINTED)
        if known is None:
            return
        _, scheduler = known
        if best is None or best.schedule is None or best.schedule.simulation.step_ms > scheduler.keep_all().step_ms:
            yield Try(*known, schedule=aim(scheduler))

    def least(self) -> Try:
        """The choice and schedule of the least peak, of choices that ``within`` always tries: it meets that peak as a
        budget. Others that were partitioned here may take less, but need not be tried again."""
        found = smallest(self._always_tried())
        assert found is not None
        return found

    def _always_tried(self) -> list[Try]:
        tries = [*self._at_level(Scheduler.smallest)]
        if self._choices is not None:
            obeyed = self._partitioned.get(_CHECKPOINTED)
            tries += [t for t in [self._least(self._choices, Scheduler.smallest)] if t is not None]
            tries += [] if obeyed is None else [Try(*obeyed, schedule=obeyed[1].smallest())]
        return tries

    def smallest(self) -> Try:
        """The choice and schedule of the least peak that ``within`` finds when it is asked for that peak."""
        tries = self._always_tried()
        if self._choices is not None:
            tries += [Try(*p, schedule=p[1].smallest()) for p in self._partitioned.values() if p is not None]
        least = smallest(tries)
        assert least is not None and least.schedule is not None
        limit = least.schedule.simulation.peak_bytes
        for _ in range(_MAX_RAISES):
            tries = self.within(limit)
            if (found := fastest(tries)) is not None:
                return found
            limit = min(t.scheduler.smallest().simulation.peak_bytes for t in tries)
        return least

    def _least(self, choices: Choices, aim: Callable[[Scheduler], Schedule | None]) -> Try | None:
        solution = solve.smallest_peak(choices.problem)
        return self._try(solution.variants, choices.recompute(solution.variants), aim)

    # -- for a slowdown ------------------------------------------------------------------------------------------------

    def as_fast(self, most_ms: float, baseline: Simulation) -> list[Try]:
        """Choices with their schedules of the least peak that take at most ``most_ms``; longer only where all do."""
        # A partitioning takes a little longer than its choice promises: kernels fuse otherwise than was assumed.
        tries = self._search(SearchAim(max_ms=most_ms), CLOSE / 2 * baseline.step_ms)
        return [t for t in tries if ms_of(t) <= most_ms] or tries

    # -- partitionings -------------------------------------------------------------------------------------------------

    def _at_level(self, aim: Callable[[Scheduler], Schedule | None]) -> Iterator[Try]:
        level = self._level or "default"
        found = self._try(level, level, aim)
        yield found or Try(*self._known("default"), schedule=None)

    def _try(self, key: Hashable, recompute: Recompute, aim: Callable[[Scheduler], Schedule | None]) -> Try | None:
        if key not in self._partitioned:
            partitioning = self._partitioning_of(recompute)
            self._partitioned[key] = (
                None if partitioning.step is None else (partitioning, self._scheduler_of(partitioning))
            )
        known = self._partitioned[key]
        return None if known is None else Try(*known, schedule=aim(known[1]))

    def _known(self, key: Hashable) -> tuple[Partitioning, Scheduler]:
        found = self._partitioned[key]
        assert found is not None
        return found


def fastest(tries: list[Try]) -> Try | None:
    """The fastest of those that meet their objective; None where none does."""
    met = [t for t in tries if t.schedule is not None]
    return min(met, key=lambda t: t.schedule.key, default=None)  # type: ignore[union-attr]


def smallest(tries: list[Try]) -> Try | None:
    """The one of the least peak, of those that meet their objective; the fastest of several."""
    met = [t for t in tries if t.schedule is not None]
    least = min((t.schedule.simulation.peak_bytes for t in met), default=0)  # type: ignore[union-attr]
    return fastest([t for t in met if t.schedule.simulation.peak_bytes <= least])  # type: ignore[union-attr]
