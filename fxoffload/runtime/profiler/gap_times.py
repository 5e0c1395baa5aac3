"""Time between the calls of one step, on the compute stream: eager code, collectives, or a host that is late."""

from __future__ import annotations

import logging
import threading
import time

from fxoffload.runtime.profiler.stream_events import Event, EventSource
from fxoffload.step.edges import CallAt

log = logging.getLogger(__name__)

# The planner waits at most this long for the device to pass the step.
_PATIENCE_S = 20.0
_POLL_S = 1e-3


class GapTimes:
    """An event at each end of each call of a step. The step waits for none of them; ``ms`` does.

    Args:
        events: of the compute stream.
        after: the event at the end of the step before; None: unknown.

    Attributes:
        is_ended: whether the step's last call has returned.
    """

    def __init__(self, events: EventSource, after: Event | None = None) -> None:
        self.is_ended = False
        self._after = after
        self._events = events
        self._calls: list[tuple[CallAt, Event, Event | None]] = []
        self._found: dict[CallAt, float] | None = None
        self._lock = threading.Lock()

    def call_begins(self, at: CallAt) -> None:
        """A call does."""
        with self._lock:
            if self._found is None and self._events.usable():
                self._calls.append((at, self._events.record(), None))

    def call_ended(self) -> None:
        """The call that began last has ended."""
        with self._lock:
            if self._calls and self._calls[-1][2] is None and self._events.usable():
                at, begin, _ = self._calls[-1]
                self._calls[-1] = (at, begin, self._events.record())

    def end(self) -> None:
        """The step's last call has returned."""
        self.is_ended = True

    def ms(self) -> dict[CallAt, float]:
        """Milliseconds from the end of the call before to the beginning of each call; of the first where the step
        before is known. Waits until the device has passed the step; where that takes too long, nothing is known."""
        with self._lock:
            if self._found is None:
                self._found = self._read() if self._has_passed() else {}
                self._release()
            return dict(self._found)

    def drop(self) -> None:
        """The step is not the expected one: forget its events."""
        with self._lock:
            self._found = self._found or {}
            self._release()

    def _read(self) -> dict[CallAt, float]:
        found: dict[CallAt, float] = {}
        if self._after is not None and self._calls:
            at, begin, _ = self._calls[0]
            found[at] = self._after.elapsed_ms(begin)
        for (_, _, before), (at, begin, _) in zip(self._calls, self._calls[1:], strict=False):
            if before is not None:
                found[at] = before.elapsed_ms(begin)
        return found

    def _has_passed(self) -> bool:
        last = self._calls[-1][2] if self._calls else None
        if self._calls and last is None:
            return False  # its end was not recorded: a capture began
        end = time.monotonic() + _PATIENCE_S
        while last is not None and not last.query():
            if time.monotonic() > end:
                log.info("the time between compiled graphs is not known: the device has not passed the step")
                return False
            time.sleep(_POLL_S)
        return True

    def _release(self) -> None:
        self._events.give_back([e for _, begin, end in self._calls for e in (begin, end) if e is not None])
        self._events.give_back([] if self._after is None else [self._after])
        self._calls, self._after = [], None
