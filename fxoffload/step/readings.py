"""Measurements of a graph's segments: the calls that were read, and the numbers that stand for all of them.

[Note: What the times mean]

- A segment's bracket begins after the waits for copies that were enqueued before it, and ends before the next op. So it
  holds the segment's kernels and nothing else that this graph asks for. They run *during the copies of that step*:
  where memory bandwidth is short, a segment is slower during a copy than alone.

- Where the host launches more slowly than the device computes, the gaps between kernels are in the bracket. The
  executor's work between segments is in the time of the phase. A sum of brackets far above the estimates tells so.

- Only host time that the device notices is added. Reading the allocator takes tens of microseconds, outside the
  brackets; a device that lags the host sees none of it.

- The time of a phase runs from its begin to its end on the compute stream, waits included. Code that the user runs
  between forward and backward (a loss outside of the graph) is the forward's last segment, ``TURN``.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(slots=True)
class Sample:
    """One call that was read. Bytes relative to the beginning of the forward; see ``Readings``.

    Attributes:
        phase_ms: the whole call.
        segment_ms: by segment.
        begin_ms: when each segment begins, from the beginning of the phase; where calls of both take turns, as if those
            of a phase followed one another.
        live_before: bytes allocated before each segment.
        live_after: bytes allocated after each segment.
        peaks: most bytes allocated while each segment ran; None where that is not known.
        temp_bytes: most bytes while each segment ran, above those when it began; None where that is not known.
        gap_peaks: most bytes between two calls, by the empty segment that stands there; None where that is not known.
        peak: most bytes from the beginning of the forward to the end of this call, or None.
        bounds: at least and at most the same, or None.
        after_step_ms: of a forward, from the last call of the step before to its beginning; None where that is not
            known.
    """

    phase_ms: float
    segment_ms: dict[str, float] = field(default_factory=dict)
    live_before: dict[str, int] = field(default_factory=dict)
    live_after: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    temp_bytes: dict[str, int | None] = field(default_factory=dict)
    gap_peaks: dict[str, int | None] = field(default_factory=dict)
    begin_ms: dict[str, float] = field(default_factory=dict)
    peak: int | None = None
    bounds: tuple[int, int] | None = None
    after_step_ms: float | None = None

    def raise_bytes(self, nbytes: int) -> None:
        """Add ``nbytes`` that were there at the beginning to all counts but ``gap_peaks``, which have them already."""
        for found in (self.live_before, self.live_after):
            found.update({name: live + nbytes for name, live in found.items()})
        self.peaks = {name: None if peak is None else peak + nbytes for name, peak in self.peaks.items()}
        self.peak = None if self.peak is None else self.peak + nbytes
        self.bounds = None if self.bounds is None else (self.bounds[0] + nbytes, self.bounds[1] + nbytes)


@dataclass(frozen=True)
class Readings:
    """Calls that were read, of one signature, by phase. A phase that was not measured has none.

    Attributes:
        skipped_gaps: ``Sample.gap_peaks`` of steps of which nothing else counts.
        signature: of the calls; None: not known.
    """

    samples: Mapping[Phase, Sequence[Sample]]
    skipped_gaps: Sequence[Mapping[str, int | None]] = ()
    signature: Hashable = None

    def segment_ms(self) -> dict[Phase, dict[str, float]]:
        """Milliseconds of each segment: medians. See [Note: What the times mean]."""
        return {p: _medians(s.segment_ms for s in found) for p, found in self.samples.items()}

    def step_ms(self) -> dict[Phase, float]:
        """Milliseconds of each phase, waits between segments included: medians. A phase that was not measured is
        missing."""
        return {p: statistics.median(s.phase_ms for s in found) for p, found in self.samples.items() if found}

    def waits_ms(self) -> dict[Phase, dict[str, float]]:
        """Milliseconds between the end of the segment before and the beginning of each: medians. A wait at the end of a
        chain's call is before the gap that follows."""
        return {p: _medians(map(_waits, found)) for p, found in self.samples.items()}

    def typical(self) -> tuple[Sample, Sample] | None:
        """A forward and its backward, of the step whose time is nearest to the median; None where one is missing."""
        pairs = list(zip(self.samples.get("forward", ()), self.samples.get("backward", ()), strict=False))
        if not pairs:
            return None
        middle = statistics.median(f.phase_ms + b.phase_ms for f, b in pairs)
        return min(pairs, key=lambda pair: abs(pair[0].phase_ms + pair[1].phase_ms - middle))

    def live_before(self) -> dict[Phase, dict[str, int]]:
        """Bytes allocated before each segment, above those at the beginning of the forward: medians."""
        return {p: _median_bytes(s.live_before for s in found) for p, found in self.samples.items()}

    def live_after(self) -> dict[Phase, dict[str, int]]:
        """Bytes allocated after each segment, above those at the beginning of the forward: medians."""
        return {p: _median_bytes(s.live_after for s in found) for p, found in self.samples.items()}

    def segment_peaks(self) -> dict[Phase, dict[str, int | None]]:
        """Most bytes allocated while each segment ran, above those at the beginning of the forward: the largest of the
        exact ones, None where none is known. See [Note: What the bytes mean] in ``allocator_trace``."""
        return {p: _largest(s.peaks for s in found) for p, found in self.samples.items()}

    def temp_bytes(self) -> dict[Phase, dict[str, int | None]]:
        """As ``segment_peaks``, above the bytes when the segment began (the simulator's ``SegmentStep.temp_bytes``)."""
        return {p: _largest(s.temp_bytes for s in found) for p, found in self.samples.items()}

    def gap_peaks(self) -> dict[str, int]:
        """Most bytes between two calls of a step, above those at the beginning of the forward, by the empty segment
        that stands there. Gaps whose peak is not known are missing. The peak of the process rises mostly in a plan's
        first step."""
        found = _largest((*(s.gap_peaks for of in self.samples.values() for s in of), *self.skipped_gaps))
        return {name: peak for name, peak in found.items() if peak is not None}

    def between_steps_ms(self) -> float | None:
        """Milliseconds from the end of a step's last call to the beginning of the next step's first one: the median;
        None: not known."""
        found = [s.after_step_ms for s in self.samples.get("forward", ()) if s.after_step_ms is not None]
        return statistics.median(found) if found else None

    def peak_bytes(self) -> int | None:
        """Most bytes allocated from the beginning of a forward to the end of its backward, above those at that
        beginning: the largest of the exact ones, None where none is known. Code between the two counts too."""
        return max((s.peak for s in self.samples["backward"] if s.peak is not None), default=None)

    def peak_bounds_bytes(self) -> tuple[int, int] | None:
        """Bounds of ``peak_bytes``, which need not be exact. Low: most bytes allocated at the edge of a segment. High:
        the allocator's peak, which may be older than the step."""
        found = [s.bounds for s in self.samples["backward"] if s.bounds is not None]
        return (max(low for low, _ in found), max(high for _, high in found)) if found else None


def _waits(sample: Sample) -> dict[str, float]:
    found, ended = {}, 0.0
    for name, begins in sorted(sample.begin_ms.items(), key=lambda item: item[1]):
        found[name] = begins - ended
        ended = begins + sample.segment_ms[name]
    return found


def _by_name(maps: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Name -> its values, in the order of the first map that has it."""
    found: dict[str, list[Any]] = {}
    for values in maps:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def _medians(maps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in _by_name(maps).items()}


def _median_bytes(maps: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return {name: statistics.median_high(values) for name, values in _by_name(maps).items()}


def _largest(maps: Iterable[Mapping[str, int | None]]) -> dict[str, int | None]:
    return {name: max((v for v in vs if v is not None), default=None) for name, vs in _by_name(maps).items()}
