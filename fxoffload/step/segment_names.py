"""Names of the segments of a step over several calls, and of the empty segments that stand between them."""

from __future__ import annotations

from fxoffload.step.readings import Phase

# The gap between the forwards and the backwards: a segment after the forward's last one.
TURN = "turn entry"


def entry_of(phase: Phase, call: int) -> str:
    """The empty segment of a chain that stands before a call."""
    return f"call {call}/entry" if phase == "forward" else f"call {call}/backward entry"


def lies_between(segment: str) -> bool:
    """Whether it is one of these, or the turn: no graph runs in it."""
    return segment == TURN or segment.endswith(("/entry", "/backward entry"))


def segment_of(call: int, segment: str) -> str:
    """A segment of a call, as the chain names it."""
    return f"call {call}/{segment}"
