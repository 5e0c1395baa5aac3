"""What returns in the background, in the order in which it is needed.

[Note: Slices]
Allocating memory and starting a copy takes the host 0.1 to 0.2 ms a storage. So an onload that nobody waits for starts
the first slice only; a background thread starts the others, and whoever needs something that was not started starts
everything up to it. Memory is allocated on the stream of the caller, whichever thread does it, and the copy stream
waits for that stream at every slice: a block that the allocator hands out may still be read by what was queued there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from fxoffload.phases.mover import Mover
from fxoffload.phases.storages import Holding, Where

FIRST_BYTES = 128 << 20
SLICE = 4  # storages


class Arrivals:
    """The queue of a ``Transit``, which holds its lock around every call. See [Note: Slices]."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._queue: deque[Holding] = deque()

    def add(self, holdings: Iterable[Holding]) -> None:
        """These arrive next, after what was added before."""
        for holding in holdings:
            holding.where, holding.serial = Where.ARRIVING, 0
            self._queue.append(holding)

    def start_first(self) -> list[Holding]:
        """Starts as much as the first forward needs at once."""
        nbytes, count = 0, 0
        for holding in self._queue:
            if nbytes >= FIRST_BYTES or count == 8 * SLICE:
                break
            nbytes, count = nbytes + holding.nbytes, count + 1
        return self.start(count)

    def start(self, count: int = SLICE) -> list[Holding]:
        """Starts the next ones on the current stream. Returns them.

        A failure (the device has no room) leaves that one and all behind it on the host, and is raised.
        """
        begun: list[Holding] = []
        fresh: set[torch.device] = set()
        try:
            while self._queue and len(begun) < count:
                holding = self._queue[0]
                if holding.device not in fresh:
                    self._mover.before_arriving(holding.device)
                    fresh.add(holding.device)
                self._mover.start_arriving(holding)
                begun.append(self._queue.popleft())
        except BaseException:
            if self._queue:
                self._mover.give_up(self._queue[0])
            self.cancel(self._queue)
            raise
        return begun

    def start_until(self, holding: Holding) -> list[Holding]:
        """Starts everything up to this one."""
        if holding.serial or holding not in self._queue:
            return []
        return self.start(self._queue.index(holding) + 1)

    def cancel(self, holdings: Iterable[Holding]) -> None:
        """Those of them that were not started stay on the host."""
        gone = {id(holding) for holding in holdings if not holding.serial}
        for holding in self._queue:
            if id(holding) in gone:
                holding.where = Where.HOST
        self._queue = deque(holding for holding in self._queue if id(holding) not in gone)
