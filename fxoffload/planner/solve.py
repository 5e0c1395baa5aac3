"""Keeps, offloads and recomputes: the fastest step within given bytes, the smallest within a given time.

The model is that of ``solve_schedule``; ``solve_model`` writes it down for HiGHS. Where a layer has many variants,
these are chosen first, with storages that may move in part, and the storages after them. HiGHS's answer is never
believed: each choice is computed once more in closed form, with whole bytes, and improved where one exchange improves
it.

Every limit is a count, never a time: all ranks find the same, however busy their machines are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fxoffload.planner.problem import Problem, Solution
from fxoffload.planner.solve_improve import SolverObjective, improve, rounded
from fxoffload.planner.solve_model import MOVE_PRICE, Model, slots_of
from fxoffload.planner.solve_schedule import Loads

_GAP = 1e-3
_PEAK_GAP = 1e-9
# Above this many decisions variants and storages are chosen one after the other.
_MOST_AT_ONCE = 300
# Above this many integers there is no branch and bound: the relaxation is rounded. A root node takes 3 s with 800.
MOST_INTEGERS = 1000
_INFEASIBLE = 2


def least_time(problem: Problem, budget_bytes: int) -> Solution | None:
    """The fastest choice that fits into ``budget_bytes``; None: no choice does."""
    objective = SolverObjective(budget_bytes=budget_bytes)
    bound, found = _search(problem, objective)
    if found is None:
        smallest = _smallest(problem)
        if smallest.least_bytes() > budget_bytes:
            return None
        found = smallest
    improve(found, objective)
    ms = objective.value(found)
    assert ms is not None
    return _solution(found, ms, bound - MOVE_PRICE * problem.compute_ms, ms)


def least_peak(problem: Problem, max_ms: float) -> Solution | None:
    """The choice of the least bytes among those that take at most ``max_ms``; None: all take longer."""
    objective = SolverObjective(max_ms=max_ms)
    bound, found = _search(problem, objective)
    if found is None:
        fastest = least_time(problem, _all_bytes(problem))
        if fastest is None or fastest.ms > max_ms:
            return None
        found = Loads(problem, fastest.variants, fastest.offloaded)
    improve(found, objective)
    peak = objective.value(found)
    assert peak is not None
    schedule = found.schedule(int(peak))
    assert schedule is not None
    return _solution(found, schedule.ms, bound, peak)


def smallest_peak(problem: Problem) -> Solution:
    """The choice of the least bytes, however long it takes; the fastest of those.

    Raises:
        ValueError: storages that must be offloaded exceed the host.
    """
    smallest = _smallest(problem)
    peak = smallest.least_bytes()
    found = least_time(problem, peak)
    if found is not None:
        return found
    schedule = smallest.schedule(peak)
    assert schedule is not None
    return _solution(smallest, schedule.ms, -math.inf, schedule.ms)


def _search(problem: Problem, objective: SolverObjective) -> tuple[float, Loads | None]:
    """A bound of the objective, and a choice that meets the objective if one was found."""
    choices = _num_choices(problem)
    decisions = choices + len(slots_of(problem, exact=True))
    if decisions <= (_MOST_AT_ONCE if choices else MOST_INTEGERS):
        model = Model(problem, exact=True, is_timed=True)
        answer = objective.solve(model, _GAP)
        loads = _best([rounded(problem, model.slots, answer)], objective) if answer.choose else None
        if loads is not None or answer.status == _INFEASIBLE:
            return answer.bound, loads
    model = Model(problem, exact=False, is_timed=True)
    answer = objective.solve(model, _GAP, relaxed=choices > MOST_INTEGERS)
    bound = answer.bound
    if answer.status == _INFEASIBLE:
        return bound, None
    if not answer.choose:
        answer = objective.solve(model, _GAP, relaxed=True)
        bound = max(bound, answer.bound)
    if not answer.choose:
        return bound, None
    first = rounded(problem, model.slots, answer)
    found = [first, Loads(problem, first.variants, [i.name for i in first.saved() if i.may_move])]
    model = Model(problem, exact=True, is_timed=True, variants=first.variants)
    if len(model.slots) <= MOST_INTEGERS:
        second = objective.solve(model, _GAP)
        if second.choose:
            found.append(rounded(problem, model.slots, second))
    return bound, _best(found, objective)


def _num_choices(problem: Problem) -> int:
    return sum(len(layer.variants) for layer in problem.layers if len(layer.variants) > 1)


def _best(found: Iterable[Loads], objective: SolverObjective) -> Loads | None:
    values = [
        (value, number, loads) for number, loads in enumerate(found) if (value := objective.value(loads)) is not None
    ]
    return min(values)[2] if values else None


def _smallest(problem: Problem) -> Loads:
    """The choice of the least bytes, the link aside."""
    found: list[Loads] = []
    for exact in (False, True):
        model = Model(problem, exact=exact, is_timed=False)
        integers = _num_choices(problem) + (len(model.slots) if exact else 0)
        answer = model.least_peak(None, gap=_PEAK_GAP, relaxed=integers > MOST_INTEGERS)
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


def _solution(loads: Loads, ms: float, bound: float, objective: float) -> Solution:
    peak = loads.peak_bytes(ms)
    schedule = loads.schedule(peak) if peak is not None else None
    assert peak is not None and schedule is not None
    gap = max(objective - bound, 0.0) / objective if objective > 0 else 0.0
    return Solution(
        tuple(loads.variants), frozenset(loads.offloaded), schedule.ms, schedule.exposed_ms, peak, loads.moved, gap
    )
