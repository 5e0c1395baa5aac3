"""The thread that waits for copies, so that the caller need not.

[Note: Threads and the interpreter]
A thread that runs Python gives the interpreter to another one after 5 ms only, unless it sleeps or waits: whoever
launches kernels meanwhile would stand still for as long, and so would the GPU. So these threads sleep for ``YIELD_S``
after a few tenths of a millisecond of work.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable

from fxoffload.phases.forks import Birthplace
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock
from fxoffload.runtime.own_threads import begin_thread, device_of_caller, use_device

log = logging.getLogger(__name__)

YIELD_S = 5e-5

Jobs = queue.SimpleQueue[tuple[int | None, Callable[[], None]] | None]

_ALL: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """Runs jobs one after another, each on the current device of who submitted it. A job handles its own errors; one
    that does not is logged, and the next one runs.

    Of the process that made it: see [Note: Phases and fork].
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = ForkSafeRLock()
        self._birthplace = Birthplace()

    def require_own_process(self, what: str) -> None:
        """Refuses ``what`` in a forked child.

        Raises:
            RuntimeError: this is one.
        """
        self._birthplace.require(what)

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a job.

        Raises:
            RuntimeError: in a forked child.
        """
        self.require_own_process("offload() or onload()")
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run, args=(self._jobs, self._name), name=self._name, daemon=True
                )
                weakref.finalize(self, self._jobs.put, None)
                self._thread.start()
                _ALL.add(self)
            self._jobs.put((device_of_caller(), job))

    def drain(self) -> None:
        """Blocks until everything that was submitted before has run.

        Raises:
            RuntimeError: in a forked child, if there was anything.
        """
        if threading.current_thread() is self._thread or self._thread is None:
            return
        self.require_own_process("a wait for what is being offloaded")
        reached = threading.Event()
        self.submit(reached.set)
        reached.wait()

    def stop(self) -> None:
        """Ends the thread after what was submitted."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None and self._birthplace.is_here:
                self._jobs.put(None)
        if thread is not None and thread is not threading.current_thread() and self._birthplace.is_here:
            thread.join()


def _run(jobs: Jobs, name: str) -> None:
    # Knows the queue only: a worker that nobody has any more ends its thread.
    first = True
    while (order := jobs.get()) is not None:
        device, job = order
        try:
            (begin_thread if first else use_device)(device)
            first = False
            job()
        except BaseException:
            log.exception("a job of the thread %s failed; it goes on with the next one", name)
        del job, order  # a job holds tensors


@atexit.register
def _stop_all() -> None:
    # See [Note: Threads and the end] in fxoffload.runtime.background; what was submitted before is done first.
    for worker in list(_ALL):
        worker.stop()
