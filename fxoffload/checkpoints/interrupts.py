"""Signals that ask a run to end wait while it cannot: while workers end, folders change names, leftovers go."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DelayedSignals:
    """Signals that came and were not handled yet, and the handlers that they were for."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: list[int] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._noted:
            self._noted.append(number)

    def deliver(self) -> None:
        """Handle the signals that came, here and now; a handler may raise."""
        while self._noted:
            number = self._noted.pop(0)
            self.handlers[number](number, None)


@contextlib.contextmanager
def held_back() -> Iterator[DelayedSignals]:
    """Ctrl-C and its like are handled at the end, or by ``deliver``, as they would have been at once.

    Signals without a handler in Python end the process as ever. In other threads than the main one nothing is done:
    no handler runs there.
    """
    held = DelayedSignals()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    note = held.note
    for number in ENDING:
        if callable(handler := signal.getsignal(number)):
            held.handlers[number] = handler
    try:
        for number in held.handlers:
            signal.signal(number, note)
        yield held
    finally:
        for number, handler in held.handlers.items():
            if signal.getsignal(number) is note:  # a handler that was delivered to may have put another
                signal.signal(number, handler)
        held.deliver()
