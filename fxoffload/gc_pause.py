"""Work that makes many objects which stay, without the cyclic collector looking at them again and again."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


class _Pauses:
    """Those of a process: the first one that begins switches the collector off, the last one that ends on again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._was_enabled = False

    def begin(self) -> None:
        with self._lock:
            if not self._under_way:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._under_way += 1

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1
            if not self._under_way:
                self.forget()

    def forget(self) -> None:
        """The collector is as it was."""
        if self._was_enabled:
            gc.enable()
        self._was_enabled = False


_pauses = _Pauses()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Python's cyclic collector rests, in all threads. One that is off stays off."""
    pauses = _pauses
    pauses.begin()
    try:
        yield
    finally:
        pauses.end()


def _after_fork_in_child() -> None:
    # The threads that would have ended their pauses are not here, and one of them may have had the lock.
    global _pauses
    before, _pauses = _pauses, _Pauses()
    before.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
