"""Memory of a step that no graph knows of: what eager code and FSDP have on the device while the graphs run.

FSDP gathers the parameters of the next layer while one computes, and reduces the gradients of the last one. A budget
that leaves no room for them is not met. What was seen on the device when calls began, less what the graphs take there,
counts as working set of all segments of these calls.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxoffload.planner.chain import BESIDE_NOTHING, Beside, Chain
from fxoffload.planner.simulate import Simulation
from fxoffload.runtime.held import CallAt
from fxoffload.runtime.segment_readings import PHASES, Phase, Readings


def beside_when_calls_begin(chain: Chain, graphs: Simulation, live_bytes: Mapping[CallAt, int]) -> Beside:
    """By what was on the device when each call began.

    Args:
        chain: that ran, with nothing beside it.
        graphs: what it takes as it ran.
        live_bytes: as of ``fxoffload.runtime.calls``; nothing is known where it is empty.
    """
    if not live_bytes:
        return BESIDE_NOTHING
    known: dict[CallAt, int] = {}
    first = len(chain.step.forward)
    for call, (down, up) in enumerate(zip(chain.forward, chain.backward, strict=True)):
        # Behind the entry, or what stands in its place: what the caller made for the call is there, no reload is.
        known["forward", call] = graphs.boundaries[down].after_bytes
        known["backward", call] = graphs.boundaries[first + up - 1].after_bytes
    found = {at: max(nbytes - known[at], 0) for at, nbytes in live_bytes.items()}
    return tuple(tuple(found.get((phase, k), 0) for k in range(len(chain.sizes))) for phase in PHASES)


def beside_segments(chain: Chain, graphs: Simulation, readings: Readings) -> Beside:
    """By what was measured before each segment, and by the peak of the step, which may lie between calls.

    Args:
        chain: that ran, with nothing beside it.
        graphs: what it takes as it ran, by what was measured of its segments.
        readings: of the steps.
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
    between = max((readings.peak_bytes() or 0) - known, 0)
    return tuple(tuple(n + between for n in found[phase]) for phase in PHASES)
