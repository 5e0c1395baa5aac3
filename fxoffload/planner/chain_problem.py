"""Which variant each call of a chain should run, as a problem for the solver: a call is a layer, each variant of
its graph a ``LayerVariant``.

Segments of variants differ, and so do the storages that pass between calls. So the chain is laid out once for each
variant, with all calls running it. The values that a call saves under a variant are read off there; their places are
counted in the segments of the first layout. A chain that mixes variants is close to that, not equal: a chain that the
solver proposes has to be laid out and simulated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import replace

from fxoffload.planner.chain import Chain
from fxoffload.planner.formulate import other_bytes, problem_of, storages_of
from fxoffload.planner.problem import LayerVariant, Problem, ProblemLayer, ProblemStorage, Solution
from fxoffload.planner.rates import ProfileRates
from fxoffload.step.readings import PHASES

# A storage that passes between calls may be one call's under a variant and another one's under another.
_OWNED = ": "


def chain_problem(
    layouts: Sequence[Chain],
    counts: Sequence[int],
    kinds: Sequence[Hashable],
    rates: ProfileRates,
    *,
    host_bytes: int | None = None,
) -> Problem:
    """The problem of one chain whose calls may run variants.

    Args:
        layouts: number j has each call run its variant j, or its last one. The first has the graphs as compiled.
        counts: per call, how many variants there are to choose from, at least 1.
        kinds: per call, a key of its graph: calls of one kind have the same variants.

    Raises:
        ValueError: layouts of different chains.
    """
    if len({len(c.sizes) for c in layouts}) != 1 or len(counts) != len(kinds) or len(counts) != len(layouts[0].sizes):
        raise ValueError("expected layouts of one chain, and a count and a kind for each of its calls")
    found = [_Layout(layout, layouts[0]) for layout in layouts]
    layers = [
        ProblemLayer(f"call {k}", kinds[k], tuple(found[j].variant(k, j) for j in range(count)))
        for k, count in enumerate(counts)
    ]
    return problem_of(layouts[0].step, rates, layers=layers, host_bytes=host_bytes)


def of_call(call: int, name: str) -> str:
    """The name in such a problem of a storage of the chain that a call decides about."""
    return f"call {call}{_OWNED}{name}"


def in_names_of_chain(solution: Solution) -> Solution:
    """``solution`` of such a problem, with storages by their names in the chain that is laid out from it."""
    return replace(solution, offloaded=frozenset(name.partition(_OWNED)[2] for name in solution.offloaded))


class _Layout:
    """One layout, in the places of the first one."""

    def __init__(self, chain: Chain, onto: Chain) -> None:
        self._chain, self._onto = chain, onto
        self._backwards = sorted((at, k) for k, at in enumerate(chain.backward))
        owner = {name: k for k, names in enumerate(chain.candidates) for name in names if name is not None}
        self._items: dict[int, list[ProblemStorage]] = {}
        for storage in storages_of(chain.step):
            k = owner[storage.name]
            self._items.setdefault(k, []).append(self._moved_over(storage, k))
        self._bytes = other_bytes(chain.step)[1]
        self._onto_bytes = other_bytes(onto.step)[1]

    def variant(self, call: int, number: int) -> LayerVariant:
        """The ``LayerVariant`` of a call in this layout."""
        first, count = self._onto.backward[call], self._onto.sizes[call][1]
        extra_ms = self._ms(self._chain, call) - self._ms(self._onto, call)
        # No segment takes less than nothing.
        extra_ms = max(extra_ms, -self._onto.step.backward[first].ms)
        extra = {q: max(self._most_bytes(call, q) - self._onto_bytes[q], 0) for q in range(first, first + count)}
        return LayerVariant(
            f"call {call}, variant {number}",
            tuple(self._items.get(call, ())),
            {first: extra_ms} if extra_ms else {},
            {q: b for q, b in extra.items() if b},
        )

    @staticmethod
    def _ms(chain: Chain, call: int) -> float:
        """Time of the call's segments, both ways."""
        return sum(s.ms for phase in PHASES for s in chain.segments_of_calls(phase)[call])

    def _most_bytes(self, call: int, onto: int) -> int:
        """The most that is no candidate in the segments that a place of the first layout stands for."""
        first, count = self._chain.backward[call], self._chain.sizes[call][1]
        places = range(first, first + count)
        return max((self._bytes[p] for p in places if self._needed(p) <= onto <= self._dies(p)), default=0)

    # -- places --------------------------------------------------------------------------------------------------------

    def _moved_over(self, storage: ProblemStorage, call: int) -> ProblemStorage:
        return replace(
            storage,
            name=of_call(call, storage.name),
            made_at=self._forward(storage.made_at),
            copy_after=self._forward(storage.copy_after),
            freed_after=self._forward(storage.freed_after),
            needed_at=self._needed(storage.needed_at),
            dies_at=self._dies(storage.dies_at),
        )

    def _forward(self, at: int) -> int:
        """The end of a forward segment."""
        if at < 0:
            return at
        call = bisect_right(self._chain.forward, at) - 1
        offset, count = at - self._chain.forward[call], self._chain.sizes[call][0]
        return self._onto.forward[call] - (-offset * self._onto.sizes[call][0] // count)

    def _needed(self, at: int) -> int:
        """The beginning of a backward segment."""
        call, offset, count = self._backward(at)
        if call < 0:
            return len(self._onto.step.backward)
        size = self._onto.sizes[call][1]
        return self._onto.backward[call] + (size if offset >= count else offset * size // count)

    def _dies(self, at: int) -> int:
        """The end of a backward segment."""
        call, offset, count = self._backward(at)
        if call < 0:
            return len(self._onto.step.backward)
        size = self._onto.sizes[call][1]
        return self._onto.backward[call] + (size if offset >= count else -(-(offset + 1) * size // count) - 1)

    def _backward(self, at: int) -> tuple[int, int, int]:
        """Call, offset in it, and how many segments it has; the entry of the next call follows them. Call -1: the
        step's end."""
        if at >= len(self._chain.step.backward):
            return -1, 0, 1
        first, call = self._backwards[bisect_right(self._backwards, (at, len(self._backwards))) - 1]
        return call, at - first, self._chain.sizes[call][1]
