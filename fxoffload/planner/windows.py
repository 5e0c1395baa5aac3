"""How many bytes may be under way at each point of a step: its peak stays within a limit, and compute never waits
before the memory is needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fxoffload.planner.link import ConstantRates
from fxoffload.planner.program import Program, program_of
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import TrainingStep
from fxoffload.step.choice import Windows

# Bytes do not depend on rates (see ``simulate``).
_ANY_RATES = ConstantRates(1.0, 1.0)
_MAX_TRIES = 8


def no_windows(step: TrainingStep) -> Windows:
    """Nothing may be under way: the least memory, and compute waits for every copy."""
    return Windows((0,) * (len(step.forward) + 1), (0,) * (len(step.backward) + 1))


def least_peak_bytes(step: TrainingStep, decisions: Sequence[bool]) -> int:
    """Peak of a step in which nothing is under way while a segment runs."""
    return simulate(step, decisions, copies=_ANY_RATES, windows=no_windows(step)).peak_bytes


def windows_for(step: TrainingStep, decisions: Sequence[bool], limit_bytes: int) -> Windows | None:
    """The widest windows under which the step stays within ``limit_bytes``; None where even the narrowest exceed it.

    At each segment, the limit leaves room above the step with nothing under way. A copy to the host may be held for as
    long as the segments up to the next release have that much room. A reload may be ahead if every segment until it is
    read has that much room.
    """
    program = program_of(step)
    bare = simulate(step, decisions, copies=_ANY_RATES, windows=no_windows(step))
    if bare.peak_bytes > limit_bytes:
        return None
    forward = [limit_bytes - bare.boundaries[at].peak_bytes for at in program.forward_at]
    backward = [limit_bytes - bare.boundaries[at].peak_bytes for at in program.backward_at]
    c = program.candidates
    moves = {i for i, go in enumerate(decisions) if go and c.moved_bytes[i]}

    def excess(windows: Windows) -> list[int]:
        found = simulate(step, decisions, copies=_ANY_RATES, windows=windows)
        return [b.peak_bytes - limit_bytes for b in found.boundaries]

    # Copies on their way when a run of forwards ends: the last ones, up to each count.
    queue = [i for ops in program.offloads for op in ops for i in op if i in moves]
    carried = [0, *itertools.accumulate(c.moved_bytes[i] for i in reversed(queue))]
    windows, beyond = no_windows(step), [0]
    for _ in range(_MAX_TRIES):
        windows = _widest(program, moves, forward, backward, carried[-1])
        beyond = excess(windows)
        in_forward = [beyond[at] for at in program.forward_at]
        if max(in_forward, default=0) <= 0:
            break
        # The windows count the bytes that are copied; the bytes held may be more.
        forward = [max(0, s - max(0, e)) for s, e in zip(forward, in_forward, strict=True)]
    if max(beyond, default=0) <= 0:
        return windows
    # Values that are taken back may be held longer than a reload would be, and be more bytes.
    low, high = 0, len(carried) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if max(excess(_widest(program, moves, forward, backward, carried[middle]))) <= 0:
            low = middle
        else:
            high = middle - 1
    windows = _widest(program, moves, forward, backward, carried[low])
    return windows if low or max(excess(windows)) <= 0 else no_windows(step)


def _widest(program: Program, moves: set[int], forward: Sequence[int], backward: Sequence[int], over: int) -> Windows:
    """``over``: most bytes that may still be on their way to the host when a run of forwards ends."""
    nbytes = program.candidates.moved_bytes
    ahead = [0] * (len(backward) + 1)
    in_flight = [0] * (len(forward) + 1)
    # Bytes that are first read at each backward segment: they stop being ahead there.
    read = [0] * (len(backward) + 1)
    for i in moves & {i for takes in program.takes for i, _ in takes}:
        read[program.first_take[i]] += nbytes[i]
    everything = sum(nbytes[i] for i in moves)
    for down, up in program.runs:
        later = everything
        for at in reversed(up):
            later += read[at + 1]
            if program.is_gap[at]:  # the next reloads are asked for after it
                ahead[at + 1] = later
            later = min(backward[at], later)
            if not program.is_gap[at]:
                ahead[at + 1] = later
        begin = later + read[up.start]
        if up.start == 0:
            ahead[0] = begin
        until = min(begin, over)  # after the last release: copies still held go over into the backwards
        for at in range(down.stop, down.start - (down.start == 0), -1):
            if at < down.stop:
                until = min(until, forward[at])
            if program.releases[at]:
                in_flight[at] = until
                until = everything
    return Windows(tuple(in_flight), tuple(ahead))
