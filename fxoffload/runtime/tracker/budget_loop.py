"""Whether the steps of one plan meet their budget, step by step.

Each step's peak is read (``fxoffload.runtime.profiler.step_peak``). Where the reads leave it open whether a step met
the budget, the following ones are recorded, until one that allocates as much has told. The caller decides what to do
with a plan that is exceeded.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

from fxoffload.runtime.profiler.step_peak import StepPeak
from fxoffload.sizes import format_bytes

log = logging.getLogger(__name__)

# Most consecutive corrections of a plan that is exceeded: one that needs more does not settle.
MOST_CORRECTIONS = 6
# A step's allocation has fallen where it is less by this part of the budget.
_FALL = 0.05
# After this many recordings that do not tell the peak, request no more until a peak is known.
_MOST_FAILED = 3
# Most steps with known peaks that are remembered.
_MOST_KNOWN = 8
# Wait this many steps for one like a step whose peak is open. The end of a recording takes milliseconds, read or not.
_MOST_WAITED = 32


class BudgetLoop:
    """Judges the steps of one plan.

    Args:
        budget_bytes: that each of them is to meet.
        is_exceeded: whether they are known to exceed it; then ``ended`` finds no excess, and only a fall counts.
        num_skipped: how many of the first steps are not judged: kernels are tuned in them.

    Attributes:
        num_skipped: how many steps are still not to be judged.
        records_next: whether the next step has to be recorded. The first one has.
        num_fallen: how many steps in a row have allocated far less than one whose peak is known.
        peak_bytes: the highest peak that was found.
    """

    def __init__(self, budget_bytes: int, *, is_exceeded: bool = False, num_skipped: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.num_skipped = num_skipped
        self.records_next = True
        self.num_fallen = 0
        self.peak_bytes = 0
        self._is_exceeded = is_exceeded
        self._known: list[StepPeak] = []  # exact, or at most as high
        self._newest: StepPeak | None = None  # of those
        self._open: StepPeak | None = None  # of a step whose exact peak is not known
        self._num_waited = self._num_failed = 0
        self._asks = self._has_asked = False

    def asks(self) -> bool:
        """Whether the next step is recorded to know its exact peak: unless the last one was for this."""
        self._asks = not self._has_asked
        self.records_next = self.records_next or self._asks
        return self._asks

    def carried_bytes(self, begun: int) -> int:
        """The part of ``begun``, a step's bytes at its start, that the step before has left, as far as is known."""
        newest = self._newest
        is_there = newest is not None and begun > newest.begun - newest.carried_bytes // 2
        return newest.carried_bytes if newest is not None and is_there else 0

    def is_open(self, peak: StepPeak) -> bool:
        """Whether the reads leave open if the step exceeded the budget."""
        if peak.is_exact:
            return False
        if self._asks:
            return True
        if self._is_exceeded and self._known:
            return False
        if self._newest is not None and self.carried_bytes(peak.begun) != self._newest.carried_bytes:
            return True
        most = min(map(peak.bounded_by, self._known), default=None)
        return most is None or most > self.budget_bytes >= peak.least

    def ended(self, peak: StepPeak, *, is_recorded: bool) -> int:
        """A step has ended. Returns by how many bytes it exceeded the budget, as far as is known; 0: it did not, or a
        later step will tell."""
        self._has_asked, self._asks = self._asks, False
        is_open, most = self.is_open(peak), max((known.total for known in self._known), default=0)
        self.peak_bytes = max(self.peak_bytes, peak.least)
        self.num_fallen = self.num_fallen + 1 if peak.total < most - _FALL * self.budget_bytes else 0
        if peak.is_exact:
            self._newest = peak
            self._learn(peak)
        self._wait(peak, is_open)
        self._num_failed = 0 if peak.is_exact else self._num_failed + (is_open and is_recorded)
        self.records_next = self._open is not None and self._num_failed < _MOST_FAILED
        if self._num_failed == _MOST_FAILED and is_open and is_recorded:
            self._say(peak)
        return 0 if self._is_exceeded else max(peak.least - self.budget_bytes, 0)

    def _learn(self, peak: StepPeak) -> None:
        """An exact peak. Where a step with less in all reads had a higher one, that counts for those with more too."""
        if any(map(peak.is_covered_by, self._known)):
            self._known = [
                replace(k, least=max(k.least, peak.least)) if peak.is_covered_by(k) else k for k in self._known
            ]
            return
        least = max([peak.least, *(k.least for k in self._known if k.is_covered_by(peak))])
        self._known = [*self._known, replace(peak, least=least)][-_MOST_KNOWN:]

    def _wait(self, peak: StepPeak, is_open: bool) -> None:
        """Note that a step is open, or count the steps that an earlier one has waited for an answer."""
        if is_open and (self._open is None or peak.total > self._open.total):
            self._open, self._num_waited = peak, 0
        elif self._open is not None:
            self._num_waited += 1
            tells = peak.is_exact and peak.total >= self._open.total
            if tells or not self.is_open(self._open) or self._num_waited >= _MOST_WAITED:
                self._open = None

    def _say(self, peak: StepPeak) -> None:
        log.info(
            "expected a record of the allocator's events to tell a step's peak, found %d that do not; it lies between "
            "%s and %s, the budget is %s",
            self._num_failed,
            format_bytes(peak.least),
            "an unknown bound" if peak.most is None else format_bytes(peak.most),
            format_bytes(self.budget_bytes),
        )


class BudgetControl(Protocol):
    """Holds a graph with a plan of its own to its budget."""

    @property
    def loop(self) -> BudgetLoop | None:
        """Judges its steps; None while they do not follow the plan."""
        ...

    def exceeded(self, excess_bytes: int, num_corrections: int, *, is_observed: bool = False) -> None:
        """A step exceeded the budget by these bytes. It may be left to a plan for the step, which others are observed
        for, unless this one was.

        Args:
            excess_bytes: of the step.
            num_corrections: in a row, with this one.
            is_observed: whether that plan can be made from this step and the one before.
        """
        ...

    def fallen(self, peak_bytes: int) -> None:
        """Steps allocate far less than they did, and have at most this peak."""
        ...
