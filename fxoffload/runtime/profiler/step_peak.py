"""The peak of one step, from a few reads of the allocator: exact, or between two bounds.

[Note: The peak of a step] The allocator keeps one peak for the process, which is the user's and never reset here. A
step's peak can be told without a synchronisation in three other ways:

- The process's peak rose in the step, or equals the bytes allocated at a read: then it is the step's.

- A record of the allocator's events (``allocator_history``) has it exactly, but takes milliseconds to read.

- The bytes of all allocations bound it: at most these were added to the bytes at first. A step that allocates no more
  than one whose peak is known, and begins with no more, has no higher a peak. Else it exceeds that peak by the
  difference at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from fxoffload.runtime.profiler.allocator_history import AllocatorHistory
from fxoffload.runtime.profiler.allocator_trace import AllocatorTrace, Memory
from fxoffload.runtime.profiler.first_arguments import FirstArguments


@dataclass(frozen=True)
class StepPeak:
    """Most bytes of a step, above those that were there when it began.

    Attributes:
        least: at least.
        most: at most, without anything that the step before left; None: unknown.
        highest: most bytes at a read.
        total: bytes of all its allocations.
        carried_bytes: the part of the bytes at its begin that outputs of the step before are.
        begun: bytes that were there when it began.
        is_exact: whether ``least`` is the peak: a record gave it, and what the step before left.
    """

    least: int
    most: int | None
    highest: int
    total: int
    carried_bytes: int = 0
    begun: int = 0
    is_exact: bool = False

    def is_covered_by(self, known: StepPeak) -> bool:
        """Whether another step had at least as much in all reads: then it has as high a peak, as far as they tell."""
        return known.total >= self.total and known.highest >= self.highest and known.begun >= self.begun

    def bounded_by(self, known: StepPeak) -> int:
        """At most, given another step of the same plan whose peak is exact."""
        # Bytes that are there from the beginning may be left by the step before (``AllocatorHistory.carried_bytes``).
        left = max(self.begun - known.begun, 0)
        bound = known.least + max(self.total - known.total, self.highest - known.highest, 0)
        return max(bound if self.most is None else min(bound, self.most), self.least) + left


class PeakWatch:
    """Reads of the allocator in one step. Not thread-safe.

    Args:
        memory: when the first call begins.
        args: of the first call. Those that are gone when a step of several calls ends belong to it (see
            ``FirstArguments``). A plan for one graph leaves its inputs, the batch, to the caller.
        left_bytes: at least so much of them does, as another step has told: a plan may keep what that moved.
        others_bytes: the part of the other bytes at its begin that belongs to the step as well.
        carried_bytes: the part that outputs of the step before are, where no record tells.
        history: of the allocator's events, begun with the step; None: there is none.
        owns_history: whether it ends with this watch.
    """

    def __init__(
        self,
        memory: Memory,
        args: Iterable[Any] = (),
        *,
        left_bytes: int = 0,
        others_bytes: int = 0,
        carried_bytes: int = 0,
        history: AllocatorHistory | None = None,
        owns_history: bool = True,
    ) -> None:
        self._trace = AllocatorTrace.begin(memory)
        self._first = FirstArguments(args)
        self._first_bytes = left_bytes
        self._others_bytes, self._carried_bytes = others_bytes, carried_bytes
        self._history = history
        self._owns_history = owns_history
        self._has_several = False
        self._turn: list[Memory] = []  # when the last forward has ended, when the first backward begins

    @property
    def is_recorded(self) -> bool:
        """Whether there is a record of the allocator's events."""
        return self._history is not None

    def forward_begins(self) -> None:
        """After the first: that one's arguments that are gone by now were there for the step alone."""
        self._has_several = True
        self._see_first()

    def _see_first(self) -> None:
        if self._has_several:
            self._first_bytes = max(self._first_bytes, self._first.left_bytes())

    def forward_ended(self, memory: Memory) -> None:
        """One of them. Only of a step that is recorded."""
        self._turn = [memory]

    def first_backward_begins(self, memory: Memory) -> None:
        """The forwards before it have ended."""
        self._see_first()
        self._trace.add(memory)
        self._turn.append(memory)

    def end(self, memory: Memory, is_open: Callable[[StepPeak], bool] = lambda peak: True) -> StepPeak:
        """The step's last call has returned. ``is_open``: whether the record is to be read, where the reads say so."""
        self._see_first()
        self._trace.add(memory)
        found = self._peak(memory, None)
        if self._history is None:
            return found
        reads = is_open(found)
        if self._owns_history:
            self._history.end(read=reads)
        return self._peak(memory, self._history) if reads else found

    def _peak(self, memory: Memory, history: AllocatorHistory | None) -> StepPeak:
        trace, first, carried, is_known = self._trace, self._trace.first, self._carried_bytes, history is not None
        if history is not None and len(self._turn) == 2:
            begin, end = self._turn
            found_bytes = history.carried_bytes(begin, end, self._first.addresses)
            carried, is_known = (carried, False) if found_bytes is None else (found_bytes, True)
        base = first.allocated - self._first_bytes - self._others_bytes - carried
        exact, total = trace.exact_peak(history), memory.total - first.total
        if exact is not None:
            found = StepPeak(exact - base, exact - base, trace.highest - base, total, carried, first.allocated)
            return replace(found, is_exact=is_known)
        bounds = [first.allocated + total] if memory.total and total >= 0 else []  # negative: the counter was reset
        bounds += [] if trace.was_reset else [memory.peak]
        most = max(min(bounds), trace.highest) - base if bounds else None
        return StepPeak(trace.highest - base, most, trace.highest - base, total, carried, first.allocated)

    def drop(self) -> None:
        """The step is not to be judged."""
        if self._history is not None and self._owns_history:
            self._history.end(read=False)
