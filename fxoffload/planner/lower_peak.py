"""Turns single decisions while the peak of a step falls, however long it takes.

The solver lacks two things that the simulator knows: who holds an input, and which bytes are allocated while a reload
comes in. And where the host has no room for everything, the candidates that move have to be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fxoffload.planner.program import program_of
from fxoffload.planner.steps import TrainingStep
from fxoffload.planner.windows import least_peak_bytes

# Most simulated segments, and most choices: counted, not timed, so that all ranks find the same.
_MAX_SEGMENTS = 40_000
_MAX_TRIES = 600


def lower_peak(
    step: TrainingStep,
    offload: tuple[bool, ...],
    within_host: Callable[[tuple[bool, ...]], bool],
    fixed: Mapping[str, bool],
) -> tuple[int, tuple[bool, ...]]:
    """The least peak found, in bytes, with nothing under way, and its decisions; at most that of ``offload``.

    Args:
        step: that is scheduled.
        offload: to begin with; one per ``step.candidates``.
        within_host: whether what these decisions move fits on the host.
        fixed: candidates that are not to be decided.
    """
    peak = least_peak_bytes(step, offload)
    left = min(_MAX_TRIES, _MAX_SEGMENTS // max(1, len(step.forward) + len(step.backward)))
    improved = True
    while improved:
        improved = False
        for other in _neighbours(step, offload, within_host, fixed):
            if left <= 0:
                return peak, offload
            left -= 1
            lower = least_peak_bytes(step, other)
            if lower < peak:
                peak, offload, improved = lower, other, True
                break
    return peak, offload


def _neighbours(
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
