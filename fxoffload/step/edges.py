"""Memory at the edges of compiled graphs, and how long references to it were alive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxoffload.step.readings import Phase

# A call of a chain: its phase, and its place, counted in the order of the forwards.
CallAt = tuple[Phase, int]


@dataclass(frozen=True)
class Edges:
    """The values that enter and leave a compiled graph, by position: names of storages of its step; None for values
    that the step does not list.

    Attributes:
        inputs: of the forward: candidates, and under the names of their placeholders those that only a variant of the
            graph may save.
        outputs: of the forward, those that the caller sees.
        tangents: arguments of the backward; None where one is a saved value.
        saved: positions among the forward's results of values that are made and saved for its backward alone.
    """

    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    tangents: tuple[str | None, ...]
    gradients: tuple[str | None, ...]
    saved: tuple[int, ...] = ()


@dataclass(frozen=True)
class Moment:
    """The end of one call of a chain.

    Attributes:
        phase: "forward" or "backward".
        call: the place in the chain, counted in the order of the forwards.
    """

    phase: Phase
    call: int

    def is_before(self, other: Moment, positions: Mapping[CallAt, int] | None = None) -> bool:
        """Whether it comes first. ``positions``: of the calls in their order; None: the forwards come in order, then
        the backwards in reverse."""
        if positions is not None:
            return positions[self.phase, self.call] < positions[other.phase, other.call]
        if self.phase != other.phase:
            return self.phase == "forward"
        return self.call < other.call if self.phase == "forward" else self.call > other.call


@dataclass(frozen=True)
class EdgeMemory:
    """Memory that was seen at the edge of some call.

    Attributes:
        members: (call, name of a storage of its step) that are this memory, in the order in which they were seen.
        until: last call boundary at which a reference outside the copy engine was alive; None: until the step ends.
        watched: whether it can be watched as an input of a forward: autograd made it.
    """

    members: tuple[tuple[int, str], ...]
    until: Moment | None
    watched: bool = True


def later(a: Moment | None, b: Moment | None, positions: Mapping[CallAt, int] | None = None) -> Moment | None:
    """The later of two; None is the step's end. ``positions``: as of ``Moment.is_before``."""
    if a is None or b is None:
        return None
    return b if a.is_before(b, positions) else a
