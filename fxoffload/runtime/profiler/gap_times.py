"""Time between the calls of one step, or of two, on the compute stream: eager code, collectives, or a late host."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from fxoffload.runtime.profiler.stream_events import Event, EventSource
from fxoffload.step.edges import CallAt

log = logging.getLogger(__name__)

# The planner waits at most this long for the device to pass the step.
_PATIENCE_S = 20.0
_POLL_S = 1e-3
# The newest times between steps that are kept. While a plan is made most are too long: planning takes the interpreter
# between steps. Of FSDP2's (two H200s, 2026-11-28) the least of 4 was 74 ms, later ones 53.
_MOST_PAIRS = 32


class GapTimes:
    """An event at each end of each call of a step. The step waits for none of them; ``ms`` does.

    Args:
        events: of the compute stream.

    Attributes:
        is_ended: whether the step's last call has returned.
    """

    def __init__(self, events: EventSource) -> None:
        self.is_ended = False
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
        """Milliseconds from the end of the call before to the beginning of each call but the first. Waits until the
        device has passed the step; where that takes too long, nothing is known."""
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
        self._calls = []


class BetweenSteps:
    """Time from the end of a step's last call to the beginning of the next step's first one, before the plan is
    followed. Nothing waits for the device.

    Args:
        events: of the compute stream.
    """

    def __init__(self, events: EventSource) -> None:
        self._events = events
        self._end: Event | None = None  # of the last step
        self._pairs: deque[tuple[Event, Event]] = deque()
        self._lock = threading.Lock()

    def step_ended(self) -> None:
        """Its last call has returned."""
        with self._lock:
            self._forget_end()
            if self._events.usable():
                self._end = self._events.record()

    def step_begins(self, *, follows: bool) -> None:
        """The first call of another one begins. ``follows``: right after the one that ended, and counts."""
        with self._lock:
            if self._end is not None and follows and self._events.usable():
                self._pairs.append((self._end, self._events.record()))
                self._end = None
            self._forget_end()
            if len(self._pairs) > _MOST_PAIRS:
                self._events.give_back(self._pairs.popleft())

    def least_ms(self) -> float | None:
        """The least time of the newest ones that the device has passed: the others wait for a host that compiles. None:
        there are none."""
        with self._lock:
            return min((end.elapsed_ms(begin) for end, begin in self._pairs if begin.query()), default=None)

    def _forget_end(self) -> None:
        if self._end is not None:
            self._events.give_back([self._end])
            self._end = None
