"""How many bytes may be under way at each point of a step: its peak stays within a limit, and nobody waits before the
memory is needed."""

from __future__ import annotations

from collections.abc import Sequence

from fxoffload.planner.link import ConstantRates
from fxoffload.planner.program import Program, program_of
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import TrainingStep
from fxoffload.runtime.windows import Windows

# Bytes do not depend on rates (see ``simulate``).
_ANY_RATES = ConstantRates(1.0, 1.0)
_MAX_TRIES = 6


def no_windows(step: TrainingStep) -> Windows:
    """Nothing may be under way: the least memory, and compute waits for every copy."""
    return Windows((0,) * (len(step.forward) + 1), (0,) * (len(step.backward) + 1))


def least_peak_bytes(step: TrainingStep, decisions: Sequence[bool]) -> int:
    """Peak of a step in which nothing is under way while a segment runs."""
    return simulate(step, decisions, copies=_ANY_RATES, windows=no_windows(step)).peak_bytes


def windows_for(step: TrainingStep, decisions: Sequence[bool], limit_bytes: int) -> Windows | None:
    """The widest windows under which the step stays within ``limit_bytes``; None where even the narrowest exceed it.

    At each segment, what the step takes with nothing under way leaves a rest. A copy to the host may be held for as
    long as the segments up to the next release have that much to spare; a reload may be ahead if every segment until it
    is read has.
    """
    program = program_of(step)
    bare = simulate(step, decisions, copies=_ANY_RATES, windows=no_windows(step))
    if bare.peak_bytes > limit_bytes:
        return None
    peaks = [b.peak_bytes for b in bare.boundaries]
    c = program.candidates
    # The windows count what is copied; what is held may be more.
    moves = [i for i, go in enumerate(decisions) if go and c.moved_bytes[i]]
    slop = sum(max(0, c.held_bytes[i] - c.moved_bytes[i]) for i in moves)
    room = limit_bytes - slop
    windows = no_windows(step)
    for _ in range(_MAX_TRIES):
        windows = _widest(program, set(moves), peaks, room)
        excess = simulate(step, decisions, copies=_ANY_RATES, windows=windows).peak_bytes - limit_bytes
        if excess <= 0:
            return windows
        room -= excess
    return no_windows(step)


def _widest(program: Program, moves: set[int], peaks: Sequence[int], room: int) -> Windows:
    num_forward = len(program.made)
    spare = [max(0, room - p) for p in peaks]
    forward, backward = spare[:num_forward], spare[num_forward:]
    nbytes = program.candidates.moved_bytes

    ahead = [0] * (len(backward) + 1)
    # Bytes that are first read at each backward segment: they stop being ahead there.
    seen: set[int] = set()
    read = [0] * (len(backward) + 1)
    for at, takes in enumerate(program.takes):
        for i in {i for i, _ in takes} & moves - seen:
            seen.add(i)
            read[at] += nbytes[i]
    later = sum(nbytes[i] for i in moves)
    for at in range(len(backward) - 1, -1, -1):
        later = min(backward[at], later + read[at + 1])
        ahead[at + 1] = later
    ahead[0] = later + read[0]

    in_flight = [0] * (num_forward + 1)
    until = ahead[0]  # behind the last release: what is still held goes over into the backward
    for at in range(num_forward, -1, -1):
        if at < num_forward:
            until = min(until, forward[at])
        if program.releases[at]:
            in_flight[at] = until
            until = room
    return Windows(tuple(in_flight), tuple(ahead))
