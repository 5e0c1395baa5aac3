"""Pauses of Python's cyclic collector: during work that makes many lasting objects, and for objects that a forked child
has from its parent (see ``fxoffload.runtime.forked``)."""

from __future__ import annotations

import functools
import gc
import os
import weakref

from fxoffload.runtime.fork_safe_lock import ForkSafeRLock, locked

# Called with a weak reference whose pause is gone: ``gc.enable()``, all of it in C, where no signal can raise.
_ENABLE = functools.partial(next, iter(gc.enable, object()))


class _Pauses:
    """Those of a process: the first one that begins switches the collector off, the last one that ends on again. One
    that an exception has cut short ends with its last reference."""

    def __init__(self) -> None:
        self._lock = ForkSafeRLock()
        self._under_way: list[weakref.ref[gc_paused]] = []
        self._was_enabled = False

    @locked(lambda self, pause: self._lock)
    def begin(self, pause: gc_paused) -> None:
        self._under_way = [ref for ref in self._under_way if ref() is not None]
        if not self._under_way:
            self._was_enabled = gc.isenabled()
        self._under_way.append(weakref.ref(pause, _ENABLE if self._was_enabled else None))
        gc.disable()

    @locked(lambda self, pause: self._lock)
    def end(self, pause: gc_paused) -> None:
        left = [ref for ref in self._under_way if ref() not in (pause, None)]
        if not left and self._was_enabled:
            gc.enable()  # first: a pause that is no longer listed cannot end
        self._under_way = left

    def forget(self) -> None:
        """The collector is as it was."""
        if self._under_way and self._was_enabled:
            gc.enable()


_pauses = _Pauses()


class gc_paused:
    """Python's cyclic collector rests in this block, in all threads. One that is off stays off."""

    def __enter__(self) -> None:
        self._begun = _pauses
        self._begun.begin(self)

    def __exit__(self, *exception: object) -> None:
        self._begun.end(self)


_leaves_garbage = False


def leave_garbage_to_parent() -> None:
    """From here on, forked children collect nothing that was there before the fork."""
    global _leaves_garbage
    _leaves_garbage = True


_around_fork = gc_paused()  # the child collects nothing before it is told which objects it may collect


def _after_fork_in_child() -> None:
    # The threads that would have ended their pauses are not here.
    global _pauses
    before, _pauses = _pauses, _Pauses()
    if _leaves_garbage:
        gc.freeze()
    before.forget()


os.register_at_fork(
    before=_around_fork.__enter__, after_in_parent=_around_fork.__exit__, after_in_child=_after_fork_in_child
)
