"""Steps come first: while the host launches one, a thread that makes a plan stands still.

[Note: The interpreter]
One thread at a time runs Python. A step needs the interpreter thousands of times, for microseconds each: every operator
and every kernel launch lets go of it. A plan that computes takes it each time. Launching then takes 10 times as long
with the best switch interval, some us, and 17 with 20 us or more (CPU, 2026-11-28). The first steps of a sharded model
took 0.7 to 2.2 s instead of 0.42 (two H200s). Most of the time the host waits for the device and needs no interpreter:
that is when plans are made. They are there later, and most steps take at most 1.1x
(``archive/2026-11-28-2xh200-stock-fsdp-first``). In a loop that launches all the time, a plan has less than a tenth
of it.

A thread that plans is asked at each call and return of a function, by ``sys.setprofile``: nothing else stops Inductor
in the middle of a compilation. If it has a profile function already, it does not stand still. From Python 3.12 on, code
of all threads pays for it: until the plan is there, code that only calls functions takes two to three times as long.
So does the plan: T5's, 2 + 2 layers, took 126 s for 41 (CPU, Python 3.11). A host that does nothing but wait for it
launches nothing, and the thread is not asked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger(__name__)

# After the last call of a step: the optimizer is launched.
_AFTER_STEP_S = 0.02
# A host that calls no compiled graph for so long does not launch. It may wait for a lock that the plan has.
_LAUNCH_S = 0.05
# Where the host launches all the time, a plan has a part of it.
_MOST_WAIT_S, _SLICE_S = 0.3, 0.03


class _OfThread(threading.local):
    """Of a thread that plans.

    Attributes:
        may_be_asked: whether it had no profile function before.
        free_until: when it may stand still again.
    """

    may_be_asked = False
    free_until = 0.0


class StepFirst:
    """The turns of steps and plans in one process.

    Attributes:
        waited_s: how long plans stood still.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._launches = False
        self._until = 0.0  # it does until then, as far as is known
        self._is_planning = 0
        self._lock = threading.Lock()
        self._mine = _OfThread()
        self._is_over: Callable[[], bool] | None = None  # that of a host that waits for a plan

    def launches(self) -> None:
        """A call of a compiled graph begins or has ended, and its step goes on. Costs a microsecond."""
        if self._is_planning:
            self._until = time.monotonic() + _LAUNCH_S
            self._launches = True

    def launched(self) -> None:
        """The last call of a step has ended."""
        if self._is_planning:
            self._until = time.monotonic() + _AFTER_STEP_S
            self._launches = True

    def waits(self) -> None:
        """The host waits for the device in the middle of a step; it ``launches`` when it goes on."""
        self._launches = False

    @contextlib.contextmanager
    def waiting_for_plan(self, is_over: Callable[[], bool]) -> Iterator[None]:
        """The host does nothing but wait for a plan, until it ``is_over``: threads that plan are not asked meanwhile.

        Where they go on after that, see ``give_way``.
        """
        self._is_over = is_over
        try:
            yield
        finally:
            self._is_over = None
            self.launches()

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """This thread makes a plan, and stands still while a step is launched."""
        with self._lock:
            self._is_planning += 1
        self._mine.may_be_asked = sys.getprofile() is None
        self.give_way()
        try:
            yield
        finally:
            self._ask_no_more()
            self._mine.may_be_asked = False
            with self._lock:
                self._is_planning -= 1
            log.info("plans of this process stood still for %.1f s so far", self.waited_s)

    def give_way(self) -> None:
        """A host that waited for this thread, which plans, goes on: the thread is asked again."""
        if self._mine.may_be_asked and sys.getprofile() is None:
            sys.setprofile(self._wait)

    def _ask_no_more(self) -> None:
        if sys.getprofile() == self._wait:
            sys.setprofile(None)

    def _wait(self, _frame: Any = None, _event: Any = None, _arg: Any = None) -> None:
        if not self._launches and self._is_over is None:  # mostly: each call of a function asks
            return
        is_over = self._is_over
        if is_over is not None and not is_over():
            self._ask_no_more()
            return
        began = time.monotonic()
        if self._mine.free_until > began:
            return
        while self._launches and self._is_over is None:
            if (now := time.monotonic()) >= self._until:
                self._launches = False
                break
            if now - began > _MOST_WAIT_S:
                self._mine.free_until = now + _SLICE_S
                break
            # Not longer: the step may end meanwhile, or go on.
            time.sleep(0.001)
        self.waited_s += time.monotonic() - began

    def forget(self) -> None:
        """In a forked child: it has none of the threads that plan, but their profile function's cost from Python 3.12
        on, until one is set and taken away."""
        self._lock = threading.Lock()
        self._is_planning, self._launches, self._is_over = 0, False, None
        if sys.getprofile() is None:
            sys.setprofile(self._wait)
            sys.setprofile(None)


STEP_FIRST = StepFirst()
os.register_at_fork(after_in_child=STEP_FIRST.forget)
