"""Holdings that return in the background, in the order in which they are needed.

[Note: Slices]
Allocating memory and starting a copy takes the host 0.05 to 0.2 ms a storage. So an onload that no caller waits for
starts the first slice only. A background thread starts the others while the link is busy with that. A reader that needs
a holding that was not started starts everything up to it.

The thread begins late: until then the thread that runs the first forward has the lock and the interpreter for itself.
Then it hurries: a slice that starts late waits for the layers before it, which are queued by then. Memory is allocated
on the stream of the caller, whichever thread does it, and the copy stream waits for that stream at every slice. For
work that was queued there may still read a block that the allocator hands out.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

from fxoffload.phases.moving.device_memory import has_expandable_segments
from fxoffload.phases.moving.mover import AT_ONCE, Mover
from fxoffload.phases.moving.room import go_together
from fxoffload.phases.moving.storages import Holding, Where

FIRST_BYTES = 640 << 20
# Where pages are mapped for them, the caller waits 8 to 17 ms a GiB before it can begin.
FIRST_MAPPED_BYTES = 320 << 20
SLICE = AT_ONCE  # storages
# For so long the link is busy with a byte of the first slice: less than a link of today takes.
HEAD_START_S_PER_BYTE = 1 / 120e9


class Arrivals:
    """The queue of a ``Transit``, whose transactions call it. See [Note: Slices].

    The queue says in which order: whether a holding is to arrive, it says itself (``Holding.is_due``).
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._queue: deque[Holding] = deque()
        self.head_start_s = 0.0

    def add(self, holdings: Iterable[Holding]) -> None:
        """These arrive next, after those that were added before."""
        for holding in holdings:
            holding.where = Where.ARRIVING
            self._queue.append(holding)

    def start_first(self) -> list[Holding]:
        """Starts as much as the first forward needs at once."""
        nbytes, count = 0, 0
        most = FIRST_MAPPED_BYTES if has_expandable_segments() else FIRST_BYTES
        for holding in self.upcoming(4 * SLICE):
            if nbytes >= most:
                break
            nbytes, count = nbytes + holding.nbytes, count + 1
        self.head_start_s = nbytes * HEAD_START_S_PER_BYTE
        return self.start(count)

    def start(self, count: int = SLICE) -> list[Holding]:
        """Starts the next ones on the current stream. Returns them.

        A failure (the device has no room) is raised. It leaves that one and all that follow where they are in the
        queue.
        """
        begun = self.upcoming(count)
        self._mover.start_arriving(begun)
        return begun

    def upcoming(self, count: int = SLICE) -> list[Holding]:
        """The next ones."""
        while self._queue and not self._queue[0].is_due:
            self._queue.popleft()
        return list(itertools.islice((holding for holding in self._queue if holding.is_due), count))

    def upcoming_bytes(self, nbytes: int) -> list[Holding]:
        """The next ones that go together, until they have ``nbytes`` in all; at least a slice, and at most eight."""
        found: list[Holding] = []
        for holding in self.upcoming(8 * SLICE):
            if len(found) >= SLICE and (nbytes <= 0 or not go_together(found[0], holding)):
                break
            found.append(holding)
            nbytes -= holding.nbytes
        return found

    def start_until(self, holding: Holding) -> list[Holding]:
        """Starts everything up to this one."""
        if not holding.is_due:
            return []
        due = self.upcoming(len(self._queue))
        return self.start(due.index(holding) + 1) if holding in due else []

    def cancel(self, holdings: Iterable[Holding]) -> None:
        """Those of them that were not started stay on the host."""
        for holding in holdings:
            if holding.is_due:
                holding.where = Where.HOST
        self._queue = deque(holding for holding in self._queue if holding.is_due)

    def mend(self, due: Iterable[Holding]) -> None:
        """An exception came in between. ``due``: all that is to arrive."""
        left = {id(holding): holding for holding in due}
        queued = [holding for holding in self._queue if left.pop(id(holding), None) is not None]
        self._queue = deque([*queued, *left.values()])
