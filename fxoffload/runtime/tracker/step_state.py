"""The states of a step, and what leads from one to the next.

    state       its calls                              when it is over
    ----------  -------------------------------------  --------------------------------------------------------------
    idle        no step runs
    unplanned   run as compiled                        its peak is judged, where its graph can be corrected
    waiting     take the least memory, under a budget  nothing: a plan is being made, or has to be made ready
    observing   the same; memory at their edges is     two in a row of the same graphs are known, and planned
                noted
    measuring   the same; the device's memory is read  the plan for its sizes is made
    following   make the choices of a plan             its peak is judged, its times are read
    complete    have all returned
    irregular   run as they would without a plan       it counts as missed where it departed from what was expected

A step ends when no forward waits for its backward, or where it turns out to be no pipeline. Until then a forward that
begins after a backward is one of the step where it is expected there, or where the step may be a pipeline
(``RunningStep.is_pipeline``).

A step begins in one of ``BEGINNINGS``; ``NEXT`` has all other transitions. A state that an event does not lead out of
stays. Whatever happens, bits are the same: a call's choice is settled when it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class StepState(Enum):
    """See the table above."""

    IDLE = "idle"
    UNPLANNED = "unplanned"
    WAITING = "waiting"
    OBSERVING = "observing"
    MEASURING = "measuring"
    FOLLOWING = "following"
    COMPLETE = "complete"
    IRREGULAR = "irregular"


class StepEvent(Enum):
    """What may happen to a step that has begun."""

    DEPARTS = "departs"  # it is no chain of calls, or not the expected one
    COMPLETES = "completes"  # its last backward has returned


class Departure(Enum):
    """Why a step is irregular."""

    UNUSUAL = "unusual"  # hooks, an exception, several threads: it says nothing of the steps to come
    MISSED = "missed"  # it is not the chain that was expected
    OUTGREW = "outgrew"  # it is, and a call is larger than the plan serves


BEGINNINGS = (
    StepState.UNPLANNED,
    StepState.WAITING,
    StepState.OBSERVING,
    StepState.MEASURING,
    StepState.FOLLOWING,
)

NEXT: Mapping[tuple[StepState, StepEvent], StepState] = {
    **{(state, StepEvent.DEPARTS): StepState.IRREGULAR for state in (*BEGINNINGS, StepState.COMPLETE)},
    **{(state, StepEvent.COMPLETES): StepState.COMPLETE for state in BEGINNINGS},
}


def after(state: StepState, event: StepEvent) -> StepState:
    """The state that follows.

    Raises:
        ValueError: no step runs.
    """
    if state is StepState.IDLE:
        raise ValueError(f"expected a step that runs, found none that {event.value}")
    return NEXT.get((state, event), state)
