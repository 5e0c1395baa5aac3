"""Several threads that put memory behind a range, chunk by chunk, published in order.

[Note: Chunk threads]
The driver registers chunks of several threads at once and faults pages in with one: so each thread touches its chunk
and then registers it. On an H200 machine with 16 cores: 28.8 GB/s with 16 threads, 20.4 with 8, 5.2 with one (1.1 where
the virtual machine's pages are fresh); 4.0 where the driver faults, however many threads there are
(benchmarks/results/2026-11-22-h200-pinning.json). A chunk that is done before those in front of it waits to be
published, so that the bytes which are ready are always one range from the start. After a failure no thread takes
another chunk; when all have ended, what lies behind the first gap is given back.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol

from fxoffload.runtime import background
from fxoffload.runtime.host_memory.limits import processes_on_this_machine
from fxoffload.runtime.own_threads import begin_thread, device_of_caller

MAX_THREADS = 16


class ChunkOwner(Protocol):
    """What the threads do with a chunk. ``back`` is called by several threads and without the lock, ``publish`` (in
    order) and ``settle`` (all threads have ended, and the first error) with it. ``undo``: either way, and it does not
    raise; ``is_backed`` is False for the chunk that failed."""

    def back(self, start: int, end: int) -> None: ...
    def undo(self, start: int, end: int, *, is_backed: bool) -> None: ...
    def publish(self, start: int, end: int) -> None: ...
    def settle(self, error: BaseException | None) -> None: ...


class ChunkThreads:
    """See [Note: Chunk threads]. Methods are called with the lock of ``changed`` held."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.ready = 0  # published up to here
        self.target = 0  # asked for up to here
        self._claimed = 0  # taken by a thread up to here
        self._ahead: dict[int, int] = {}  # start to end of what is done and not published
        self._running = 0
        self._error: BaseException | None = None
        self._chunk_bytes = self._page = 1

    @property
    def is_running(self) -> bool:
        """Whether a chunk is under way."""
        return self._running > 0

    def grow_to(self, target: int, owner: ChunkOwner, chunk_bytes: int, page: int) -> None:
        """Ask for ``target`` bytes in all. Chunks end at multiples of ``page``, but for the last one.

        Only the threads hold the owner, so that it goes with its last reference once they have ended.
        """
        self.target = target
        self._chunk_bytes, self._page = chunk_bytes, page
        missing = -(-(target - self._claimed) // chunk_bytes)
        for _ in range(min(missing, max_threads() - self._running)):
            try:
                background.start(self._work, owner, device_of_caller(), name="fxoffload-pin")
            except RuntimeError:  # no more threads for this process
                if not self._running:
                    self.target = self.ready
                    raise
                return
            self._running += 1

    def stop(self) -> None:
        """Take no further chunks, and wait for those that were taken."""
        self.target = 0
        while self._running:
            self._changed.wait()

    def restart(self, at: int = 0) -> None:
        """Begin again with the chunks up to ``at``. No thread runs."""
        self.ready = self.target = self._claimed = at

    def _work(self, owner: ChunkOwner, device: int | None) -> None:
        try:
            begin_thread(device)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                return self._end(owner)
        while True:
            with self._changed:
                chunk = self._claim()
                if chunk is None:
                    return self._end(owner)
            start, end = chunk
            try:
                owner.back(start, end)
            except BaseException as error:
                owner.undo(start, end, is_backed=False)
                with self._changed:
                    self._error = self._error or error
            else:
                with self._changed:
                    self._ahead[start] = end
                    self._publish(owner)

    def _claim(self) -> tuple[int, int] | None:
        start = self._claimed
        if self._error is not None or start >= self.target or background.is_ending():
            return None
        end = min((start + self._chunk_bytes) // self._page * self._page, self.target)
        self._claimed = end if end > start else self.target
        return start, self._claimed

    def _publish(self, owner: ChunkOwner) -> None:
        while self.ready in self._ahead:
            start, self.ready = self.ready, self._ahead.pop(self.ready)
            owner.publish(start, self.ready)
        self._changed.notify_all()

    def _end(self, owner: ChunkOwner) -> None:
        """The last thread gives back what cannot be published and tells how it went."""
        if self._running == 1:
            for start, end in self._ahead.items():
                owner.undo(start, end, is_backed=True)
            self._ahead.clear()
            error, self._error = self._error, None
            self._claimed = self.ready
            if error is not None:
                self.target = self.ready
            owner.settle(error)
        self._running -= 1
        self._changed.notify_all()


def max_threads() -> int:
    """One for each core that this process has for itself."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, cores // processes_on_this_machine()))
