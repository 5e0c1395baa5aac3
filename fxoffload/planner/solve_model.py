"""The model of ``solve_schedule`` as a mixed-integer program, for ``scipy.optimize.milp`` (HiGHS).

Sums over segments are variables of their own: each is the sum before plus this segment's bytes. So a storage stands in
a handful of rows however many segments there are. Units are chosen so that numbers are near 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from fxoffload.planner.problem import Problem, ProblemStorage

Terms = dict[int, float]  # variable -> factor
# Nodes of HiGHS's branch and bound, at most: a count, which stops all ranks at the same answer.
MOST_NODES = 100
MOVE_PRICE = 5e-5  # price of moving all that can move, in parts of the compute time


@dataclass(frozen=True)
class ModelSlot:
    """Storages of one layer that are decided together.

    Attributes:
        variants: those that save the storages.
        storages: they live alike.
        count: the decision is how many of the storages move, all of one size; 1: which part of them all.
    """

    layer: int
    variants: tuple[int, ...]
    storages: tuple[ProblemStorage, ...]
    count: int


def slots_of(problem: Problem, *, exact: bool) -> list[ModelSlot]:
    """The decisions about storages that may move.

    Equal storages are one slot. If not ``exact``, so are all that live alike: a part of them moves.
    """
    found: list[ModelSlot] = []
    for at, layer in enumerate(problem.layers):
        where: dict[ProblemStorage, list[int]] = defaultdict(list)
        for number, variant in enumerate(layer.variants):
            for storage in variant.storages:
                if storage.may_move and not problem.is_taken_back(storage):
                    where[storage].append(number)
        groups: dict[object, list[ProblemStorage]] = defaultdict(list)
        for storage, numbers in where.items():
            life = (
                storage.made_at,
                storage.copy_after,
                storage.freed_before,
                storage.needed_at,
                storage.dies_at,
                storage.fixed,
            )
            by_size = exact or storage.held_bytes != storage.moved_bytes
            groups[tuple(numbers), life, (storage.held_bytes, storage.moved_bytes) if by_size else None].append(storage)
        for storages in groups.values():
            equal = exact or storages[0].held_bytes != storages[0].moved_bytes
            found.append(ModelSlot(at, tuple(where[storages[0]]), tuple(storages), len(storages) if equal else 1))
    return found


@dataclass(frozen=True)
class Answer:
    """The solver's answer to a program.

    Attributes:
        status: of ``scipy.optimize.milp``: 0 solved, 2 infeasible, others stopped.
        bound: no choice is better than that (ms or bytes); -inf where nothing is known.
        choose: per layer, the weight of each variant; empty where nothing was found.
        moved: per slot, how many of its storages move.
    """

    status: int
    bound: float
    choose: list[list[float]]
    moved: list[float]


class Model:
    """A program under construction, and its solution.

    Args:
        exact: whether storages move as a whole.
        is_timed: whether time counts; else compute waits for free and the link does not matter.
        variants: the chosen ones, where they are chosen already.
    """

    def __init__(self, problem: Problem, *, exact: bool, is_timed: bool, variants: Sequence[int] | None = None) -> None:
        self._problem = problem
        self.slots = slots = slots_of(problem, exact=exact)
        self._forward_waits: list[int] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._integer: list[bool] = []
        self._rows: list[tuple[Terms, float, float]] = []
        storages = {i for layer in problem.layers for a in layer.variants for i in a.storages}
        self._byte = 1 / max(1, max((max(i.held_bytes, i.moved_bytes) for i in storages), default=1))
        self._tick = 1000 / problem.compute_ms if problem.compute_ms > 0 else 1.0
        self._choose = [
            [
                self._variable(float(variants is not None and variants[at] == a), 1.0, integer=True)
                for a in range(len(layer.variants))
            ]
            for at, layer in enumerate(problem.layers)
        ]
        for choose in self._choose:
            self._row(dict.fromkeys(choose, 1.0), 1.0, 1.0)
        self._move = [self._variable(0.0, s.count, integer=exact) for s in slots]
        for slot, move in zip(slots, self._move, strict=True):
            saved = {self._choose[slot.layer][a]: -float(slot.count) for a in slot.variants}
            must = slot.storages[0].fixed is True
            self._row({move: 1.0, **saved}, 0.0 if must else -np.inf, 0.0)
        self._peak = self._variable(0.0, np.inf)
        self._time: Terms = {self._variable(1.0, 1.0): problem.compute_ms * self._tick}
        for at, layer in enumerate(problem.layers):
            for a, variant in enumerate(layer.variants):
                self._time[self._choose[at][a]] = sum(variant.extra_ms.values()) * self._tick
        if problem.host_bytes is not None:
            self._host(problem.host_bytes)
        if is_timed:
            self._timed()
        else:
            self._untimed()

    def _host(self, nbytes: int) -> None:
        terms = self._moving(lambda storage: storage.moved_bytes)
        for choose, layer in zip(self._choose, self._problem.layers, strict=True):
            for x, variant in zip(choose, layer.variants, strict=True):
                back = sum(i.moved_bytes for i in variant.storages if self._problem.is_taken_back(i))
                if back:
                    terms[x] = back * self._byte
        self._row(terms, -np.inf, nbytes * self._byte)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _variable(self, low: float, high: float, *, integer: bool = False) -> int:
        self._low.append(low)
        self._high.append(high)
        self._integer.append(integer)
        return len(self._low) - 1

    def _flow(self) -> int:
        return self._variable(0.0, np.inf)

    def _row(self, terms: Terms, low: float, high: float) -> None:
        self._rows.append((terms, low, high))

    def _moving(self, size: Callable[[ProblemStorage], int]) -> Terms:
        """The bytes of all that moves, by slot."""
        found: Terms = {}
        for slot, move in zip(self.slots, self._move, strict=True):
            nbytes = sum(size(i) for i in slot.storages) / slot.count
            if nbytes:
                found[move] = nbytes * self._byte
        return found

    def _by_segment(
        self, count: int, where: Callable[[ProblemStorage], int], size: Callable[[ProblemStorage], int]
    ) -> list[Terms]:
        """The same, of what ``where`` places at each segment."""
        found: list[Terms] = [{} for _ in range(count)]
        total = self._moving(size)
        for slot, move in zip(self.slots, self._move, strict=True):
            if move in total:
                found[where(slot.storages[0])][move] = total[move]
        return found

    def _saved(self, count: int, where: Callable[[ProblemStorage], int]) -> list[Terms]:
        """Per segment, the bytes of the storages that the chosen variants save."""
        found: list[Terms] = [{} for _ in range(count)]
        for choose, layer in zip(self._choose, self._problem.layers, strict=True):
            for x, variant in zip(choose, layer.variants, strict=True):
                for storage in variant.storages:
                    terms = found[where(storage)]
                    terms[x] = terms.get(x, 0.0) + storage.held_bytes * self._byte
        return found

    def _sums(self, changes: Iterable[Terms]) -> list[int]:
        """A variable per change: the sum of the changes so far."""
        found: list[int] = []
        for terms in changes:
            if found and not terms:
                found.append(found[-1])
                continue
            total = self._variable(-np.inf, np.inf)
            row = {total: 1.0, **{v: -f for v, f in terms.items()}}
            if found:
                row[found[-1]] = -1.0
            self._row(row, 0.0, 0.0)
            found.append(total)
        return found

    def _extra(self) -> tuple[list[Terms], list[Terms]]:
        """Per backward segment, time and bytes of recomputation."""
        count = len(self._problem.backward_ms)
        times: list[Terms] = [{} for _ in range(count)]
        sizes: list[Terms] = [{} for _ in range(count)]
        for choose, layer in zip(self._choose, self._problem.layers, strict=True):
            for x, variant in zip(choose, layer.variants, strict=True):
                for at, ms in variant.extra_ms.items():
                    times[at][x] = ms * self._tick
                for at, nbytes in variant.extra_bytes.items():
                    sizes[at][x] = nbytes * self._byte
        return times, sizes

    def _memory(self) -> tuple[list[int], list[int], list[Terms], list[int]]:
        """Four sums of bytes.

        Per forward segment: made so far; possibly freed so far. Per backward segment: present without reloads; reloads
        that must be back. [-1] of the last list is the end.
        """
        problem = self._problem
        forward, backward = len(problem.forward_ms), len(problem.backward_ms)
        begun, dead_in = problem.backward_after, problem.forward_after
        there = self._saved(forward + 1, lambda storage: max(storage.made_at, 0))
        gone = _less(
            self._saved(forward + 1, lambda i: dead_in[i.dies_at]),
            self._by_segment(forward + 1, lambda i: dead_in[i.dies_at], lambda i: i.held_bytes),
        )
        made = self._sums(_less(there, gone)[:forward])
        freed = self._sums(self._by_segment(forward + 1, lambda i: i.freed_before, lambda i: i.held_bytes))
        # Kept bytes less dead ones; where a storage moved, less the bytes of it that were not kept.
        kept = _less(
            self._saved(backward + 1, lambda i: begun[max(i.made_at, 0)]),
            self._by_segment(backward + 1, lambda i: begun[max(i.made_at, 0)], lambda i: i.held_bytes),
        )
        dead = self._saved(backward + 1, lambda storage: storage.dies_at)
        more = self._by_segment(backward + 1, lambda i: i.dies_at, lambda i: i.moved_bytes - i.held_bytes)
        changes = [{}, *({v: f for v, f in (*a.items(), *b.items())} for a, b in zip(dead, more, strict=True))]
        base = self._sums(_less(kept, changes)[:backward])
        _, sizes = self._extra()
        there = [{v: 1.0, **extra} for v, extra in zip(base, sizes, strict=True)]
        needs = self._sums(self._by_segment(backward + 1, lambda i: i.needed_at, lambda i: i.moved_bytes))
        return made, freed, there, needs

    def _fits(self, terms: Terms, fixed_bytes: int) -> None:
        self._row({**terms, self._peak: -1.0}, -np.inf, -fixed_bytes * self._byte)

    def _untimed(self) -> None:
        made, freed, there, needs = self._memory()
        for m, f, fixed in zip(made, freed, self._problem.forward_bytes, strict=False):
            self._fits({m: 1.0, f: -1.0}, fixed)
        for terms, need, fixed in zip(there, needs, self._problem.backward_bytes, strict=False):
            self._fits({**terms, need: 1.0}, fixed)

    def _timed(self) -> None:
        problem = self._problem
        made, freed, there, needs = self._memory()
        scale = self._byte / self._tick
        down, up = problem.d2h_bytes_per_ms * scale, problem.h2d_bytes_per_ms * scale
        forward = len(problem.forward_ms)
        ready = self._sums(
            self._by_segment(forward + 1, lambda i: i.copy_after + 1, lambda i: i.held_bytes and i.copied_bytes)
        )
        copied: int | None = None  # by the end of the segment before
        for at in range(forward):
            wait, begin, end = self._flow(), self._flow(), self._flow()
            self._forward_waits.append(wait)
            self._row({begin: 1.0, wait: -down, **_minus(copied)}, -np.inf, 0.0)
            self._row({end: 1.0, begin: -1.0}, -np.inf, problem.forward_ms[at] * self._tick * down)
            self._row({end: 1.0, ready[at]: -1.0}, -np.inf, 0.0)
            gone = self._flow()
            self._row({gone: 1.0, begin: -1.0}, -np.inf, 0.0)
            self._row({gone: 1.0, freed[at]: -1.0}, -np.inf, 0.0)
            self._fits({made[at]: 1.0, gone: -1.0}, problem.forward_bytes[at])
            copied = end
        self._turn(copied, ready[-1], down)
        times, _ = self._extra()
        reloaded: int | None = None
        for at, ms in enumerate(problem.backward_ms):
            wait, begin, end = self._flow(), self._flow(), self._flow()
            self._time[wait] = 1.0
            self._row({begin: 1.0, wait: -up, **_minus(reloaded)}, -np.inf, 0.0)
            self._row({begin: 1.0, needs[at]: -1.0}, 0.0, np.inf)
            recomputing = {v: -f * up for v, f in times[at].items()}
            self._row({end: 1.0, begin: -1.0, **recomputing}, -np.inf, ms * self._tick * up)
            self._row({end: 1.0, begin: -1.0}, 0.0, np.inf)
            if reloaded is not None:
                self._row({begin: 1.0, reloaded: -1.0}, 0.0, np.inf)
            if problem.runs:
                self._row({end: 1.0, needs[problem.reloads_until[at] - 1]: -1.0}, -np.inf, 0.0)
            self._fits({**there[at], end: 1.0}, problem.backward_bytes[at])
            reloaded = end
        wait = self._flow()
        self._time[wait] = 1.0
        self._row({needs[-1]: 1.0, wait: -up, **_minus(reloaded)}, -np.inf, 0.0)

    def _turn(self, copied: int | None, ready: int, down: float) -> None:
        """Between forward and backward: the rest is copied."""
        wait = self._flow()
        self._forward_waits.append(wait)
        self._time.update(dict.fromkeys(self._forward_waits, 1.0))
        self._row({ready: 1.0, wait: -down, **_minus(copied)}, -np.inf, 0.0)
        inputs = self._moving(lambda storage: 0 if storage.held_bytes else storage.moved_bytes)
        if inputs:
            free = sum(self._problem.forward_ms) * self._tick * down
            self._row({ready: 1.0, **inputs, **dict.fromkeys(self._forward_waits, -down)}, -np.inf, free)

    # -- solving -------------------------------------------------------------------------------------------------------

    def least_time(self, budget: float, *, gap: float, relaxed: bool = False) -> Answer:
        """The shortest step within ``budget`` bytes."""
        self._high[self._peak] = budget * self._byte
        moving = self._moving(lambda storage: storage.moved_bytes)
        total = sum(f * self._high[v] for v, f in moving.items())
        price = MOVE_PRICE * self._problem.compute_ms * self._tick
        prices = {v: price * f / total for v, f in moving.items()}
        return self._solve(self._time | prices, 1 / self._tick, gap, relaxed, self._rows)

    def least_peak(self, max_ms: float | None, *, gap: float, relaxed: bool = False) -> Answer:
        """The least bytes for a step of ``max_ms``; None: however long it takes."""
        in_time = [] if max_ms is None else [(self._time, -np.inf, max_ms * self._tick)]
        return self._solve({self._peak: 1.0}, 1 / self._byte, gap, relaxed, [*self._rows, *in_time])

    def _solve(
        self, cost: Terms, unit: float, gap: float, relaxed: bool, rows: Sequence[tuple[Terms, float, float]]
    ) -> Answer:
        size = len(self._low)
        objective = np.zeros(size)
        objective[list(cost)] = list(cost.values())
        lengths = [len(terms) for terms, _, _ in rows]
        places = np.repeat(np.arange(len(rows)), lengths)
        columns = np.fromiter((v for terms, _, _ in rows for v in terms), dtype=np.int64, count=sum(lengths))
        factors = np.fromiter((f for terms, _, _ in rows for f in terms.values()), dtype=float, count=sum(lengths))
        matrix = coo_array((factors, (places, columns)), shape=(len(rows), size)).tocsc()
        bounds: Any = Bounds  # its annotations know numbers only
        rows_between: Any = LinearConstraint
        result = milp(
            objective,
            integrality=np.zeros(size) if relaxed else np.array(self._integer, dtype=float),
            bounds=bounds(np.array(self._low), np.array(self._high)),
            constraints=rows_between(matrix, [low for _, low, _ in rows], [high for _, _, high in rows]),
            options={"node_limit": MOST_NODES, "mip_rel_gap": gap, "presolve": True},
        )
        found = result.fun if relaxed and result.x is not None else result.mip_dual_bound
        bound = -np.inf if found is None else float(found)
        if result.x is None:
            return Answer(int(result.status), bound * unit, [], [])
        return Answer(
            int(result.status),
            bound * unit,
            [[float(result.x[v]) for v in choose] for choose in self._choose],
            [float(result.x[v]) for v in self._move],
        )


def _less(terms: Sequence[Terms], others: Iterable[Terms]) -> list[Terms]:
    """Per segment, the difference. Those variables come first that ``terms`` has."""
    found = [dict(t) for t in terms]
    for into, other in zip(found, others, strict=False):
        for v, f in other.items():
            into[v] = into.get(v, 0.0) - f
    return found


def _minus(variable: int | None) -> Terms:
    return {} if variable is None else {variable: -1.0}
