"""A transition that is under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from fxoffload.phases.forks import Birthplace
from fxoffload.phases.metrics import Transition
from fxoffload.runtime.transactions import Latch


class Handle:
    """The result of ``offload`` and ``onload``, to wait for.

    Of a transition that fails and is never waited for, the manager's next call raises the error.

    As a context manager it waits at the end of the block. It is waited for once; further waits return at once.

    Args:
        what: for messages.
        transition: is charged with the time that callers wait.
        finish: the rest of the work, done by the first waiter. May be called repeatedly, and by several threads.
    """

    def __init__(
        self, what: str, transition: Transition | None = None, finish: Callable[[], None] | None = None
    ) -> None:
        self.what = what
        self._transition = transition
        self._finish = finish
        self._over = Latch()
        self._error: BaseException | None = None
        self.is_reported = False
        self._birthplace = Birthplace()

    def wait(self) -> Handle:
        """Blocks until every byte has arrived, and for an offload until its memory was given back.

        Raises:
            the error of the transition. Tensors that an offload had moved are back on the device. After an onload,
                those that had arrived stay on the device and the rest is on the host.
            RuntimeError: it is under way in the process that this one was forked from.
        """
        if not self.done():
            self._birthplace.require(f"wait() for the {self.what}")
        began = time.perf_counter()
        self._over.wait()
        if self._error is None and self._finish is not None:
            self._finish()
        self._finish = None
        if self._transition is not None:
            self._transition.stood_still_since(began)
        self.report()
        return self

    def report(self) -> None:
        """Raises the error of a transition that is over and has failed. It counts as reported then."""
        if self._error is not None:
            self.is_reported = True
            raise self._error

    def has_failed(self) -> bool:
        """Whether the transition failed and its error was not raised yet."""
        return self._error is not None and not self.is_reported

    def done(self) -> bool:
        """Whether the copies are finished, or have failed."""
        return self._over.is_open

    def complete(self, error: BaseException | None = None) -> None:
        """Called by the thread that moves the bytes. The first time counts."""
        if not self.done():
            self._error = error
        self._over.open()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.wait()
        except BaseException:
            if error is None:
                raise

    def __repr__(self) -> str:
        return f"Handle({self.what}, {'done' if self.done() else 'under way'})"


class Handles(Handle):
    """Several at once."""

    def __init__(self, what: str, handles: list[Handle]) -> None:
        super().__init__(what)
        self._handles = handles

    def wait(self) -> Handle:
        for handle in self._handles:
            handle.wait()
        return self

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)
