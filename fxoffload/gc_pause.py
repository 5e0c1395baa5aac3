"""Python's cyclic collector rests: through work that makes many objects which stay, and for what a forked child has of
its parent (see ``fxoffload.runtime.forked``)."""

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


_leaves_garbage = False


def leave_garbage_to_parent() -> None:
    """From here on, forked children collect nothing that was there before the fork."""
    global _leaves_garbage
    _leaves_garbage = True


def _before_fork() -> None:
    _pauses.begin()  # nothing is collected in the child before it is said what may be


def _after_fork_in_parent() -> None:
    _pauses.end()


def _after_fork_in_child() -> None:
    # The threads that would have ended their pauses are not here.
    global _pauses
    before, _pauses = _pauses, _Pauses()
    if _leaves_garbage:
        gc.freeze()
    before.forget()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
