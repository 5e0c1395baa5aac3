"""Memory used by the step outside compiled graphs: by eager code and by FSDP while the graphs run.

FSDP gathers the parameters of the next layer while one computes, and reduces the gradients of the last one. A budget
that leaves no room for them is not met. The excess over the graphs' own memory when a call begins counts as working set
of all segments of that call. The excess between two calls counts as working set of the empty segment between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from fxoffload.planner.chain import NO_EXTRA_MEMORY, Chain, ExtraMemory
from fxoffload.planner.simulate import Boundary, Simulation
from fxoffload.step.edges import CallAt
from fxoffload.step.readings import PHASES, Phase, Readings
from fxoffload.step.segment_names import TURN, lies_between


def extra_memory_when_calls_begin(
    chain: Chain,
    graphs: Simulation,
    live_bytes: Mapping[CallAt, int],
    gap_bytes: Mapping[CallAt, int] = MappingProxyType({}),
) -> ExtraMemory:
    """From the memory on the device when each call began, and the most between each call and the one before.

    Args:
        chain: that ran, without memory outside its graphs.
        graphs: its simulation as it ran, with a segment for the turn (``with_turn``).
        live_bytes: as of ``fxoffload.runtime.tracker.step_tracker``; nothing is known where it is empty.
        gap_bytes: as of ``fxoffload.runtime.tracker.step_tracker``.
    """
    if not live_bytes:
        return NO_EXTRA_MEMORY
    entries = _entries(chain, graphs)
    # Compare with the memory after the entry, or after the turn. There the caller's inputs for the call exist, no
    # reload has begun, and copies to the host have ended and freed their sources.
    found = {at: max(nbytes - entries[at].after_bytes, 0) for at, nbytes in live_bytes.items()}
    gaps = []
    for (phase, call), nbytes in gap_bytes.items():
        more = nbytes + found.get((phase, call), 0)
        entry = entries[phase, call]
        if entry.segment == TURN:
            gaps.append((TURN, more))
        else:
            # The inputs made for the call in this gap do not exist yet when the segment of the entry begins.
            gaps.append((entry.segment, more + max(entry.after_bytes - entry.live_bytes, 0)))
    calls = tuple(tuple(found.get((phase, k), 0) for k in range(len(chain.sizes))) for phase in PHASES)
    return ExtraMemory(calls, tuple((name, nbytes) for name, nbytes in gaps if nbytes))


def _entries(chain: Chain, graphs: Simulation) -> dict[CallAt, Boundary]:
    """The empty segment before each call."""
    found = {b.segment: b for b in graphs.boundaries if lies_between(b.segment)}  # no two of them have one name
    calls: list[CallAt] = [(phase, call) for phase in PHASES for call in range(len(chain.sizes))]
    return {at: found[chain.gap_before(at)] for at in calls}


def raised(extra_memory: ExtraMemory, nbytes: int, num_calls: int) -> ExtraMemory:
    """``extra_memory`` with that many bytes more at every place."""
    if not nbytes:
        return extra_memory
    calls = extra_memory.calls or ((0,) * num_calls,) * len(PHASES)
    return ExtraMemory(
        tuple(tuple(n + nbytes for n in row) for row in calls),
        tuple((name, n + nbytes) for name, n in extra_memory.gaps),
    )


def extra_memory_of_larger(
    size: int, seen: tuple[int, ExtraMemory], other: tuple[int, ExtraMemory] | None
) -> ExtraMemory:
    """Memory outside the graphs for calls larger than the observed ones.

    Eager code takes more there; gathered parameters take the same. Where another size was observed too, the two tell
    how much of it grows. Otherwise all of it counts as growing.

    Args:
        size: of the calls that are asked about, in any unit that eager code's memory is in proportion to.
        seen: size of the observed calls, and memory outside their graphs.
        other: the same of another size.
    """
    mine, found = seen
    if size <= mine or mine <= 0:
        return found
    if other is None or other[0] == mine:
        return _each(found, lambda nbytes, _: -(-nbytes * size // mine), NO_EXTRA_MEMORY)
    far, before = other[0], other[1]

    def grown(nbytes: int, then: int | None) -> int:
        slope = 0.0 if then is None else max((nbytes - then) / (mine - far), 0.0)
        return nbytes + math.ceil(slope * (size - mine))

    return _each(found, grown, before)


def _each(found: ExtraMemory, change: Callable[[int, int | None], int], before: ExtraMemory) -> ExtraMemory:
    """``found`` with other bytes. ``change``: gets each of its numbers, and the number there in ``before``."""
    calls = []
    for phase, row in enumerate(found.calls):
        then = before.calls[phase] if phase < len(before.calls) else ()
        calls.append(tuple(change(n, then[k] if k < len(then) else None) for k, n in enumerate(row)))
    gaps = dict(before.gaps)
    return ExtraMemory(tuple(calls), tuple((name, change(n, gaps.get(name))) for name, n in found.gaps))


def extra_memory_of_segments(
    chain: Chain, graphs: Simulation, readings: Readings, before: ExtraMemory = NO_EXTRA_MEMORY
) -> ExtraMemory:
    """From the memory measured before each segment and between the calls, and from the peak of the step.

    Args:
        chain: that ran, without memory outside its graphs.
        graphs: its simulation as it ran, with measured segments.
        before: known memory between calls: it counts where there is no measurement now.
    """
    boundaries = {(b.phase, b.segment): b for b in graphs.boundaries}
    seen, known = readings.live_before(), 0
    found: dict[Phase, list[int]] = {phase: [] for phase in PHASES}
    for phase in PHASES:
        for segments in chain.segments_of_calls(phase):
            own = [boundaries[phase, s.name] for s in segments]
            most = max((seen.get(phase, {}).get(b.segment, 0) - b.live_bytes for b in own), default=0)
            found[phase].append(max(most, 0))
            known = max(known, *(b.peak_bytes + found[phase][-1] for b in own))
    gaps = _gaps(graphs.boundaries, readings, dict(before.gaps))
    # Gaps that were measured explain the peak; those that are assumed to be like them do not. An unexplained rest
    # has no known place.
    known = max([known, *readings.gap_peaks().values()])
    rest = max((readings.peak_bytes() or 0) - known, 0)
    calls = tuple(tuple(n + rest for n in found[phase]) for phase in PHASES)
    return ExtraMemory(calls, tuple((name, nbytes) for name, nbytes in gaps.items() if nbytes))


def _gaps(boundaries: Sequence[Boundary], readings: Readings, before: Mapping[str, int]) -> dict[str, int]:
    """Memory allocated between calls above the chain's own, measured now or ``before``.

    Calls are mostly alike. Where the peak of the process hid the memory between two of them, it counts as much as
    between others of the phase, unless that is above the bound for the whole step.
    """
    peaks, bounds = readings.gap_peaks(), readings.peak_bounds_bytes()
    found: dict[str, int] = {}
    for phase in PHASES:
        empty = [b for b in boundaries if b.phase == phase and lies_between(b.segment)]
        known = {b.segment: max(peaks[b.segment] - b.live_bytes, 0) for b in empty if b.segment in peaks}
        usual = max((nbytes for name, nbytes in known.items() if name != TURN), default=0)
        for b in empty:
            most = usual if bounds is None else min(usual, max(bounds[1] - b.live_bytes, 0))
            hidden = 0 if b.segment == TURN else most
            found[b.segment] = known.get(b.segment, before.get(b.segment, hidden))
    return found
