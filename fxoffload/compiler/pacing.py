"""The rate of copies during FSDP2's collectives, and which forward calls are paced for it.

See [Note: Streams that wait] in ``fxoffload.runtime.copies.host_lead``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxoffload.planner.link import CopyRates
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule
from fxoffload.processes import processes_on_this_machine
from fxoffload.torch_private.fsdp2 import fsdp2_is_used

# Part of the link that copies to the host reach where forwards are paced: 0.97 to 0.99 during one GPU's collectives
# (H200, 2026-11-23 and 24).
PACED = 0.96
# The same while other GPUs of the machine copy and gather. Two H200s (2026-11-24) reached 0.94 in a step that waited
# for 2 ms of copies, 0.89 in one that waited for 24. Where no stream waited they had reached 0.95 to 0.98.
PACED_TOGETHER = 0.93
# Where copies take less than this part of the forwards, they do not need all of the link.
_BUSY = 0.5
# The host has as long as a call to launch the next one: a shorter one might find it late.
_LEAST_MS = 5.0
# Of the forwards' time, what has to be in calls that are long enough.
_MOST_OF_ALL = 0.9


def rates_with_pace(rates: ProfileRates, forward_ms: Sequence[float]) -> ProfileRates:
    """The rates that copies reach where forwards are paced, from those they reach where the host runs ahead.

    ``forward_ms``: of each call.
    """
    total = sum(forward_ms)
    if not total or not fsdp2_is_used() or sum(filter(_is_long, forward_ms)) < _MOST_OF_ALL * total:
        return rates
    down, up = rates.link
    reached = PACED_TOGETHER if processes_on_this_machine() > 1 else PACED
    return replace(rates, link=(max(down, reached), up))


def paced_calls(forward_ms: Sequence[float], schedule: Schedule, copies: CopyRates) -> list[bool]:
    """Per call, whether its forward is paced under this schedule."""
    copies_ms = copies.copy_ms(schedule.simulation.bytes_offloaded, "d2h", False)
    needs_link = fsdp2_is_used() and copies_ms > _BUSY * sum(forward_ms)
    return [needs_link and _is_long(ms) for ms in forward_ms]


def _is_long(ms: float) -> bool:
    return ms >= _LEAST_MS
