"""Names of the segments of a step over several calls, of the empty segments that stand between them, and what a person
calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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


def call_of(segment: str) -> str:
    """The call that a segment of a chain belongs to."""
    return segment.rpartition("/")[0]


def place_of(segment: str, layer: str) -> str:
    """Where a segment is, for a person: its layer, or its own name outside the layers. In a step over several graphs
    its call stands before that."""
    call, slash, name = segment.rpartition("/")
    own = layer or name
    if slash and own == "segment":  # all of its call
        return call
    return f"{call} {own}" if slash else own


class Placed(Protocol):
    """A segment of a step, with its layer: simulated, or measured."""

    @property
    def phase(self) -> str: ...
    @property
    def segment(self) -> str: ...
    @property
    def layer(self) -> str: ...


def in_words(segments: Sequence[Placed], phase: str, segment: str) -> str:
    """A segment of a step, in words: by its layer, or by the layer next to it.

    For example "the backward of layers.3", "the forward after layers.15", "the forward of layers.0 in call 2".
    """
    call, _, name = segment.rpartition("/")
    if segment == TURN:
        return "the code between the forward and the backward, outside the compiled graphs"
    if lies_between(segment):
        return f"the code before the {phase} of {call}, outside the compiled graphs"
    # In the order of the forward, whichever it is.
    near = [b for b in segments if b.phase == phase and call_of(b.segment) == call]
    near = [b for b in near if not lies_between(b.segment)][:: 1 if phase == "forward" else -1]
    at = next((i for i, b in enumerate(near) if b.segment == segment), None)
    found = f"of {name}"
    if at is not None:
        before = next((b.layer for b in reversed(near[:at]) if b.layer), "")
        after = next((b.layer for b in near[at + 1 :] if b.layer), "")
        next_to = f"after {before}" if before else f"before {after}" if after else ""
        found = f"of {near[at].layer}" if near[at].layer else next_to
    return " ".join(part for part in (f"the {phase}", found, f"in {call}" if call else "") if part)
