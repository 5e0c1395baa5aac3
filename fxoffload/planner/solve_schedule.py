"""The cost of one choice: the shortest step within given bytes, in closed form.

The model, for a choice and a memory of M bytes. Copies are a flow, not single transfers:

- Down: a copy may begin after ``copy_after``. Before a forward segment runs, the bytes made so far must fit, less those
  that were copied and are read no more. Compute waits until enough has been copied. As soon as possible is best for
  copies, as late as possible for waits: no other order is ever shorter.
- At the turn all copies are done; the caller's memory is copied whenever nothing else is.
- Up: reloads run from the beginning of the backward, in the order of need, as far ahead as M allows now and later.
  Before a backward segment runs, all storages that it and its predecessors need must be back.

Where forwards begin after backwards, a storage takes bytes only from its own forward to its own backward. Copies flow
as above, over all forwards and then all backwards. But nothing is reloaded for a later run of backwards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from fxoffload.planner.problem import Problem, ProblemStorage


class SolverSchedule(NamedTuple):
    """Times of a step, in milliseconds. ``exposed_ms``: of waits for copies."""

    ms: float
    exposed_ms: float


class Loads:
    """The bytes and times of one choice, summed by segment. Storages and variants can be exchanged one by one.

    Lists are of changes: the bytes at a segment are the sum up to it.
    """

    def __init__(self, problem: Problem, variants: Iterable[int], offloaded: Iterable[str]) -> None:
        self.problem = problem
        self.variants = list(variants)
        self.offloaded = set(offloaded)
        self.moved = 0  # bytes of all that is offloaded
        forward, backward = len(problem.forward_ms), len(problem.backward_ms)
        self._made = [0] * (forward + 1)
        self._ready = [0] * (forward + 1)
        self._freed = [0] * (forward + 1)
        self._inputs = 0  # offloaded bytes of the caller's memory
        self._kept = [0] * (backward + 1)  # kept bytes that appear
        self._dies = [0] * (backward + 2)
        self._gone = [0] * (forward + 1)  # kept bytes that died in backwards before
        self._needs = [0] * (backward + 1)
        self._backward_ms = list(problem.backward_ms)
        self._backward_bytes = list(problem.backward_bytes)
        for at in range(len(self.variants)):
            self._count_variant(at, 1)

    def storages_of(self, layer: int) -> tuple[ProblemStorage, ...]:
        """The storages that the chosen variant of a layer saves."""
        return self.problem.layers[layer].variants[self.variants[layer]].storages

    def saved(self) -> list[ProblemStorage]:
        """The same of all layers."""
        return [storage for layer in range(len(self.variants)) for storage in self.storages_of(layer)]

    def choose(self, layer: int, variant: int) -> None:
        """Exchange the variant of a layer. Its offloaded storages stay offloaded where that is allowed."""
        self._count_variant(layer, -1)
        moves = {i.name for i in self.storages_of(layer)} & self.offloaded
        self.offloaded -= moves
        self.variants[layer] = variant
        self.offloaded |= {i.name for i in self.storages_of(layer) if i.fixed or (i.name in moves and i.may_move)}
        self._count_variant(layer, 1)

    def set(self, storage: ProblemStorage, *, offload: bool) -> None:
        """Keep or offload a storage of a chosen variant."""
        if (storage.name in self.offloaded) == offload:
            return
        self._count(storage, not offload, -1)
        self._count(storage, offload, 1)
        (self.offloaded.add if offload else self.offloaded.discard)(storage.name)

    def _count_variant(self, layer: int, sign: int) -> None:
        variant = self.problem.layers[layer].variants[self.variants[layer]]
        for at, ms in variant.extra_ms.items():
            self._backward_ms[at] += sign * ms
        for at, nbytes in variant.extra_bytes.items():
            self._backward_bytes[at] += sign * nbytes
        for storage in variant.storages:
            self._count(storage, storage.name in self.offloaded, sign)

    def _count(self, storage: ProblemStorage, offload: bool, sign: int) -> None:
        held, moved = sign * storage.held_bytes, sign * storage.moved_bytes
        self._made[max(storage.made_at, 0)] += held
        if offload:
            self.moved += moved
        if not offload or self.problem.is_taken_back(storage):
            self._kept[self.problem.backward_after[max(storage.made_at, 0)]] += held
            self._dies[storage.dies_at + 1] += held
            self._gone[self.problem.forward_after[storage.dies_at]] += held
            return
        self._dies[storage.dies_at + 1] += moved
        self._needs[storage.needed_at] += moved
        if not storage.held_bytes:
            self._inputs += moved
            return
        self._ready[storage.copy_after + 1] += sign * storage.copied_bytes
        self._freed[storage.freed_before] += held

    def fits_host(self) -> bool:
        """Whether the host has room for the offloaded storages."""
        return self.problem.host_bytes is None or self.moved <= self.problem.host_bytes

    def _backward_base(self) -> list[int]:
        """Per backward segment, all bytes but for reloads: minus those that were reloaded and died."""
        sums = zip(accumulate(self._kept), accumulate(self._dies), self._backward_bytes, strict=False)
        return [kept - dead + nbytes for kept, dead, nbytes in sums]

    def least_bytes(self) -> int:
        """The bytes below which no waiting helps."""
        sums = zip(accumulate(self._made), accumulate(self._freed), accumulate(self._gone), strict=True)
        present = [made - freed - gone for made, freed, gone in sums]
        forward = [p + b for p, b in zip(present, self.problem.forward_bytes, strict=False)]
        backward = [b + n for b, n in zip(self._backward_base(), accumulate(self._needs), strict=False)]
        return max((*forward, *backward), default=0)

    def schedule(self, budget: int) -> SolverSchedule | None:
        """The shortest step within ``budget`` bytes; None: it does not fit."""
        room = [budget - b for b in self._backward_base()]
        needs = list(accumulate(self._needs))
        if any(n > r for n, r in zip(needs, room, strict=False)):
            return None
        until = self.problem.reloads_until
        for at in range(len(room) - 2, -1, -1):
            room[at] = min(room[at], room[at + 1] if until[at] == until[at + 1] else needs[at])
        down = self._forward(budget)
        if down is None:
            return None
        waits, left = down
        rate = self.problem.d2h_bytes_per_ms
        copied = sum(self._ready) + self._inputs
        waits += max(left / rate, copied / rate - sum(self.problem.forward_ms) - waits, 0.0)
        waits += self._backward(needs, room)
        ms = sum(self.problem.forward_ms) + sum(self._backward_ms)
        return SolverSchedule(ms + waits, waits)

    def _forward(self, budget: int) -> tuple[float, float] | None:
        """Waits of the forward, and the bytes still to copy at its end."""
        problem, rate = self.problem, self.problem.d2h_bytes_per_ms
        waits = copied = 0.0
        present = ready = freed = 0
        for at, ms in enumerate(problem.forward_ms):
            present += self._made[at] - self._gone[at]
            ready += self._ready[at]
            freed += self._freed[at]
            lack = present + problem.forward_bytes[at] - budget
            if lack > freed:
                return None
            if lack > copied:
                waits += (lack - copied) / rate
                copied = lack
            copied = min(ready, copied + ms * rate)
        return waits, ready + self._ready[-1] - copied

    def _backward(self, needs: list[int], room: list[int]) -> float:
        """Waits of the backward."""
        rate = self.problem.h2d_bytes_per_ms
        waits = back = 0.0
        for at, ms in enumerate(self._backward_ms):
            if needs[at] > back:
                waits += (needs[at] - back) / rate
                back = needs[at]
            back = max(back, min(back + ms * rate, room[at]))
        return waits + max(needs[-1] - back, 0.0) / rate

    def peak_bytes(self, ms: float) -> int | None:
        """The least bytes in which the step takes at most ``ms``; None: it always takes longer."""
        low = self.least_bytes()
        high = low + sum(self._made) + self.moved
        if not self._within(high, ms):
            return None
        return low + bisect_left(range(low, high), True, key=lambda nbytes: self._within(nbytes, ms))

    def _within(self, budget: int, ms: float) -> bool:
        schedule = self.schedule(budget)
        return schedule is not None and schedule.ms <= ms * (1 + 1e-9) + 1e-9
