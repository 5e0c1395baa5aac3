"""Free ranges of the host arena, and the fences that lie on them."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fence:
    """The event after which a freed range may be written again; ``order`` grows with every copy of its stream."""

    order: int
    event: object


@dataclass(slots=True)
class FreeRange:
    """Bytes ``start`` to ``end``; ``fence``: wait for it before writing."""

    start: int
    end: int
    fence: Fence | None


class FreeList:
    """Ranges in order of addresses, no two of which touch."""

    def __init__(self) -> None:
        self._ranges: list[FreeRange] = []

    def take(self, size: int) -> FreeRange | None:
        """The first ``size`` bytes in a row; None where there are none."""
        for i, item in enumerate(self._ranges):
            if item.end - item.start >= size:
                taken = FreeRange(item.start, item.start + size, item.fence)
                item.start += size
                if item.start == item.end:
                    del self._ranges[i]
                return taken
        return None

    def tail_bytes(self, end: int) -> int:
        """How many bytes right before ``end`` are free."""
        last = self._ranges[-1] if self._ranges else None
        return last.end - last.start if last is not None and last.end == end else 0

    def cut(self, start: int) -> FreeRange:
        """Take out the last range's bytes from ``start`` on, which lies in it."""
        last = self._ranges[-1]
        found = FreeRange(start, last.end, last.fence)
        last.end = start
        if last.start == start:
            self._ranges.pop()
        return found

    def insert(self, item: FreeRange) -> None:
        """Return a range. It becomes one with its neighbours; of their fences the youngest stays."""
        i = bisect.bisect_left(self._ranges, item.start, key=lambda f: f.start)
        if i < len(self._ranges) and self._ranges[i].start == item.end:
            item.end, item.fence = self._ranges[i].end, younger(item.fence, self._ranges[i].fence)
            del self._ranges[i]
        if i > 0 and self._ranges[i - 1].end == item.start:
            before = self._ranges[i - 1]
            before.end, before.fence = item.end, younger(before.fence, item.fence)
        else:
            self._ranges.insert(i, item)


def younger(a: Fence | None, b: Fence | None) -> Fence | None:
    """The one that stands for both."""
    if a is None or b is None:
        return a or b
    return a if a.order >= b.order else b
