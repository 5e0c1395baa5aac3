"""The link between host and device: one copy engine each way, each in order, both slower while both are busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Direction = Literal["d2h", "h2d"]


class CopyRates(Protocol):
    """How long copies take on a machine."""

    def copy_ms(self, nbytes: int, direction: Direction, duplex: bool) -> float:
        """Milliseconds of one copy. ``duplex``: while the other direction is busy too."""
        ...


@dataclass(frozen=True)
class ConstantRates:
    """Bandwidths that do not depend on the size of a copy. The duplex ones default to those of one direction alone."""

    d2h_gb_per_s: float
    h2d_gb_per_s: float
    duplex_d2h_gb_per_s: float | None = None
    duplex_h2d_gb_per_s: float | None = None

    def copy_ms(self, nbytes: int, direction: Direction, duplex: bool) -> float:
        """See ``CopyRates``."""
        alone, both = (
            (self.d2h_gb_per_s, self.duplex_d2h_gb_per_s)
            if direction == "d2h"
            else (self.h2d_gb_per_s, self.duplex_h2d_gb_per_s)
        )
        return nbytes / ((both or alone) if duplex else alone) * 1e-6


class Link:
    """When each copy of one step begins and ends.

    All copies down are asked for before the first one up (a forward, then its backward), and both in order of time:
    ``ready_ms`` never decreases. So everything that can slow down a copy up is known when it is asked for. A later copy
    cannot begin before the end of one that compute waits for now.

    The copies down that are still under way when the first one up begins run back to back. Their ends are kept as if
    they ran alone, and ``_lag`` says by how much copies up have held back those that are still open.
    """

    def __init__(self, rates: CopyRates) -> None:
        self.rates = rates
        self._known_ms: dict[tuple[int, Direction], float] = {}
        self._down_bytes: list[int] = []
        self._down_begin: list[float] = []
        self._down_end: list[float] = []
        self._down_free = 0.0
        self._up_free = 0.0
        self._open = 0  # first copy down that may still be held back
        self._lag = 0.0
        self.ups: list[tuple[float, float]] = []

    def _alone_ms(self, nbytes: int, direction: Direction) -> float:
        known = self._known_ms.get((nbytes, direction))
        if known is None:
            known = self._known_ms[nbytes, direction] = self.rates.copy_ms(nbytes, direction, False)
        return known

    def down(self, nbytes: int, ready_ms: float) -> int:
        """Ask for a copy to the host. Returns its number."""
        begin = max(self._down_free, ready_ms)
        end = self._down_free = begin + self._alone_ms(nbytes, "d2h")
        self._down_bytes.append(nbytes)
        self._down_begin.append(begin)
        self._down_end.append(end)
        return len(self._down_end) - 1

    def down_end(self, number: int) -> float:
        """When a copy to the host ends; asked when compute waits for it."""
        return self._down_end[number] + (self._lag if number >= self._open else 0.0)

    def up(self, nbytes: int, ready_ms: float) -> float:
        """Ask for a copy to the device. Returns when it ends."""
        begin, duration = max(self._up_free, ready_ms), self._alone_ms(nbytes, "h2d")
        if begin >= self._down_free + self._lag:
            end = begin + duration
        else:
            end = self._up_during_down(nbytes, begin, duration)
        self._up_free = end
        self.ups.append((begin, end))
        return end

    def _up_during_down(self, nbytes: int, begin: float, alone_ms: float) -> float:
        """The end of a copy up that begins while copies down are under way; holds those back."""
        duplex_ms = self.rates.copy_ms(nbytes, "h2d", True)
        if duplex_ms <= 0.0:
            return begin
        now, left = begin, 1.0  # the part of the copy that is still to do
        while self._open < len(self._down_end):
            down_end = self._down_end[self._open] + self._lag
            if down_end > now:
                size = self._down_bytes[self._open]
                stretch = self.rates.copy_ms(size, "d2h", True) / self._alone_ms(size, "d2h")
                until_down, until_up = (down_end - now) * stretch, left * duplex_ms
                step = min(until_down, until_up)
                now += step
                left -= step / duplex_ms
                self._lag += step - step / stretch
                if until_up < until_down:
                    return now
                down_end = now
            self._down_end[self._open] = down_end
            self._open += 1
        return now + max(left, 0.0) * alone_ms

    def downs(self) -> list[tuple[float, float]]:
        """Begin and end of all copies to the host, once everything has been asked for."""
        found: list[tuple[float, float]] = []
        free = 0.0
        for i, begin in enumerate(self._down_begin):
            end = self.down_end(i)
            found.append((max(begin, free), end))
            free = end
        return found
