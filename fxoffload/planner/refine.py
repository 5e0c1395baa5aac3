"""Exchanges single decisions of a schedule while the simulation says that compute waits less.

The solver's copies are a flow. In a step a reload needs memory for all of its value before it begins: one that does not
quite fit waits until something else is gone, and compute waits for it. Which values are those, the simulation knows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from fxoffload.planner.simulate import Simulation
from fxoffload.planner.steps import TrainingStep


class _Scheduled(Protocol):
    @property
    def offload(self) -> tuple[bool, ...]: ...

    @property
    def simulation(self) -> Simulation: ...

    @property
    def key(self) -> tuple[float, int]: ...


Found = TypeVar("Found", bound=_Scheduled)

# Waits below this part of a step are left alone.
_WORTH = 2e-3
# Candidates smaller than this part of the largest are not exchanged.
_SMALL = 0.05
# Most simulated segments in all, and most exchanges: counted, not timed, so that all ranks find the same.
_MAX_SEGMENTS = 60_000
MAX_TRIES = 800


def refine(
    step: TrainingStep,
    found: Found,
    settle: Callable[[tuple[bool, ...]], Found | None],
    fixed: Mapping[str, bool],
    max_tries: int = MAX_TRIES,
) -> Found:
    """A schedule at least as good as ``found``.

    Args:
        step: that is scheduled.
        found: to begin with.
        settle: the schedule with these decisions, within the same limit; None where there is none.
        fixed: candidates that are not to be decided.
        max_tries: most exchanges.
    """
    left = min(max_tries, _MAX_SEGMENTS // max(1, len(step.forward) + len(step.backward)))
    improved = True
    while improved and left > 0:
        improved = False
        for offload in _neighbours(step, found.offload, fixed):
            if left <= 0 or found.simulation.exposed_ms <= _WORTH * found.simulation.step_ms:
                return found
            left -= 1
            other = settle(offload)
            if other is not None and other.key < found.key:
                found, improved = other, True
                break
    return found


def _neighbours(step: TrainingStep, offload: Sequence[bool], fixed: Mapping[str, bool]) -> Iterator[tuple[bool, ...]]:
    """One decision the other way, then two of one size exchanged."""
    largest = max((c.moved_bytes or 0 for c in step.candidates), default=0)
    groups: dict[int, list[int]] = defaultdict(list)
    for i, candidate in enumerate(step.candidates):
        nbytes = candidate.moved_bytes or 0
        if nbytes and nbytes >= _SMALL * largest and candidate.name not in fixed:
            groups[nbytes].append(i)

    def turned(*which: int) -> tuple[bool, ...]:
        return tuple(not go if i in which else go for i, go in enumerate(offload))

    by_size = sorted(groups)
    for nbytes in by_size:
        yield from (turned(i) for i in groups[nbytes])
    for nbytes in reversed(by_size):
        goes = [i for i in groups[nbytes] if offload[i]]
        stays = [i for i in groups[nbytes] if not offload[i]]
        pairs = [(a, b) for a in goes for b in stays]
        yield from (turned(a, b) for a, b in sorted(pairs, key=lambda p: (abs(p[0] - p[1]), p)))
