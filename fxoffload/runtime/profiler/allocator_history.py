"""A record of every allocation and every free during a while, as the caching allocator can keep it.

The allocator's one peak belongs to the process. It hides whatever stays below an earlier peak (tuned kernels, a rollout
in the same process). A record of the events gives the peak between any two reads.

[Note: One record] A process has one record for all devices. If one is kept already (by a user who looks for memory, or
for another device's step), nothing is recorded here. If another one begins while ours is kept, its events have frames,
and it is left alone. A record without tracebacks cannot be told from ours, and ends with it. A step that is abandoned
keeps the record on until the next call of a compiled graph.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Container
from itertools import accumulate

import torch

from fxoffload.runtime.profiler.allocator_trace import Memory, cuda_memory
from fxoffload.torch_private.cuda import (
    AllocatorEvent,
    allocator_events,
    record_allocator_events,
    records_allocator_events,
    stop_recording_allocator_events,
)

log = logging.getLogger(__name__)

# Events that are recorded at most: a step of eager code has tens of thousands, each of some hundred bytes on the host.
_MOST_EVENTS = 200_000
# The allocator rounds requests up to this; the record has the requests.
_GRAIN_BYTES = 512


class AnothersRecord(RuntimeError):
    """The record that is kept now was begun by other code."""


class AllocatorHistory:
    """The allocations and frees of one device from now on, until ``end``.

    Args:
        events: allocations and frees of the device since the record began, in their order. Raises
            ``AnothersRecord`` where it is no longer ours.
        stop: ends the record.
        first: read of the allocator right before the record began.
    """

    def __init__(
        self,
        memory: Callable[[], Memory],
        events: Callable[[], list[AllocatorEvent]],
        stop: Callable[[], None],
        first: Memory,
    ) -> None:
        self._memory = memory
        self._events = events
        self._stop = stop
        self._is_open = True
        self._lock = threading.Lock()  # a step may be dropped on one thread while it ends on another
        self._first = first
        self._live: list[int] = []  # bytes after each event, above those at first
        self._num_allocations: list[int] = []  # after each event
        self._taken: list[AllocatorEvent] = []

    def end(self, *, read: bool = True) -> None:
        """Record nothing more. ``read``: the record will be needed. Never raises."""
        with self._lock:
            is_open, self._is_open = self._is_open, False
        if not is_open:
            return
        try:
            last, events = self._memory(), self._events()
            if read:
                self._take(last, events)
        except AnothersRecord:
            return
        except Exception as error:
            log.info("the record of the allocator could not be read: %s", error)
        try:
            self._stop()
        except Exception as error:
            log.warning("the record of the allocator could not be ended: %s", error)

    def _take(self, last: Memory, events: list[AllocatorEvent]) -> None:
        first = self._first
        signs = [1 if e.is_allocation else -1 for e in events]
        allocations = [0, *accumulate(s == 1 for s in signs)]
        found = (first.num_allocations + allocations[-1], first.num_frees + len(events) - allocations[-1])
        if found != (last.num_allocations, last.num_frees):
            log.info("the record of the allocator does not hold what was counted")  # too many, or other threads'
            return
        sizes = (s * _rounded(e.nbytes) for s, e in zip(signs, events, strict=True))
        self._live = [0, *accumulate(sizes)]
        self._num_allocations = allocations
        self._taken = events

    def peak_between(self, first: Memory, last: Memory) -> int | None:
        """Most bytes allocated between two reads, as ``Memory.allocated``; None where that is not known.

        Blocks may be larger than requests (in all mostly by less than a MiB): that counts for those that were still
        allocated at ``last``.
        """
        begin, end = self._place_of(first), self._place_of(last)
        if begin is None or end is None or begin > end:
            return None
        base = first.allocated - self._live[begin]
        larger = max(last.allocated - base - self._live[end], 0)
        return max(base + max(self._live[begin : end + 1]) + larger, first.allocated, last.allocated)

    def carried_bytes(self, turn_begin: Memory, turn_end: Memory, without: Container[int] = frozenset()) -> int | None:
        """Bytes that the step before left to a step, and that it leaves to the next: outputs that the caller holds
        until a forward has made others. They are freed between the last forward and the first backward, and as large a
        block that was allocated before stays. ``.grad`` tensors that are dropped there come again later, in the
        backward.

        Args:
            turn_begin: when the last forward has ended.
            turn_end: when the first backward begins.
            without: addresses of memory that does not count.

        Returns:
            Bytes; 0 where events have no addresses; None where the record does not have this part of the step.
        """
        begin, end = self._place_of(turn_begin), self._place_of(turn_end)
        if begin is None or end is None:
            return None
        if not all(e.address for e in self._taken):
            return 0
        made: dict[int, tuple[int, int]] = {}  # address -> bytes, place
        found: Counter[int] = Counter()
        for i, event in enumerate(self._taken):
            if event.is_allocation:
                made[event.address] = event.nbytes, i
            elif made.pop(event.address, None) is None and begin <= i < end and event.address not in without:
                found[event.nbytes] += 1
        stays = Counter(nbytes for nbytes, i in made.values() if i < end)
        return sum(min(n, stays[nbytes]) * _rounded(nbytes) for nbytes, n in found.items())

    def freed_bytes_after(
        self, memory: Memory, stream: int | None = None, without: Container[int] = frozenset()
    ) -> int:
        """Bytes that existed before the record began and were freed after this read: a step gives them back.

        Args:
            stream: the handle of the stream that owns them; None: of any.
            without: addresses of memory that does not count.

        Returns:
            Bytes; 0 where the record does not tell.
        """
        begin = self._place_of(memory)
        if begin is None or not all(e.address for e in self._taken):
            return 0
        made: set[int] = set()
        found = 0
        for i, event in enumerate(self._taken):
            if event.is_allocation:
                made.add(event.address)
            elif event.address in made:
                made.discard(event.address)
            elif i >= begin and stream in (None, event.stream) and event.address not in without:
                found += _rounded(event.nbytes)
        return found

    def _place_of(self, memory: Memory) -> int | None:
        """How many events there were when it was read."""
        allocations = memory.num_allocations - self._first.num_allocations
        place = allocations + memory.num_frees - self._first.num_frees
        if not 0 <= place < len(self._live) or self._num_allocations[place] != allocations:
            return None
        return place


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _GRAIN_BYTES) * _GRAIN_BYTES


def cuda_history(device: torch.device) -> Callable[[], AllocatorHistory | None] | None:
    """A function that begins a record of a device's allocator; None for an allocator that keeps none.

    The function returns None where a record is kept already (see [Note: One record]) or cannot be begun. It never
    raises.
    """
    memory = cuda_memory(device)
    if memory is None or torch.cuda.get_allocator_backend() != "native":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index

    def read() -> list[AllocatorEvent]:
        everywhere = allocator_events()
        if any(e.has_frames for events in everywhere for e in events):
            raise AnothersRecord("somebody else has begun a record")
        return everywhere[index] if index < len(everywhere) else []

    def begin() -> AllocatorHistory | None:
        try:
            first = memory()
            if records_allocator_events():
                return None
            record_allocator_events(_MOST_EVENTS)
            return AllocatorHistory(memory, read, stop_recording_allocator_events, first)
        except Exception as error:
            log.info("the allocator's events are not recorded: %s", error)
            return None

    return begin
