"""The thread that waits for copies, so that the caller need not.

[Note: Threads and the interpreter]
A thread that runs Python gives the interpreter to another one after 5 ms only, unless it sleeps or waits. A thread that
launches kernels would stand still for as long, and so would the GPU. So these threads sleep for ``YIELD_S`` after a few
tenths of a millisecond of work.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable

from fxoffload.phases.forks import Birthplace
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock, locked
from fxoffload.runtime.own_threads import begin_thread, device_of_caller, use_device
from fxoffload.runtime.transactions import Latch
from fxoffload.runtime.weak_bag import WeakBag

log = logging.getLogger(__name__)

YIELD_S = 5e-5

_ALL: WeakBag[Worker] = WeakBag()


class _Job:
    """Work that is done once. ``failed``: called where it was not done to its end, with the reason."""

    def __init__(self, work: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        self._device = device_of_caller()
        self._work, self._failed = work, failed
        self._has_begun = False
        self.is_over = False

    def run(self, begin: Callable[[int | None], None]) -> None:
        if self._has_begun:
            self._fail(RuntimeError("the thread that moves memory was interrupted"))
            return
        self._has_begun = True
        try:
            begin(self._device)
            self._work()
        except BaseException as error:
            self._fail(error)
            raise
        self.is_over = True

    def _fail(self, error: BaseException) -> None:
        self._failed(error)
        self.is_over = True


class _Jobs:
    """The state that the thread holds: it does not hold the worker, which ends the thread when it is dropped."""

    def __init__(self) -> None:
        self.waiting: deque[_Job] = deque()  # the first one may be running: it is taken out when it is over
        self.turn = ForkSafeRLock()  # of the thread that runs them: two after a ``stop`` that was interrupted
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None  # that waits for more of them

    def end(self) -> None:
        self.thread = None
        self.wake.put(None)


class Worker:
    """Runs jobs one after another, each on the current device of who submitted it. A job handles its own errors; one
    that does not is logged, and the next one runs.

    Of the process that made it: see [Note: Phases and fork].
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs = _Jobs()
        self._lock = ForkSafeRLock()
        self.birthplace = Birthplace()
        weakref.finalize(self, self._jobs.end)
        _ALL.add(self)

    @locked(lambda self, *args: self._lock)
    def submit(self, work: Callable[[], None], failed: Callable[[BaseException], None] = lambda error: None) -> None:
        """Queues a job: by one store, so that an exception comes before it or after it.

        Args:
            failed: called in the thread where ``work`` raises or is interrupted.

        Raises:
            RuntimeError: in a forked child, or there can be no more threads.
        """
        self.birthplace.require("offload() or onload()")
        thread = self._jobs.thread
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=_run, args=(self._jobs, self._name), name=self._name, daemon=True)
            self._jobs.thread = thread
            thread.start()
        self._jobs.waiting.append(_Job(work, failed))
        self._jobs.wake.put(None)

    def drain(self) -> None:
        """Blocks until everything that was submitted before has run.

        Raises:
            RuntimeError: in a forked child, if there was anything.
        """
        thread = self._jobs.thread
        if thread is None or thread is threading.current_thread():
            return
        self.birthplace.require("a wait for what is being offloaded")
        reached = Latch()
        self.submit(reached.open, lambda error: reached.open())
        reached.wait()

    def stop(self) -> None:
        """Ends the thread after the jobs that were submitted."""
        if not self.birthplace.is_here:
            return
        thread = self._end()
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join()

    @locked(lambda self: self._lock)
    def _end(self) -> threading.Thread | None:
        thread = self._jobs.thread
        self._jobs.end()
        return thread


def _run(jobs: _Jobs, name: str) -> None:
    is_over = False
    while not is_over:
        with contextlib.suppress(BaseException):  # one that came while another one was told of
            _run_all(jobs, name)
            is_over = True


def _run_all(jobs: _Jobs, name: str) -> None:
    mine = threading.current_thread()
    begin = begin_thread
    while True:
        try:
            while jobs.waiting:
                _run_first(jobs, begin)
                begin = use_device
            if jobs.thread is not mine and not jobs.waiting:
                return
            jobs.wake.get()
        except BaseException:
            log.exception("a job of the thread %s failed; it goes on with the next one", name)


@locked(lambda jobs, begin: jobs.turn)
def _run_first(jobs: _Jobs, begin: Callable[[int | None], None]) -> None:
    job = jobs.waiting[0] if jobs.waiting else None
    if job is None:
        return
    if not job.is_over:
        job.run(begin)
    jobs.waiting.popleft()


@atexit.register
def _stop_all() -> None:
    # See [Note: Threads and the end] in fxoffload.runtime.background; jobs that were submitted before are done first.
    for worker in list(_ALL):
        worker.stop()
