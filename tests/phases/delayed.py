"""Copies that happen late, so that a test on a CPU sees who did not wait for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor

GARBAGE = 255


class Event:
    """Of one copy to the "device": making it happen makes every copy before it happen, as on a stream."""

    def __init__(self, copies: DelayedCopies, number: int) -> None:
        self._copies, self._number = copies, number

    def query(self) -> bool:
        return self._copies.num_made >= self._number

    def synchronize(self) -> None:
        # What the manager's background thread waits for may take for ever: only who reads makes copies happen.
        self._copies.wait(self._number)


class DelayedCopies:
    """To the host at once; to the device when the compute stream waits, or when ``run_all`` lets them.

    Until then the target holds garbage.
    """

    def __init__(self) -> None:
        self._queue: list[list[tuple[Tensor, Tensor]]] = []
        self._changed = threading.Condition()
        self.num_made = 0
        self.num_waits = 0

    def compute_stream(self) -> None:
        return None

    def offload_waits_for_compute(self) -> None:
        pass

    def offload_waits_for(self, event: Any, wait: Any) -> None:
        self._run(event._number)

    def reload_waits_for_compute(self) -> None:
        pass

    def compute_waits_for(self, event: Any, wait: Any, stream: Any = None) -> None:
        self.num_waits += 1
        self._run(event._number)

    def offloading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    reloading = offloading

    def offload(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pieces:
            target.copy_(source)

    def reload(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> Event:
        copies = list(pieces)
        for target, _ in copies:
            target.fill_(GARBAGE)
        with self._changed:
            self._queue.append(copies)
            return Event(self, len(self._queue))

    def exposed_ms(self) -> float:
        return 0.0

    def reset_exposed(self) -> None:
        pass

    def synchronize(self) -> None:
        self.run_all()

    def run_all(self) -> None:
        """The link catches up."""
        self._run(len(self._queue))

    def wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.num_made >= number)

    def _run(self, number: int) -> None:
        with self._changed:
            for copies in self._queue[self.num_made : number]:
                for target, source in copies:
                    target.copy_(source)
                self.num_made += 1
            self._changed.notify_all()
