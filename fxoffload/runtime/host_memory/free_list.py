"""Ranges of the host arena that are free, and the fences that lie on them."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from fxoffload.torch_private.storages import StorageWeakRef


@dataclass(frozen=True, slots=True)
class Fence:
    """The event after which a freed range may be written again; ``order`` grows with every copy of its stream."""

    order: int
    event: object


@dataclass(slots=True)
class Span:
    """Bytes ``start`` to ``end``.

    Attributes:
        fence: wait for it before writing.
        written: the event of the last copy into it, while a block lies there: see [Note: Arena and fork].
        storage: of the tensors that users were given of it: see [Note: Tensors of a block].
    """

    start: int
    end: int
    fence: Fence | None
    written: object = None
    storage: StorageWeakRef | None = None


class FreeList:
    """Ranges in order of addresses, no two of which touch.

    Attributes:
        youngest: of the fences of all ranges that were ever returned.
    """

    def __init__(self, youngest: Fence | None = None) -> None:
        self._ranges: list[Span] = []
        self.youngest = youngest

    def take(self, size: int) -> Span | None:
        """The first ``size`` bytes in a row; None where there are none."""
        for i, item in enumerate(self._ranges):
            if item.end - item.start >= size:
                taken = Span(item.start, item.start + size, item.fence)
                item.start += size
                if item.start == item.end:
                    del self._ranges[i]
                return taken
        return None

    def tail_bytes(self, end: int) -> int:
        """How many bytes right before ``end`` are free."""
        last = self._ranges[-1] if self._ranges else None
        return last.end - last.start if last is not None and last.end == end else 0

    def cut(self, start: int) -> Span:
        """Take out the last range's bytes from ``start`` on, which lies in it."""
        last = self._ranges[-1]
        found = Span(start, last.end, last.fence)
        last.end = start
        if last.start == start:
            self._ranges.pop()
        return found

    def insert(self, item: Span) -> None:
        """Return a range. It becomes one with its neighbours; of their fences the youngest stays."""
        self.youngest = younger(self.youngest, item.fence)
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
