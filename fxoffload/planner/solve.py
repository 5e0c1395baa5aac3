"""Keeps, offloads and recomputes: the fastest step within given bytes, the smallest within a given time.

The model is that of ``solve_schedule``; ``solve_model`` writes it down for HiGHS. Where a layer has many variants,
these are chosen first, with storages that may move in part, and the storages after them. HiGHS's answer is never
believed: each choice is computed once more in closed form, with whole bytes, and improved where one exchange improves
it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from fxoffload.planner.problem import Problem, Solution
from fxoffload.planner.solve_improve import SolverObjective, improve, rounded
from fxoffload.planner.solve_model import MOVE_PRICE, Model, slots_of
from fxoffload.planner.solve_schedule import Loads

_GAP = 1e-3
_PEAK_GAP = 1e-9
# Above this many decisions variants and storages are chosen one after the other.
_MOST_AT_ONCE = 300
_INFEASIBLE = 2
_GRACE_S = 1.0


def least_time(problem: Problem, budget_bytes: int, *, deadline_s: float = 10.0) -> Solution | None:
    """The fastest choice that fits into ``budget_bytes``; None: no choice does."""
    clock = _Clock(deadline_s)
    objective = SolverObjective(problem, budget_bytes=budget_bytes)
    bound, found = _search(problem, objective, clock)
    if found is None:
        smallest = _smallest(problem, clock)
        if smallest.least_bytes() > budget_bytes:
            return None
        found = smallest
    improve(found, objective, clock.until)
    ms = objective.value(found)
    assert ms is not None
    return _solution(found, ms, bound - MOVE_PRICE * problem.compute_ms, ms, _GAP)


def least_peak(problem: Problem, max_ms: float, *, deadline_s: float = 10.0) -> Solution | None:
    """The choice of the least bytes among those that take at most ``max_ms``; None: all take longer."""
    clock = _Clock(deadline_s)
    objective = SolverObjective(problem, max_ms=max_ms)
    bound, found = _search(problem, objective, clock)
    if found is None:
        fastest = least_time(problem, _all_bytes(problem), deadline_s=clock.left())
        if fastest is None or fastest.ms > max_ms:
            return None
        found = Loads(problem, fastest.variants, fastest.offloaded)
    improve(found, objective, clock.until)
    peak = objective.value(found)
    assert peak is not None
    schedule = found.schedule(int(peak))
    assert schedule is not None
    return _solution(found, schedule.ms, bound, peak, _GAP)


def smallest_peak(problem: Problem, *, deadline_s: float = 10.0) -> Solution:
    """The choice of the least bytes, however long it takes; the fastest of those.

    Raises:
        ValueError: storages that must be offloaded exceed the host.
    """
    clock = _Clock(deadline_s)
    smallest = _smallest(problem, clock)
    peak = smallest.least_bytes()
    found = least_time(problem, peak, deadline_s=clock.left()) if clock.left() > 0.1 else None
    if found is not None:
        return found
    schedule = smallest.schedule(peak)
    assert schedule is not None
    return _solution(smallest, schedule.ms, -math.inf, schedule.ms, _GAP)


class _Clock:
    def __init__(self, deadline_s: float) -> None:
        self.until = time.monotonic() + deadline_s

    def left(self) -> float:
        """Seconds."""
        return max(self.until - time.monotonic(), 0.0)


def _search(problem: Problem, objective: SolverObjective, clock: _Clock) -> tuple[float, Loads | None]:
    """A bound of the objective, and a choice that meets the objective if one was found."""
    decisions = sum(len(la.variants) for la in problem.layers if len(la.variants) > 1)
    decisions += len(slots_of(problem, exact=True))
    single = all(len(la.variants) == 1 for la in problem.layers)
    if single or decisions <= _MOST_AT_ONCE:
        model = Model(problem, exact=True, is_timed=True)
        answer = objective.solve(model, _GAP, clock.left() * 0.8)
        loads = _best([rounded(problem, model.slots, answer)], objective) if answer.choose else None
        if loads is not None or answer.status == _INFEASIBLE:
            return answer.bound, loads
    model = Model(problem, exact=False, is_timed=True)
    answer = objective.solve(model, _GAP, clock.left() * 0.6)
    bound = answer.bound
    if answer.status == _INFEASIBLE:
        return bound, None
    if not answer.choose:
        answer = objective.solve(model, _GAP, max(clock.left() * 0.5, _GRACE_S), relaxed=True)
        bound = max(bound, answer.bound)
    if not answer.choose:
        return bound, None
    first = rounded(problem, model.slots, answer)
    model = Model(problem, exact=True, is_timed=True, variants=first.variants)
    second = objective.solve(model, _GAP, max(clock.left() * 0.8, _GRACE_S))
    found = [first, Loads(problem, first.variants, [i.name for i in first.saved() if i.may_move])]
    if second.choose:
        found.append(rounded(problem, model.slots, second))
    return bound, _best(found, objective)


def _best(found: Iterable[Loads], objective: SolverObjective) -> Loads | None:
    values = [
        (value, number, loads) for number, loads in enumerate(found) if (value := objective.value(loads)) is not None
    ]
    return min(values)[2] if values else None


def _smallest(problem: Problem, clock: _Clock) -> Loads:
    """The choice of the least bytes, the link aside. Takes a moment longer than the clock allows if it must."""
    found: list[Loads] = []
    for exact in (False, True):
        model = Model(problem, exact=exact, is_timed=False)
        answer = model.least_peak(None, gap=_PEAK_GAP, deadline_s=max(clock.left() * 0.4, _GRACE_S))
        if answer.status == _INFEASIBLE:
            break
        if answer.choose:
            found.append(rounded(problem, model.slots, answer))
            if found[-1].fits_host() and found[-1].least_bytes() <= answer.bound * (1 + 1e-7):
                return found[-1]
    found = [loads for loads in (*found, *_plain(problem)) if loads.fits_host()]
    if not found:
        raise ValueError("expected room on the host for what must be offloaded, found too little of it")
    return min(found, key=Loads.least_bytes)


def _plain(problem: Problem) -> Iterable[Loads]:
    """Choices that need no search: each variant everywhere, with all offloaded, or nothing that need not be."""
    for a in range(max((len(la.variants) for la in problem.layers), default=1)):
        chosen = [min(a, len(la.variants) - 1) for la in problem.layers]
        nothing = Loads(problem, chosen, ())
        yield Loads(problem, chosen, [i.name for i in nothing.saved() if i.may_move])
        yield Loads(problem, chosen, [i.name for i in nothing.saved() if i.fixed])


def _all_bytes(problem: Problem) -> int:
    held = sum(max(sum(i.held_bytes + i.moved_bytes for i in a.storages) for a in la.variants) for la in problem.layers)
    extra = sum(max(sum(a.extra_bytes.values()) for a in la.variants) for la in problem.layers)
    return held + extra + max((*problem.forward_bytes, *problem.backward_bytes), default=0)


def _solution(loads: Loads, ms: float, bound: float, objective: float, asked: float) -> Solution:
    peak = loads.peak_bytes(ms)
    schedule = loads.schedule(peak) if peak is not None else None
    assert peak is not None and schedule is not None
    gap = max(objective - bound, 0.0) / objective if objective > 0 else 0.0
    return Solution(
        tuple(loads.variants),
        frozenset(loads.offloaded),
        schedule.ms,
        schedule.exposed_ms,
        peak,
        loads.moved,
        gap,
        gap <= asked * 1.1,
    )
