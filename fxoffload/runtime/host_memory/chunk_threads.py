"""Several threads that back a range with memory, chunk by chunk, published in order.

[Note: Chunk threads]
The driver registers chunks of several threads at once, but faults pages in with one thread. So each thread touches its
chunk and then registers it. On an H200 machine with 16 cores: 28.8 GB/s with 16 threads, 20.4 with 8, 5.2 with one. One
thread has 1.1 where the virtual machine's pages are fresh. Where the driver faults, any number of threads has 4.0
(benchmarks/results/2026-11-22-h200-pinning.json).

A chunk that is done before those in front of it waits to be published, so that the ready bytes are always one range
from the start. After a failure no thread takes another chunk. When all have ended, memory after the first gap is given
back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from fxoffload.processes import processes_on_this_machine
from fxoffload.runtime import background
from fxoffload.runtime.own_threads import begin_thread, device_of_caller
from fxoffload.runtime.transactions import Changes

MAX_THREADS = 16


class ChunkOwner(Protocol):
    """The operations of the threads on a chunk.

    ``back`` is called by several threads and without the lock. ``publish`` (in order; once more where it was
    interrupted) and ``settle`` (all threads have ended, and the first error) are called in a transaction of the owner,
    as ``transact`` begins one. ``undo``: either way, and it does not raise; ``is_backed`` is False for the chunk that
    failed.
    """

    def transact(self, work: Callable[[], Any]) -> Any: ...
    def back(self, start: int, end: int) -> None: ...
    def undo(self, start: int, end: int, *, is_backed: bool) -> None: ...
    def publish(self, start: int, end: int) -> None: ...
    def settle(self, error: BaseException | None) -> None: ...


class ChunkThreads:
    """See [Note: Chunk threads]. Methods are called in a transaction of the owner.

    Args:
        changes: is told of every chunk, and of the end of every thread.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.ready = 0  # published up to here
        self.target = 0  # asked for up to here
        self._claimed = 0  # taken by a thread up to here.
        self._ahead: dict[int, int] = {}  # `start -> end` of chunks that are done and not published
        self._threads: list[threading.Thread] = []  # that have not ended, as far as is known
        self._error: BaseException | None = None
        self._chunk_bytes = self._page = 1

    @property
    def is_running(self) -> bool:
        """Whether a chunk is under way."""
        return any(thread.is_alive() for thread in self._threads)

    def grow_to(self, target: int, owner: ChunkOwner, chunk_bytes: int, page: int) -> None:
        """Ask for ``target`` bytes in all. Chunks end at multiples of ``page``, but for the last one.

        Only the threads hold the owner, so that it goes with its last reference once they have ended.
        """
        self.target = target
        self._chunk_bytes, self._page = chunk_bytes, page
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        missing = -(-(target - self._claimed) // chunk_bytes)
        for _ in range(min(missing, max_threads() - len(self._threads))):
            try:
                thread = background.start(self._work, owner, device_of_caller(), name="fxoffload-pin")
            except RuntimeError:  # no more threads for this process
                if not self._threads:
                    self.target = self.ready
                    raise
                return
            self._threads.append(thread)

    def stop(self) -> None:
        """Take no further chunks."""
        self.target = 0

    def restart(self, at: int = 0) -> None:
        """Begin again with the chunks up to ``at``. No thread runs."""
        self.ready = self.target = self._claimed = at

    def mend(self, ready: int) -> None:
        """A transaction was interrupted. ``ready``: up to here chunks were published."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self.ready = ready
        for start in [start for start in self._ahead if start < ready]:
            del self._ahead[start]
        if not self._threads:
            self.restart(ready)

    def _work(self, owner: ChunkOwner, device: int | None) -> None:
        has_ended = False
        while not has_ended:
            try:
                owner.transact(self._begin)
                begin_thread(device)
                while (chunk := owner.transact(self._claim)) is not None:
                    self._back(owner, *chunk)
            except BaseException as error:
                self._error = self._error or error
            has_ended = owner.transact(lambda: self._end(owner))

    def _begin(self) -> None:
        """The thread that has started this one may have been interrupted before it was noted."""
        if threading.current_thread() not in self._threads:
            self._threads.append(threading.current_thread())

    def _back(self, owner: ChunkOwner, start: int, end: int) -> None:
        try:
            owner.back(start, end)
        except BaseException:
            owner.undo(start, end, is_backed=False)
            raise
        owner.transact(lambda: self._done(owner, start, end))

    def _is_over(self) -> bool:
        return self._error is not None or self._claimed >= self.target or background.is_ending()

    def _claim(self) -> tuple[int, int] | None:
        start = self._claimed
        if self._is_over():
            return None
        end = min((start + self._chunk_bytes) // self._page * self._page, self.target)
        self._claimed = end if end > start else self.target
        return start, self._claimed

    def _done(self, owner: ChunkOwner, start: int, end: int) -> None:
        self._ahead[start] = end
        while (following := self._ahead.get(self.ready)) is not None:
            owner.publish(self.ready, following)
            del self._ahead[self.ready]
            self.ready = following
        self._changes.notify()

    def _end(self, owner: ChunkOwner) -> bool:
        """The last thread gives back chunks that cannot be published, and settles. False where more was asked for
        since this one found nothing left: it counted as one that would do it."""
        if not self._is_over():
            return False
        mine = threading.current_thread()
        if not any(thread.is_alive() for thread in self._threads if thread is not mine):
            for start, end in self._ahead.items():
                owner.undo(start, end, is_backed=True)
            self._ahead.clear()
            error = self._error
            self._claimed = self.ready
            if error is not None:
                self.target = self.ready
            owner.settle(error)
            self._error = None
        self._threads = [thread for thread in self._threads if thread is not mine]
        self._changes.notify()
        return True


def max_threads() -> int:
    """One for each core that this process has for itself."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, cores // processes_on_this_machine()))
