"""A plan's orders to the executor: the storages that leave, and the most bytes under way at each point of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Windows:
    """Most bytes under way, point by point. They take the place of one window for the whole step.

    Attributes:
        in_flight: one per forward segment, and [0] for the entry: the most that is held after that segment for copies
            that are under way to the host.
        ahead: one per backward segment, and [0] for the beginning of the backward: the most that is reloaded ahead of
            use (and taken back, and not yet read) when that segment starts.
    """

    in_flight: tuple[int, ...]
    ahead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RanCall:
    """What a measured call of a graph did: measurements of others are kept apart. See ``Choice``."""

    sizes: tuple[int, ...]
    offload: tuple[bool, ...]
    windows: Windows | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The choices of one forward call.

    Attributes:
        offload: one bool per ``OffloadCandidate`` of the forward, True to offload. Of a variant: one per candidate of
            its saved values, in order.
        windows: None for windows that follow the segments, or the budgets of the options.
        variant: which variant of the graph runs (``fxoffload.runtime.variant``); 0: the one that was compiled first.
        watches: whether the forward may return while inputs that can be watched are still being copied
            ([Note: Watched inputs] in ``fxoffload.runtime.engine``). It waits for all others.
        paced: whether the forward waits until the device has begun the paced one before it ([Note: Streams that wait]
            in ``fxoffload.runtime.copies.host_lead``).
    """

    offload: Sequence[bool]
    windows: Windows | None = None
    variant: int = 0
    watches: bool = False
    paced: bool = False

    def ran(self, sizes: Sequence[int]) -> RanCall:
        """A call that made this choice. ``sizes``: those of its arguments that vary."""
        return RanCall(tuple(sizes), tuple(self.offload), self.windows)

    def kept(self) -> Choice:
        """The same with nothing offloaded."""
        return replace(self, offload=(False,) * len(self.offload), paced=False)
