"""One line about work that takes longer than two seconds: planning, compiling, measuring, pinning host memory.

    with working("compiling segments") as work:
        for i, segment in enumerate(segments):
            work.what = f"compiling segment {i + 1} of {len(segments)}"

[Note: Progress] Work within work shares one line. On a terminal the line is renewed until the work ends, and then says
how long that took. Elsewhere one line is written when two seconds have passed. Rank 0 alone writes. Each use starts a
timer thread, so nothing in a step uses this, except a step that stands still for host memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fxoffload.environment import PROGRESS_VARIABLE, shows_progress
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock

log = logging.getLogger(__name__)

AFTER_S = 2.0
_RENEWALS_PER_S = 2


@dataclass(eq=False)
class Work:
    """``what``: in words; may be changed."""

    what: str
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.began


@contextlib.contextmanager
def working(what: str, *, in_background: bool = False) -> Iterator[Work]:
    """See [Note: Progress].

    Args:
        what: is being done, in words.
        in_background: training steps go on. The line is not renewed: it would fight with a progress bar's.
    """
    work = Work(what)
    if not shows_progress() or not _is_main_rank():
        yield work
        return
    board = _boards[in_background]
    try:
        board.begin(work)
        yield work
    finally:
        board.end(work)


class _Board:
    """The works that go on, of any thread, and the line about them."""

    def __init__(self, *, renews: bool) -> None:
        self._renews = renews
        self._lock = ForkSafeRLock()
        self._works: list[Work] = []
        self._timer: threading.Timer | None = None
        self._live: Any = None  # of rich, while it is shown

    def begin(self, work: Work) -> None:
        with self._lock:
            self._works.append(work)
            if self._timer is None:
                self._timer = threading.Timer(AFTER_S, self._show)
                self._timer.daemon = True
                with contextlib.suppress(RuntimeError):  # there can be no more threads
                    self._timer.start()

    def end(self, work: Work) -> None:
        with self._lock:
            if work in self._works:
                self._works.remove(work)
            if self._works:
                return
            timer, live, self._timer, self._live = self._timer, self._live, None, None
        if timer is not None:
            timer.cancel()
        if live is not None:
            with contextlib.suppress(Exception):  # The terminal may be gone.
                live.stop()
            _write(f"fxoffload: {work.what}: {work.seconds:.1f} s")

    def text(self) -> str:
        """For example "compiling a graph: planning, 36 layers, 5 s"."""
        works = list(self._works)
        seconds = f", {works[0].seconds:.0f} s" if works else ""
        return f"fxoffload: {': '.join(dict.fromkeys(work.what for work in works))}{seconds}"

    def _show(self) -> None:
        """The timer's thread."""
        with self._lock:
            if not self._works:
                return
            if self._renews and _is_terminal():
                with contextlib.suppress(Exception):
                    self._live = _live(self)
                return
        hidden = f"{PROGRESS_VARIABLE}=0 hides such lines"
        if log.isEnabledFor(logging.INFO):
            log.info("%s so far (%s)", self.text(), hidden)
        else:
            _write(f"{self.text()} so far ({hidden})")


def _live(board: _Board) -> Any:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    spinner = Spinner("dots")

    def line() -> Any:
        spinner.update(text=board.text())
        return spinner

    # What others write meanwhile is theirs: standard output and error stay as they are.
    live = Live(
        console=Console(stderr=True),
        get_renderable=line,
        refresh_per_second=_RENEWALS_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    live.start()
    return live


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        print(line, file=sys.stderr, flush=True)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def _is_main_rank() -> bool:
    """Before a process group is there, as torchrun says."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


_boards: dict[bool, _Board] = {}


def _begin() -> None:
    """Also in a forked child, where none of the works goes on."""
    _boards.update({False: _Board(renews=True), True: _Board(renews=False)})


_begin()
os.register_at_fork(after_in_child=_begin)
