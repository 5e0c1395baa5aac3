"""How fast copies are beside collectives, and which forward calls are paced for it.

See [Note: Streams that wait] in ``fxoffload.runtime.host_lead``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxoffload.planner.chain import Chain
from fxoffload.planner.link import CopyRates
from fxoffload.planner.rates import BESIDE_COLLECTIVES, ProfileRates, beside_collectives
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.steps import SegmentStep

# Part of the link that copies to the host reach where forwards are paced: 0.99 beside one GPU's collectives; two GPUs
# that copied at once, and whose streams waited for nothing, reached 0.95 to 0.98 (H200, 2026-11-23).
PACED = 0.96
# Where copies take less than this part of the forwards, they do not need all of the link.
_BUSY = 0.5
# The host has as long as a call to launch the next one: a shorter one might find it late.
_LEAST_MS = 5.0
# Of the forwards' time, what has to be in calls that are long enough.
_MOST_OF_ALL = 0.9

# Per call, the segments of its forward.
Calls = Sequence[Iterable[SegmentStep]]


def rates_with_pace(rates: ProfileRates, calls: Calls) -> ProfileRates:
    """What copies reach where forwards are paced, from what they reach where the host runs ahead."""
    times = _times(calls)
    if not beside_collectives() or sum(ms for ms in times if _is_long(ms)) < _MOST_OF_ALL * sum(times):
        return rates
    return rates.reaching(PACED / BESIDE_COLLECTIVES, 1.0)


def paced_calls(chain: Chain, schedule: Schedule, copies: CopyRates) -> tuple[bool, ...]:
    """Per call, whether its forward is paced under this schedule."""
    copies_ms = copies.copy_ms(schedule.simulation.bytes_offloaded, "d2h", False)
    needs_link = beside_collectives() and copies_ms > _BUSY * sum(s.ms for s in chain.step.forward)
    return tuple(needs_link and _is_long(ms) for ms in _times(chain.segments_of_calls("forward")))


def _times(calls: Calls) -> list[float]:
    return [sum(s.ms for s in segments) for segments in calls]


def _is_long(ms: float) -> bool:
    return ms >= _LEAST_MS
