"""The rounds of a search: the solver makes a choice, a try of it shows its time and peak, and the solver is asked for
more where it promised too much.

A promise is made of estimates. A graph that is partitioned, or a chain that is laid out, recomputes, fuses and copies a
little otherwise. One graph and a step of several are searched by the same rounds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from fxoffload.planner import solve
from fxoffload.planner.problem import Problem, Solution
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.windows import least_peak_bytes

log = logging.getLogger(__name__)

# How often another choice is made because a try missed the aim.
_MOST_ROUNDS = 5
# A try that is this close to what the choice promised is taken; and what a choice gives up for what tries lack.
ENOUGH = 0.005
CLOSE = 0.01
# How much of what copies lacked is taken off the budget of the next choice, and the most that is, as a part of it.
_SHORTFALL = 0.6
_MOST_TAKEN = 0.1
# How often the solver may promise to take more than the limit.
_MOST_RAISES = 3
# Steps that differ by less take the same time.
_SAME = 0.001
_UNLIMITED = 1 << 62


class Tried(Protocol):
    """A choice that was laid out."""

    @property
    def scheduler(self) -> Scheduler: ...
    @property
    def schedule(self) -> Schedule | None:
        """The best for the aim; None: none meets it."""
        ...

    @property
    def promised(self) -> Solution | None:
        """The solver's answer that it is; None: the solver was not asked."""
        ...


_Tried = TypeVar("_Tried", bound=Tried)


@dataclass(frozen=True)
class SearchAim:
    """The aim of a search. With both, it is the least time within the budget, if that is no more than ``max_ms``.

    Attributes:
        limit_bytes: find the least time within this budget.
        max_ms: find the least peak within this time.
    """

    limit_bytes: int | None = None
    max_ms: float | None = None

    def schedule(self, scheduler: Scheduler) -> Schedule | None:
        """The best for one layout."""
        if self.limit_bytes is None:
            assert self.max_ms is not None
            return scheduler.least_peak(self.max_ms)
        found = scheduler.least_time(self.limit_bytes)
        is_late = found is not None and self.max_ms is not None and found.simulation.step_ms > self.max_ms
        return None if is_late else found

    def key(self, tried: Tried) -> tuple[float, float]:
        """The order of choices: the smaller, the better."""
        if tried.schedule is None:
            return (float("inf"), tried.scheduler.smallest().simulation.peak_bytes)
        if self.limit_bytes is not None:
            return tried.schedule.key
        return (tried.schedule.simulation.peak_bytes, tried.schedule.simulation.step_ms)

    def solve(self, problem: Problem) -> Solution | None:
        """The solver's choice; the one of the least peak where none fits into a budget."""
        if self.limit_bytes is not None:
            return solve.least_time(problem, self.limit_bytes) or solve.smallest_peak(problem)
        assert self.max_ms is not None
        return solve.least_peak(problem, self.max_ms)

    def missed(self, asked: SearchAim, solution: Solution, tried: Tried, d2h_bytes_per_ms: float) -> SearchAim | None:
        """What to ask the solver for next; None: ``tried`` keeps its promise.

        Args:
            asked: what the solver was asked for.
            solution: its answer.
            tried: that, laid out.
            d2h_bytes_per_ms: rate of copies to the host.
        """
        found = None if tried.schedule is None else tried.schedule.simulation
        if self.limit_bytes is not None and asked.limit_bytes is not None:
            if found is None:
                short = tried.scheduler.smallest().simulation.peak_bytes - self.limit_bytes
                return replace(asked, limit_bytes=asked.limit_bytes - max(short, int(CLOSE * self.limit_bytes)))
            if found.step_ms <= solution.ms * (1 + ENOUGH):
                return None
            # Compute waits until copies have freed enough memory: the shortfall is the bytes copied in that time.
            short = min(_SHORTFALL * found.exposed_ms * d2h_bytes_per_ms, _MOST_TAKEN * asked.limit_bytes)
            return replace(asked, limit_bytes=int(asked.limit_bytes - max(2 * CLOSE * asked.limit_bytes, short)))
        assert self.max_ms is not None and asked.max_ms is not None
        if found is not None and (asked.max_ms < self.max_ms or found.peak_bytes <= solution.peak_bytes * (1 + CLOSE)):
            return None
        # It computes longer than the choice promised; it will do so the next time too.
        beyond = max(tried.scheduler.step.compute_ms - (solution.ms - solution.exposed_ms), 0.0)
        return replace(asked, max_ms=min(asked.max_ms, self.max_ms - beyond) - CLOSE / 10 * self.max_ms)


def search_choices(
    problem: Problem,
    aim: SearchAim,
    attempt: Callable[[Solution, SearchAim], _Tried | None],
    known: Iterable[_Tried],
    *,
    enough_ms: float,
    slack_ms: float = 0.0,
) -> list[_Tried]:
    """All tries for an aim.

    Args:
        problem: the choices.
        aim: one of its numbers is None.
        attempt: lays a choice out, and schedules it for an aim; None: it saves nothing that may move.
        known: tries of choices that are no answer of the solver's.
        enough_ms: nothing much faster is to be had.
        slack_ms: how much less than ``aim.max_ms`` the solver is asked for.
    """

    def lay_out(solution: Solution) -> _Tried | None:
        return attempt(solution, aim)

    tries = list(known)
    ask = aim if aim.max_ms is None else SearchAim(max_ms=aim.max_ms - slack_ms)
    tries.extend(search_rounds(problem, aim, lay_out, ask=ask))
    most_ms = math.inf if aim.max_ms is None else aim.max_ms
    met = [t for t in tries if t.schedule is not None and ms_of(t) <= most_ms]
    best = min(met, key=lambda t: (aim.key(t), t.promised is None), default=None)
    if aim.limit_bytes is not None:
        tries.extend(faster_rounds(problem, aim.limit_bytes, best, lay_out, enough_ms=enough_ms))
    elif best is not None and best.schedule is not None:
        # To get to that peak, all the time that was allowed may have gone, even for the last byte. BERT then takes
        # +0.2 % in place of +1.9 %, other models up to 0.6 % less.
        peak = best.schedule.simulation.peak_bytes
        solution = solve.least_time(problem, peak)
        found = None if solution is None else attempt(solution, replace(aim, limit_bytes=peak))
        tries += [] if found is None else [found]
    return tries


def search_rounds(
    problem: Problem, aim: SearchAim, attempt: Callable[[Solution], _Tried | None], *, ask: SearchAim | None = None
) -> Iterator[_Tried]:
    """The tries, until one keeps its promise.

    Args:
        problem: the choices.
        aim: of the search.
        attempt: lays a choice out; None: it saves nothing that may move.
        ask: what the solver is asked for first; None: ``aim``.
    """
    asked, seen, before = ask or aim, dict[tuple[int, ...], _Tried](), None
    for _ in range(_MOST_ROUNDS):
        solution = asked.solve(problem)
        if solution is None or (solution == before and solution.peak_bytes > (asked.limit_bytes or _UNLIMITED)):
            return  # nothing fits, and the least is known
        before = solution
        tried = seen.get(solution.variants)  # the same recomputation, which should offload more: it was tried
        if tried is None:
            if (tried := attempt(solution)) is None:
                return
            seen[solution.variants] = tried
            yield tried
        promised = _text(solution.ms, solution.peak_bytes)
        log.debug("recompute choice: promised %s; laid out %s", promised, _outcome(tried))
        found = aim.missed(asked, solution, tried, problem.d2h_bytes_per_ms)
        if found is None:
            return
        asked = found


def faster_rounds(
    problem: Problem,
    limit_bytes: int,
    best: _Tried | None,
    attempt: Callable[[Solution], _Tried | None],
    *,
    enough_ms: float,
) -> Iterator[_Tried]:
    """Tries of choices that promise to take more than ``limit_bytes``. They take less than promised, some 3 % on models
    of Hugging Face.

    Args:
        problem: the choices.
        limit_bytes: the budget.
        best: the fastest try within it so far; None: there is none.
        attempt: as of ``search_rounds``.
        enough_ms: nothing much faster is to be had.
    """
    failed, seen = _UNLIMITED, set[tuple[int, ...]]()
    for _ in range(_MOST_RAISES):
        if best is None or best.schedule is None or best.promised is None or ms_of(best) <= enough_ms:
            return
        offload = [name in best.promised.offloaded for name in best.scheduler.names]
        left = limit_bytes - least_peak_bytes(best.scheduler.step, offload)
        asked = best.promised.peak_bytes + left + int(ENOUGH * limit_bytes)
        asked = min(asked, (best.promised.peak_bytes + failed) // 2)
        solution = solve.least_time(problem, asked)
        if solution is None or solution.ms >= ms_of(best) * (1 - _SAME) or solution.variants in seen:
            return
        seen.add(solution.variants)
        if (found := attempt(solution)) is None:
            return
        yield found
        best, failed = (found, failed) if ms_of(found) < ms_of(best) else (best, min(asked, solution.peak_bytes))


def ms_of(tried: Tried) -> float:
    """Milliseconds of its step; infinite where nothing meets the aim."""
    return math.inf if tried.schedule is None else tried.schedule.simulation.step_ms


def _outcome(tried: Tried) -> str:
    if tried.schedule is None:
        return "nothing that meets the aim"
    found = tried.schedule.simulation
    return _text(found.step_ms, found.peak_bytes)


def _text(ms: float, nbytes: int) -> str:
    return f"{ms:.1f} ms, {nbytes / 2**30:.2f} GiB"
