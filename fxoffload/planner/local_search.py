"""Exchanges single decisions of a schedule while the simulator finds the step better.

The solver's copies are a flow. In a step a reload needs memory for all of its value before it begins: one that does not
quite fit waits until something else is gone, and compute waits for it. Which values are those, the simulator knows
(``refine``). It also knows who holds an input, and which bytes are allocated while a reload comes in. And where the
host has no room for everything, the candidates that move have to be chosen (``lower_peak``).

Tries are counted, not timed, so that all ranks find the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from fxoffload.planner.program import program_of
from fxoffload.planner.simulate import Simulation
from fxoffload.planner.steps import TrainingStep
from fxoffload.planner.windows import least_peak_bytes

Decisions = tuple[bool, ...]  # one per ``step.candidates``: offload or keep
State = TypeVar("State")


class _Scheduled(Protocol):
    @property
    def offload(self) -> Decisions: ...

    @property
    def simulation(self) -> Simulation: ...

    @property
    def key(self) -> tuple[float, int]: ...


Found = TypeVar("Found", bound=_Scheduled)

# Waits below this part of a step are left alone.
_WORTH = 2e-3
# Candidates smaller than this part of the largest are not exchanged.
_SMALL = 0.05
# Most exchanges, and most simulated segments in all.
MAX_TRIES = 800
_MAX_SEGMENTS = 60_000
_MAX_PEAK_TRIES = 600
_MAX_PEAK_SEGMENTS = 40_000


def refine(
    step: TrainingStep,
    found: Found,
    settle: Callable[[Decisions], Found | None],
    fixed: Mapping[str, bool],
    max_tries: int = MAX_TRIES,
) -> Found:
    """A schedule at least as good as ``found``: compute waits less for copies.

    Args:
        settle: the schedule with these decisions, within the same limit; None where there is none.
        fixed: candidates that are not to be decided.
    """

    def neighbours(found: Found) -> Iterable[Decisions]:
        if found.simulation.exposed_ms <= _WORTH * found.simulation.step_ms:
            return ()
        return _exchanges(step, found.offload, fixed)

    def better(offload: Decisions, found: Found) -> Found | None:
        other = settle(offload)
        return other if other is not None and other.key < found.key else None

    return _first_better(found, neighbours, better, min(max_tries, _MAX_SEGMENTS // _num_segments(step)))


def lower_peak(
    step: TrainingStep, offload: Decisions, within_host: Callable[[Decisions], bool], fixed: Mapping[str, bool]
) -> tuple[int, Decisions]:
    """The least peak found, in bytes, with nothing under way, and its decisions; at most that of ``offload``. How long
    the step takes does not count.

    Args:
        within_host: whether what these decisions move fits on the host.
        fixed: candidates that are not to be decided.
    """

    def better(offload: Decisions, found: tuple[int, Decisions]) -> tuple[int, Decisions] | None:
        peak = least_peak_bytes(step, offload)
        return (peak, offload) if peak < found[0] else None

    return _first_better(
        (least_peak_bytes(step, offload), offload),
        lambda found: _moves(step, found[1], within_host, fixed),
        better,
        min(_MAX_PEAK_TRIES, _MAX_PEAK_SEGMENTS // _num_segments(step)),
    )


def _first_better(
    found: State,
    neighbours: Callable[[State], Iterable[Decisions]],
    better: Callable[[Decisions, State], State | None],
    tries: int,
) -> State:
    """Goes to the first neighbour that is better, and on from there, until none is or there were ``tries``."""
    improved = True
    while improved:
        improved = False
        for offload in neighbours(found):
            if tries <= 0:
                return found
            tries -= 1
            other = better(offload, found)
            if other is not None:
                found, improved = other, True
                break
    return found


def _num_segments(step: TrainingStep) -> int:
    return max(1, len(step.forward) + len(step.backward))


def _exchanges(step: TrainingStep, offload: Sequence[bool], fixed: Mapping[str, bool]) -> Iterator[tuple[bool, ...]]:
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


def _moves(
    step: TrainingStep,
    offload: tuple[bool, ...],
    within_host: Callable[[tuple[bool, ...]], bool],
    fixed: Mapping[str, bool],
) -> Iterator[tuple[bool, ...]]:
    """Another one moves; one stays that the step does not hold, or less of it than is moved; where the host has no room
    for another, it takes the place of one. Largest first."""
    c = program_of(step).candidates
    free = sorted(
        (i for i, name in enumerate(c.names) if c.moved_bytes[i] and name not in fixed),
        key=lambda i: (-c.moved_bytes[i], i),
    )

    def turned(*which: int) -> tuple[bool, ...]:
        return tuple(go != (i in which) for i, go in enumerate(offload))

    crowded = []
    for i in free:
        if offload[i]:
            if c.held_bytes[i] < c.moved_bytes[i]:
                yield turned(i)
        elif within_host(turned(i)):
            yield turned(i)
        else:
            crowded.append(i)
    for i in crowded:
        yield from (other for j in free if offload[j] and within_host(other := turned(i, j)))
