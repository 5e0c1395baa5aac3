"""The peak of one step, from a few reads of the allocator: exact, or between two bounds.

[Note: The peak of a step] The allocator keeps one peak for the process, which is the user's and never reset here. Three
things tell the peak of a step all the same, without a synchronisation:
- The process's peak rose in the step, or equals what is allocated at a read: then it is the step's.
- A record of the allocator's events (``allocator_history``): exact, but it takes milliseconds to be read.
- The bytes of all allocations: at most so much was added to what was there at first. And a step that allocates no more
  than one whose peak is known has no higher a peak; one that allocates more exceeds it by that at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fxoffload.runtime.clocks.allocator_history import AllocatorHistory
from fxoffload.runtime.clocks.allocator_trace import AllocatorTrace, Memory
from fxoffload.runtime.steps.lent import Lent


@dataclass(frozen=True)
class StepPeak:
    """Most bytes of a step, above what was there when it began.

    Attributes:
        least: at least.
        most: at most, ``least`` where the peak is exact; None: nobody knows.
        highest: most bytes at a read.
        total: bytes of all its allocations.
    """

    least: int
    most: int | None
    highest: int
    total: int

    @property
    def is_exact(self) -> bool:
        """Whether both bounds are the same."""
        return self.least == self.most

    def bounded_by(self, known: StepPeak | None) -> int | None:
        """At most, with what is known of another step of the same plan, whose peak is exact; None: nobody knows."""
        if known is None:
            return self.most
        more = max(self.total - known.total, self.highest - known.highest, 0)
        found = max(known.least + more, self.least)
        return found if self.most is None else min(found, self.most)


class PeakWatch:
    """Reads of the allocator in one step. Not thread-safe.

    Args:
        memory: when the first call begins.
        args: of the first call. What of them is gone when the second call begins belongs to the step (see ``Lent``).
        others_bytes: of what is there at first, so much belongs to the step as well.
        history: of the allocator's events, begun with the step; None: there is none.
        owns_history: whether it ends with this watch.
    """

    def __init__(
        self,
        memory: Memory,
        args: Iterable[Any] = (),
        *,
        others_bytes: int = 0,
        history: AllocatorHistory | None = None,
        owns_history: bool = True,
    ) -> None:
        self._trace = AllocatorTrace.begin(memory)
        self._lent: Lent | None = Lent(args)
        self._own_bytes = others_bytes
        self._history = history
        self._owns_history = owns_history

    @property
    def is_recorded(self) -> bool:
        """Whether there is a record of the allocator's events."""
        return self._history is not None

    def second_call_begins(self) -> None:
        """What the first call was given, and is gone by now, was there for the step alone."""
        if self._lent is not None:
            self._own_bytes += self._lent.left_bytes()
            self._lent = None

    def read(self, memory: Memory) -> None:
        """Somewhere in the step."""
        self._trace.add(memory)

    def end(self, memory: Memory, is_open: Callable[[StepPeak], bool] = lambda peak: True) -> StepPeak:
        """The step's last call has returned. ``is_open``: whether the record is to be read, where the reads say so."""
        self._trace.add(memory)
        found = self._peak(memory, None)
        if self._history is None:
            return found
        reads = is_open(found)
        if self._owns_history:
            self._history.end(read=reads)
        return self._peak(memory, self._history) if reads else found

    def _peak(self, memory: Memory, history: AllocatorHistory | None) -> StepPeak:
        trace, first = self._trace, self._trace.first
        base = first.allocated - self._own_bytes
        exact, total = trace.exact_peak(history), memory.total - first.total
        if exact is not None:
            return StepPeak(exact - base, exact - base, trace.highest - base, total)
        bounds = [first.allocated + total] if memory.total else []
        bounds += [] if trace.was_reset else [memory.peak]
        most = max(min(bounds), trace.highest) - base if bounds else None
        return StepPeak(trace.highest - base, most, trace.highest - base, total)

    def drop(self) -> None:
        """The step is not to be judged."""
        if self._history is not None and self._owns_history:
            self._history.end(read=False)
