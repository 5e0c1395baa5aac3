"""The thread that waits for copies, so that the caller need not."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable


class Worker:
    """Runs jobs one after another. A job handles its own errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a job."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=_run, args=(self._jobs,), name=self._name, daemon=True)
                weakref.finalize(self, self._jobs.put, None)
                self._thread.start()
            self._jobs.put(job)

    def drain(self) -> None:
        """Blocks until everything that was submitted before has run."""
        if threading.current_thread() is self._thread or self._thread is None:
            return
        reached = threading.Event()
        self.submit(reached.set)
        reached.wait()

    def stop(self) -> None:
        """Ends the thread after what was submitted."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    # Knows the queue only: a worker that nobody has any more ends its thread.
    while (job := jobs.get()) is not None:
        job()
        del job  # a job holds tensors
