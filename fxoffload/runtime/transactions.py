"""Changes of state that are done or undone, wherever an exception comes.

[Note: Asynchronous exceptions]
A signal handler (Ctrl-C, a timeout) and ``PyThreadState_SetAsyncExc`` may raise between any two bytecodes, in a
``finally`` too. So no order of statements undoes a change for certain, and no guard of state here relies on one.

- A method that changes state is a *transaction*. It marks the object as torn, changes it, and takes the mark off. Code
  that finds the mark calls ``_mend`` first: the method itself, where it raises, or else the next transaction.

- ``_mend`` derives everything from one source of truth, which changes by single stores. It may be interrupted and run
  again. Each class says in its ``_mend`` which source of truth it has.

- Resources that must be given back are recorded before they are taken, or are owned by references: one without
  references is free.

- Locks are entered by ``with``, in C (``ForkSafeRLock``). ``threading.Event`` and ``threading.Condition`` are not used:
  their ``with`` runs in Python, and an exception there leaves their lock held. ``Latch`` stands for both.

A trace function, unlike a signal, may raise at the end of a ``with`` block before that gives its lock back. So a
transaction that raises lets go of its lock in any case, as a function does that is ``locked``.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from fxoffload.runtime.fork_safe_lock import ForkSafeRLock


class Mendable(Protocol):
    """An object with transactions. ``_torn``: the last one did not reach its end."""

    _lock: ForkSafeRLock
    _torn: bool

    def _mend(self) -> None:
        """Makes the state whole, wherever a transaction stopped. Called with the lock held."""
        ...


_Self = TypeVar("_Self", bound=Any)  # a ``Mendable``
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def transaction(
    method: Callable[Concatenate[_Self, _Params], _Result],
) -> Callable[Concatenate[_Self, _Params], _Result]:
    """Makes a method of a ``Mendable`` a transaction; see [Note: Asynchronous exceptions]. Within another one of the
    same object it is a part of that."""

    @functools.wraps(method)
    def call(self: _Self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        lock = self._lock
        if lock.is_mine():
            return method(self, *args, **kwargs)
        try:
            with lock:
                if self._torn:
                    self._mend()
                self._torn = True
                result = method(self, *args, **kwargs)
                self._torn = False
                return result
        except BaseException:
            _undo(self, lock)
            raise

    return call


def _undo(mendable: Mendable, lock: ForkSafeRLock) -> None:
    """A transaction raises. State that cannot be mended now stays torn, and the next one raises the reason."""
    if lock.is_mine():
        lock.let_go()
    with contextlib.suppress(Exception), lock:
        if mendable._torn:
            mendable._mend()
            mendable._torn = False


class Latch:
    """Something to wait for, which is opened once; see [Note: Asynchronous exceptions]."""

    def __init__(self) -> None:
        self.is_open = False
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def open(self) -> None:
        """Lets all waiters go on. May be called twice."""
        self.is_open = True
        self._tokens.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Returns when it is open: True; or False after ``seconds``."""
        end = None if seconds is None else time.monotonic() + seconds
        while not self.is_open:
            patience = 1.0 if end is None else min(1.0, end - time.monotonic())
            if patience <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                self._tokens.get(timeout=patience)
                self._tokens.put(None)  # for the next one that waits; one that is lost is made up for after a second
        return True


class Changes:
    """Tells threads that wait, without a lock, that something has changed."""

    def __init__(self) -> None:
        self.next = Latch()
        """Opens with the next change. Taken before one looks, it misses none."""

    def notify(self) -> None:
        """Something has changed."""
        before, self.next = self.next, Latch()
        before.open()
