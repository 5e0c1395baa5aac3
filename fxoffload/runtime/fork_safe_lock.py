"""A lock that a forked child may take.

A child has its parent's memory and one thread: a lock that another thread held stays locked for ever. Ours are made
anew there.
"""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeRLock:
    """A ``threading.RLock`` that is free in a forked child, unless the thread that forked holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = self._depth = 0
        _LOCKS.add(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As of ``threading.RLock``."""
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._owner, self._depth = threading.get_ident(), self._depth + 1
        return taken

    def release(self) -> None:
        """As of ``threading.RLock``."""
        if self._owner == threading.get_ident():
            self._depth -= 1
            if not self._depth:
                self._owner = 0
        self._lock.release()

    # Written out: it is taken thousands of times in a transition.
    def __enter__(self) -> bool:
        self._lock.acquire()
        self._owner, self._depth = threading.get_ident(), self._depth + 1
        return True

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()

    def _after_fork_in_child(self) -> None:
        depth = self._depth if self._owner == threading.get_ident() else 0
        self._lock = threading.RLock()
        self._owner = self._depth = 0
        for _ in range(depth):
            self.acquire()


_LOCKS: weakref.WeakSet[ForkSafeRLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_LOCKS):
        lock._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
