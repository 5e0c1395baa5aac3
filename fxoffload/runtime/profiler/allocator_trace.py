"""Reads of the caching allocator at points of a step, and the peak between two of them.

[Note: What the bytes mean]
Allocated bytes are read from the caching allocator, relative to those allocated when the step's first forward began.

The allocator keeps one peak for the whole process and device, which belongs to the user and is never reset here. The
peak between two reads is known exactly if it rose between them, or if it equals the bytes allocated at one of them.
Otherwise it is only known to be no higher. So a process that has been higher before (another phase, autotuning in the
first call) has no exact peaks until the user resets the counter. A record of the allocator's events has them
(``allocator_history``). Allocations of other threads at the same time count as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

# Allocators whose statistics hold a peak. A pluggable one raises.
_ALLOCATORS = ("native", "cudaMallocAsync")


class Memory(NamedTuple):
    """One read of the allocator: bytes, how many allocations and frees there have been, and the bytes of all
    allocations since the process began (0 where they are not counted)."""

    allocated: int
    peak: int
    num_allocations: int = 0
    num_frees: int = 0
    total: int = 0


def cuda_memory(device: torch.device) -> Callable[[], Memory] | None:
    """Reads a device's allocator; None for an allocator that keeps no statistics."""
    if torch.cuda.get_allocator_backend() not in _ALLOCATORS:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index

    def read() -> Memory:
        # ``memory_allocated()`` and its like flatten and sort all statistics on every call.
        found = torch.cuda.memory_stats_as_nested_dict(index)
        nbytes, events = found["allocated_bytes"]["all"], found["allocation"]["all"]
        return Memory(nbytes["current"], nbytes["peak"], events["allocated"], events["freed"], nbytes["allocated"])

    return read


class Block(NamedTuple):
    """Memory that is allocated. ``stream``: the handle of the stream that it was allocated on."""

    stream: int
    address: int
    nbytes: int


def cuda_blocks(device: torch.device) -> Callable[[], list[Block]] | None:
    """Lists the allocated blocks: takes tens of milliseconds. None for an allocator that keeps no list of them."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    # Without the history that a user may have recorded, where torch can leave it out.
    can_leave_out = "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
    options = {"include_traces": False} if can_leave_out else {}

    def read() -> list[Block]:
        segments = [s for s in torch.cuda.memory_snapshot(**options) if s["device"] == index]
        return [block for s in segments for block in _blocks_of(s)]

    return read


def _blocks_of(segment: Mapping[str, Any]) -> Iterable[Block]:
    """Of one segment of a snapshot: its blocks follow each other."""
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"] == "active_allocated":
            yield Block(segment["stream"], address, block["size"])
        address += block["size"]


class PeakBetween(Protocol):
    """A record of the allocator's events; see ``allocator_history``."""

    def peak_between(self, first: Memory, last: Memory) -> int | None:
        """Most bytes allocated between two reads; None where that is not known."""
        ...


@dataclass(slots=True)
class AllocatorTrace:
    """Reads of the allocator between two points.

    Attributes:
        highest: most bytes allocated at a read.
        was_reset: whether the peak was reset in between, so that it no longer covers everything.
    """

    first: Memory
    last: Memory
    highest: int
    was_reset: bool = False

    @staticmethod
    def begin(memory: Memory) -> AllocatorTrace:
        return AllocatorTrace(memory, memory, memory.allocated)

    def go_on(self) -> AllocatorTrace:
        """A trace from the same first read, to be continued apart from this one."""
        return AllocatorTrace(self.first, self.last, self.highest, self.was_reset)

    def add(self, memory: Memory) -> None:
        self.was_reset = self.was_reset or memory.peak < self.last.peak
        self.last = memory
        self.highest = max(self.highest, memory.allocated)

    def exact_peak(self, history: PeakBetween | None = None) -> int | None:
        """The peak where it is known (see [Note: What the bytes mean]), by a record of the events where the counter
        does not say. Absolute bytes, as the counter's."""
        if not self.was_reset and (self.last.peak > self.first.peak or self.highest == self.last.peak):
            return self.last.peak
        return None if history is None else history.peak_between(self.first, self.last)

    def bounds(self) -> tuple[int, int] | None:
        """At least and at most, both the exact peak where it is known; None where there is no upper bound."""
        if self.was_reset:
            return None
        exact = self.exact_peak()
        return (self.highest if exact is None else exact, self.last.peak)
