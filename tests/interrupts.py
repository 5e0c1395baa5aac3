"""Exceptions that come between any two lines, or any two bytecodes, of chosen files: fault injection for tests.

A signal handler raises wherever the main thread happens to be. ``Interrupt`` raises at the n-th place that a piece of
work passes in some files; ``places`` lists them, so that a test can try each, or some of each line. Trace functions see
more places than signals do (the end of a ``with`` block before its lock is given back): what holds here holds there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import fxoffload

ROOT = Path(fxoffload.__file__).parent


class Place(NamedTuple):
    """The ``nth`` event of a run; ``line`` is of ``file``, relative to the package."""

    nth: int
    file: str
    line: int

    def __str__(self) -> str:
        return f"event {self.nth} at {self.file}:{self.line}"


def files(*patterns: str) -> frozenset[str]:
    """Paths of the package's files that match one of these patterns, such as "phases/moving/*.py".

    Raises:
        ValueError: a pattern matches none.
    """
    found = {pattern: [str(path) for path in ROOT.glob(pattern)] for pattern in patterns}
    empty = [pattern for pattern, paths in found.items() if not paths]
    if empty:
        raise ValueError(f"expected patterns of files below {ROOT}, found none for {empty[0]!r}")
    return frozenset(path for paths in found.values() for path in paths)


@dataclass
class _Tracer:
    """Calls ``see`` at each event of one kind in some files, in this thread."""

    files: Collection[str]
    kind: str  # "line" or "opcode"
    see: Callable[[str, int], None]

    def __post_init__(self) -> None:
        self._is_ours: dict[CodeType, bool] = {}

    def call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code not in self._is_ours:
            self._is_ours[code] = code.co_filename in self.files
        if not self._is_ours[code]:
            return None
        frame.f_trace_opcodes = self.kind == "opcode"
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == self.kind:
            self.see(frame.f_code.co_filename, frame.f_lineno)
        return self._inside


@contextlib.contextmanager
def traced(files: Collection[str], see: Callable[[str, int], None], kind: str = "line") -> Iterator[None]:
    """In this block ``see(path, line)`` is called at each line (or "opcode") in the files; it may raise."""
    before = sys.gettrace()
    sys.settrace(_Tracer(files, kind, see).call)
    try:
        yield
    finally:
        sys.settrace(before)


def places(files: Collection[str], work: Callable[[], object], kind: str = "line") -> list[Place]:
    """What ``work`` passes, in order."""
    found: list[Place] = []

    def see(path: str, line: int) -> None:
        found.append(Place(len(found) + 1, os.path.relpath(path, ROOT), line))

    with traced(files, see, kind):
        work()
    return found


def some_of_each_line(found: Collection[Place], count: int, seed: int = 0) -> list[Place]:
    """At most ``count`` of the events of each line: the first, and others at random."""
    chooser = random.Random(seed)
    by_line: dict[tuple[str, int], list[Place]] = {}
    for place in found:
        by_line.setdefault(place[1:], []).append(place)
    chosen = [p for first, *rest in by_line.values() for p in (first, *chooser.sample(rest, min(count - 1, len(rest))))]
    return sorted(chosen)


class Interrupt:
    """Raises once: at the ``nth`` event in the files.

    Attributes:
        at: where it did; None if ``work`` ended before.
    """

    def __init__(
        self,
        nth: int,
        files: Collection[str],
        error: Callable[[], BaseException] = KeyboardInterrupt,
        kind: str = "line",
    ) -> None:
        self._nth, self._files, self._error, self._kind = nth, files, error, kind
        self.at: Place | None = None

    def during(self, work: Callable[[], object]) -> BaseException | None:
        """Does ``work``. Returns its exception, without frames and without raising it."""
        seen = [0]

        def see(path: str, line: int) -> None:
            seen[0] += 1
            if seen[0] == self._nth:
                self.at = Place(self._nth, os.path.relpath(path, ROOT), line)
                sys.settrace(None)
                raise self._error()

        asks = torch._C._get_torch_function_state()
        try:
            with traced(self._files, see, self._kind):
                work()
        except BaseException as error:
            # Blocks of DisableTorchFunctionSubclass end in C: a signal comes before or after, a trace function between.
            torch._C._set_torch_function_state(asks)
            found = error
            while error is not None:  # the frames hold what the work had in hand
                error.__traceback__ = None
                error = error.__context__  # type: ignore[assignment]
            return found
        return None


def try_each(
    work: Callable[[], object],
    problems: Callable[[], list[str]],
    choose: Callable[[list[Place]], list[Place]],
    where: frozenset[str],
    kind: str = "line",
    prepare: Callable[[], object] = lambda: None,
) -> None:
    """Does ``work`` again and again, each time with an interrupt at another place.

    Args:
        problems: differences from the expected state afterwards.
        choose: of all places those that are tried.
        where: files.
        prepare: done before ``work``, without an interrupt.
    """
    prepare()
    passed = places(where, work, kind)
    assert problems() == []
    wrong: dict[str, list[str]] = {}
    for place in choose(passed):
        prepare()
        interrupt = Interrupt(place.nth, where, kind=kind)
        interrupt.during(work)
        if found := problems():
            wrong[str(interrupt.at)] = found
    assert not wrong


@contextlib.contextmanager
def storm(seconds: float, error: Callable[[], BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """In this block a real signal raises in the main thread after random times up to ``seconds``: once after the other,
    each when the one before was raised."""
    chooser = random.Random(0)

    def again() -> None:
        signal.setitimer(signal.ITIMER_REAL, chooser.uniform(seconds / 20, seconds))

    def stop(number: int, frame: FrameType | None) -> None:
        again()
        raise error()

    before = signal.signal(signal.SIGALRM, stop)
    again()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ours(printed: list[str]) -> list[str]:
    """Without the interpreter's messages about a signal that raises where only the interpreter can catch it.

    That is in callbacks and threads of its own, in callbacks that hypothesis gives the collector, and in a generator
    that is closed since nothing holds it any more.
    """
    others = ("WeakSet", "Thread._bootstrap", "finalize object", "gc_cumulative_time", "generator object")
    return [t for t in printed if not any(one in t for one in others)]


def is_in_threading(raised: Exception, error: type[BaseException]) -> bool:
    """Whether ``error`` came within ``threading``'s own code, which raised another one in its place.

    ``Thread.start`` gives back a lock that it no longer has, or takes a thread out of a table a second time.
    """
    last = traceback.extract_tb(raised.__traceback__)[-1]
    return isinstance(raised.__context__, error) and last.filename == threading.__file__


def drained(found: list[str]) -> list[str]:
    """The items of a list, which is empty afterwards."""
    taken = list(found)
    found.clear()
    return taken


def switches() -> list[str]:
    """What of the thread is not as it was in the beginning; it is afterwards."""
    found: list[str] = []
    if not gc.isenabled():
        found.append("the collector is off")
        gc.enable()
    if not torch.is_grad_enabled():
        found.append("autograd is off")
        torch.set_grad_enabled(True)
    if not torch._C._is_torch_function_enabled():
        found.append("subclasses are not asked")
        torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)
    if torch.is_inference_mode_enabled():
        found.append("inference mode is on")
    if torch.cuda.is_available() and torch.cuda.current_stream() != torch.cuda.default_stream():
        found.append("another stream is the current one")
        torch.cuda.set_stream(torch.cuda.default_stream())
    return found
