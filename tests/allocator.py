"""A caching allocator to measure without a GPU."""

from __future__ import annotations

from fxoffload.runtime.profiler.allocator_history import AllocatorHistory
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.torch_private.cuda import AllocatorEvent


class Allocator:
    """Counts as the caching allocator does, and records when it is asked to."""

    def __init__(self) -> None:
        self.allocated, self.peak = 5000, 10**9
        self.counts = [70, 60]
        self.total = 10**12  # of all allocations
        self.events: list[AllocatorEvent] | None = None
        self.stops = self.address = 0

    def read(self) -> Memory:
        return Memory(self.allocated, self.peak, *self.counts, self.total)

    def allocate(self, nbytes: int, larger: int = 0) -> int:
        """Returns the address."""
        self.address += 1
        self._note(True, nbytes, -(-nbytes // 512) * 512 + larger, self.address)
        return self.address

    def free(self, nbytes: int, larger: int = 0, address: int = 0) -> None:
        self._note(False, nbytes, -(-nbytes // 512) * 512 + larger, address)

    def _note(self, is_allocation: bool, nbytes: int, size: int, address: int) -> None:
        self.allocated += size if is_allocation else -size
        self.peak = max(self.peak, self.allocated)
        self.total += size * is_allocation
        self.counts[not is_allocation] += 1
        if self.events is not None:
            self.events.append(AllocatorEvent(is_allocation, nbytes, False, address))

    def history(self) -> AllocatorHistory:
        self.events = []
        return AllocatorHistory(self.read, lambda: list(self.events or ()), self.stop, self.read())

    def pass_by(self, nbytes: int) -> None:
        """Allocated and freed."""
        self.free(nbytes, address=self.allocate(nbytes))

    def stop(self) -> None:
        self.events = None
        self.stops += 1
