"""Threads that run during training and end before the interpreter does, and plans that are made one at a time.

[Note: Threads and the end]
If the interpreter ends while a daemon thread is inside torch, the process ends with SIGABRT: a job that was done is
reported as failed. So the interpreter waits for the work that these threads have begun. Other work does not begin.

[Note: Cancelled plans]
After ``torch.compiler.reset()`` no step follows a plan that is still being made, and its messages would be taken for
the next model's. A thread cannot be stopped from outside, so a plan asks (``check``): before each partitioning, and
before it says or publishes anything. PlanCancelled then ends it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fxoffload import tell
from fxoffload.reset import on_reset
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock
from fxoffload.runtime.own_threads import begin_thread, device_of_caller
from fxoffload.runtime.step_first import STEP_FIRST
from fxoffload.runtime.weak_bag import WeakBag

# A plan takes seconds, a chunk of host memory less. Work that takes longer may hang, and is not waited for.
_PATIENCE_S = 60.0

# How long a plan in the making may hold the interpreter when a thread of the step asks for it.
_SWITCH_S = 1e-6

_RUNNING: WeakBag[threading.Thread] = WeakBag()
_TURN = ForkSafeRLock()
_INTERVALS: list[tuple[float, float]] = []  # while a plan gives way: the one that was there, and the plan's


class PlanCancelled(BaseException):
    """Ends a plan that is no longer wanted. No Exception: a failing partitioning raises one, and planning goes on after
    it."""


class _Resets:
    """How often everything was forgotten; of a thread that plans, how often when its plan was asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.when_asked = threading.local()

    def forget(self) -> None:
        """See [Note: Cancelled plans]."""
        self.count += 1


_resets = _Resets()
on_reset(_resets.forget)


def check() -> None:
    """Called while planning, on any thread. Where steps no longer wait for the plan, it gives way to them again.

    Raises:
        PlanCancelled: the model that this thread plans for was forgotten meanwhile.
    """
    if getattr(_resets.when_asked, "count", _resets.count) != _resets.count:
        raise PlanCancelled
    STEP_FIRST.give_way()


def warn(message: str) -> None:
    """Warn, on the way to a plan. Raises PlanCancelled as ``check`` does."""
    check()
    tell.warn(message)


def is_ending() -> bool:
    """Whether the interpreter is about to end."""
    return not threading.main_thread().is_alive()


def start(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """A thread that the end of the interpreter waits for. See [Note: Threads and the end].

    Raises:
        RuntimeError: there can be no more threads.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    _RUNNING.add(thread)
    return thread


def start_planning(plan: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """As ``start``, for a plan: it waits for plans that are being made, whose graphs may be its own. Graphs have few
    variants in all, and those that one plan takes are not there for the next."""
    return start(_in_turn, device_of_caller(), _resets.count, plan, *args, name=name)


def join_planning(thread: threading.Thread) -> None:
    """Wait for a plan, which has the interpreter meanwhile."""
    with STEP_FIRST.waiting_for_plan(lambda: not thread.is_alive()):
        thread.join()


def _in_turn(device: int | None, num_resets: int, plan: Callable[..., None], *args: Any) -> None:
    begin_thread(device)
    _resets.when_asked.count = num_resets
    with contextlib.suppress(PlanCancelled), _TURN, _giving_way(), STEP_FIRST.planning():
        check()
        if not is_ending():
            plan(*args)


@contextlib.contextmanager
def _giving_way() -> Iterator[None]:
    """Let threads of the step have the interpreter at once while a plan is made.

    They need it thousands of times, for microseconds each. Python lets a computing thread keep it for 5 ms each time:
    during a plan, steps took two to eight times as long (two H100s, 2026-11-25). An operator of 8 us took 4,700 us
    while another thread computed, 99 with 0.1 ms instead of 5, 33 with 1 us (CPU, 2026-11-27). That is for code outside
    of the steps' calls; meanwhile see ``fxoffload.runtime.step_first``.
    """
    before = sys.getswitchinterval()
    if before <= _SWITCH_S:
        yield
        return
    sys.setswitchinterval(_SWITCH_S)
    _INTERVALS.append((before, sys.getswitchinterval()))
    try:
        yield
    finally:
        _give_way_no_more()


def _give_way_no_more() -> None:
    """Also in a forked child, which has none of these threads."""
    while _INTERVALS:
        before, mine = _INTERVALS.pop()
        if sys.getswitchinterval() == mine:  # other code may have set it meanwhile
            sys.setswitchinterval(before)


os.register_at_fork(after_in_child=_give_way_no_more)


@atexit.register
def _wait_for_all() -> None:
    end = time.monotonic() + _PATIENCE_S
    for thread in list(_RUNNING):
        thread.join(max(0.0, end - time.monotonic()))
