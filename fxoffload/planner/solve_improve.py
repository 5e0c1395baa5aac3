"""From the numbers of a program to a choice, and from a choice to a better one nearby."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fxoffload.planner.problem import Problem
from fxoffload.planner.solve_model import Answer, Model, ModelSlot
from fxoffload.planner.solve_schedule import Loads

_TIE = 1e-9
# Most segments in which choices are valued once more.
_MOST_SEGMENTS = 1_000_000


class SolverObjective:
    """The objective: the least time within ``budget_bytes``, or the least bytes within ``max_ms``."""

    def __init__(self, *, budget_bytes: int | None = None, max_ms: float | None = None) -> None:
        self._budget = budget_bytes
        self._max_ms = max_ms

    def solve(self, model: Model, gap: float, *, relaxed: bool = False) -> Answer:
        """Ask HiGHS."""
        if self._budget is not None:
            return model.least_time(self._budget, gap=gap, relaxed=relaxed)
        return model.least_peak(self._max_ms, gap=gap, relaxed=relaxed)

    def value(self, loads: Loads) -> float | None:
        """The number to minimise; None: it does not fit, or takes too long."""
        if not loads.fits_host():
            return None
        if self._budget is not None:
            schedule = loads.schedule(self._budget)
            return None if schedule is None else schedule.ms
        assert self._max_ms is not None
        return loads.peak_bytes(self._max_ms)

    def reaches(self, loads: Loads, value: float) -> float | None:
        """The value where it is at most ``value``; else None, sooner than ``value`` would tell."""
        if self._max_ms is not None:
            schedule = loads.schedule(int(value)) if loads.fits_host() else None
            if schedule is None or schedule.ms > self._max_ms * (1 + _TIE) + _TIE:
                return None
        found = self.value(loads)
        return found if found is not None and found <= value * (1 + _TIE) else None


def rounded(problem: Problem, slots: Sequence[ModelSlot], answer: Answer) -> Loads:
    """The choice that an answer means, or is closest to. Layers of one structure that mix variants take turns."""
    owed: dict[Hashable, list[float]] = {}
    chosen: list[int] = []
    for layer, weights in zip(problem.layers, answer.choose, strict=True):
        sums = owed.setdefault((layer.structure, len(weights)), [0.0] * len(weights))
        for a, weight in enumerate(weights):
            sums[a] += weight
        # Only variants with a weight in this layer; of equals the first.
        best = max((a for a, weight in enumerate(weights) if weight > 1e-6), key=lambda a: round(sums[a], 6))
        sums[best] -= 1.0
        chosen.append(best)
    offloaded = {
        i.name for la, a in zip(problem.layers, chosen, strict=True) for i in la.variants[a].storages if i.fixed
    }
    for slot, moved in zip(slots, answer.moved, strict=True):
        if chosen[slot.layer] not in slot.variants:
            continue
        weight = sum(answer.choose[slot.layer][a] for a in slot.variants)
        if slot.count == len(slot.storages):
            number = round(min(moved / max(weight, 1e-6), slot.count))
            offloaded.update(i.name for i in slot.storages[:number])
        elif moved >= weight / 2:
            offloaded.update(i.name for i in slot.storages)
    return Loads(problem, chosen, offloaded)


def improve(loads: Loads, objective: SolverObjective) -> None:
    """Exchange variants while that is better, then keep storages that need no move."""
    value = objective.value(loads)
    if value is None:
        return
    left = _MOST_SEGMENTS // max(1, len(loads.problem.forward_ms) + len(loads.problem.backward_ms))
    value, left = _exchange(loads, objective, value, left)
    _keep(loads, objective, value, left)


def _exchange(loads: Loads, objective: SolverObjective, value: float, left: int) -> tuple[float, int]:
    """The value after at most ``left`` exchanges, and how many more there may be."""
    for at, layer in enumerate(loads.problem.layers):
        for variant in range(len(layer.variants)):
            before, offloaded = loads.variants[at], set(loads.offloaded)
            if variant == before:
                continue
            if left <= 0:
                return value, left
            left -= 1
            loads.choose(at, variant)
            found = objective.reaches(loads, value)
            if found is not None and found < value * (1 - _TIE):
                value = found
                continue
            loads.choose(at, before)
            for storage in loads.storages_of(at):
                loads.set(storage, offload=storage.name in offloaded)
    return value, left


def _keep(loads: Loads, objective: SolverObjective, value: float, left: int) -> None:
    offloaded = [i for i in loads.saved() if i.name in loads.offloaded and not i.fixed]
    for storage in sorted(offloaded, key=lambda i: -i.moved_bytes)[:left]:
        loads.set(storage, offload=False)
        found = objective.reaches(loads, value)
        if found is None:
            loads.set(storage, offload=True)
        else:
            value = min(value, found)
