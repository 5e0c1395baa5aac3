"""A lock that a forked child may take, and that no signal leaves held.

A child has its parent's memory and one thread: a lock that another thread held stays locked for ever. Ours are made
anew there.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from fxoffload.runtime.weak_bag import WeakBag

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

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


def locked(lock_of: Callable[..., ForkSafeRLock]) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """Lets a function hold a lock while it runs, which it lets go of however it ends.

    A trace function, unlike a signal, may raise at the end of a ``with`` block before that gives the lock back.

    Args:
        lock_of: the lock, from the function's positional arguments.
    """

    def decorate(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        @functools.wraps(function)
        def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            lock = lock_of(*args)
            if lock.is_mine():
                return function(*args, **kwargs)
            try:
                with lock:
                    return function(*args, **kwargs)
            except BaseException:
                if lock.is_mine():
                    lock.let_go()
                raise

        return call

    return decorate


_LOCKS: WeakBag[ForkSafeRLock] = WeakBag()


def _after_fork_in_child() -> None:
    for lock in _LOCKS:
        lock._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
