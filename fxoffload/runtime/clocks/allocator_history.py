"""Every allocation and every free of a while, as the caching allocator can record them.

The allocator's one peak belongs to the process, and hides whatever came to less than it has been before (kernels that
were tuned, a rollout in the same process). A record of the events says what the peak was between any two reads.

[Note: One record] A process has one record for all devices. Where somebody keeps it already (to look for what takes
memory), it is theirs: nothing is recorded here. If somebody begins to while it is ours, their events have frames, and
it is left to them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate

import torch

from fxoffload._torch_private import (
    AllocatorEvent,
    allocator_events,
    record_allocator_events,
    records_allocator_events,
    stop_recording_allocator_events,
)
from fxoffload.runtime.clocks.allocator_trace import Memory, cuda_memory

log = logging.getLogger(__name__)

# Events that are recorded at most: a step of eager code has tens of thousands, each of some hundred bytes on the host.
_MOST_EVENTS = 200_000
# What is allocated is rounded up to so much; the record has what was asked for.
_GRAIN_BYTES = 512


class AllocatorHistory:
    """What is allocated and freed on one device from now on, until ``end``.

    Args:
        memory: reads the allocator.
        events: allocations and frees of the device since the record began, in their order.
        stop: ends the record.
    """

    def __init__(
        self,
        memory: Callable[[], Memory],
        events: Callable[[], list[AllocatorEvent]],
        stop: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._events = events
        self._stop = stop
        self._is_open = True
        self._first = memory()
        self._live: list[int] = []  # behind each event, above what there was at first
        self._num_allocations: list[int] = []  # likewise

    def end(self, *, read: bool = True) -> None:
        """Record nothing more. ``read``: what was recorded is to be asked for; this takes tens of milliseconds. Never
        raises."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if read:
                self._read()
        except Exception as error:
            log.info("the record of the allocator could not be read: %s", error)
        finally:
            self._stop()

    def _read(self) -> None:
        last, first = self._memory(), self._first
        events = self._events()
        signs = [1 if e.is_allocation else -1 for e in events]
        allocations = [0, *accumulate(s == 1 for s in signs)]
        found = (first.num_allocations + allocations[-1], first.num_frees + len(events) - allocations[-1])
        if found != (last.num_allocations, last.num_frees):
            log.info("the record of the allocator does not hold what was counted")  # too many, or other threads'
            return
        sizes = (s * -(-e.nbytes // _GRAIN_BYTES) * _GRAIN_BYTES for s, e in zip(signs, events, strict=True))
        self._live = [0, *accumulate(sizes)]
        self._num_allocations = allocations

    def peak_between(self, first: Memory, last: Memory) -> int | None:
        """Most bytes allocated between two reads, as ``Memory.allocated``; None where that is not known. Blocks that
        are larger than what was asked for, by a MiB at most, count where they were still there at ``last``."""
        begin, end = self._place_of(first), self._place_of(last)
        if begin is None or end is None or begin > end:
            return None
        base = first.allocated - self._live[begin]
        larger = max(last.allocated - base - self._live[end], 0)
        return max(base + max(self._live[begin : end + 1]) + larger, first.allocated, last.allocated)

    def _place_of(self, memory: Memory) -> int | None:
        """How many events there were when it was read."""
        allocations = memory.num_allocations - self._first.num_allocations
        place = allocations + memory.num_frees - self._first.num_frees
        if not 0 <= place < len(self._live) or self._num_allocations[place] != allocations:
            return None
        return place


def cuda_history(device: torch.device) -> Callable[[], AllocatorHistory | None] | None:
    """Begins a record of a device's allocator, if nobody has one (see [Note: One record]); None for an allocator that
    keeps none."""
    memory = cuda_memory(device)
    if memory is None or torch.cuda.get_allocator_backend() != "native":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index

    def begin() -> AllocatorHistory | None:
        if records_allocator_events():
            return None
        is_theirs = False

        def events() -> list[AllocatorEvent]:
            nonlocal is_theirs
            found = allocator_events(index)
            is_theirs = any(e.has_frames for e in found)
            return found

        def stop() -> None:
            if not is_theirs:
                stop_recording_allocator_events()

        record_allocator_events(_MOST_EVENTS)
        try:
            return AllocatorHistory(memory, events, stop)
        except BaseException:
            stop()
            raise

    return begin
