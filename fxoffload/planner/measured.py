"""A measured step, segment by segment: when each ran, and the bytes on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fxoffload.step.readings import PHASES, Phase, Readings
from fxoffload.step.segment_names import place_of


class MeasuredSegment(NamedTuple):
    """One call of a segment. Bytes count from the beginning of the step; None: not known.

    Attributes:
        phase: "forward" or "backward".
        segment: its name, as in ``Plan.boundaries``.
        layer: label of its layer, or "".
        begin_ms: when the device began it, from the beginning of the step.
        end_ms: when the device ended it.
        live_bytes: on the device right before it.
        peak_bytes: the most while it ran.
        after_bytes: on the device when it has ended.
    """

    phase: Literal["forward", "backward"]
    segment: str
    layer: str
    begin_ms: float
    end_ms: float
    live_bytes: int | None = None
    peak_bytes: int | None = None
    after_bytes: int | None = None

    @property
    def place(self) -> str:
        """See ``place_of``."""
        return place_of(self.segment, self.layer)


class Stall(NamedTuple):
    """Compute stood still: it waited for copies, or for a host that launches late.

    Attributes:
        begin_ms: from the beginning of the step.
        end_ms: from there too.
        segment: in the forward the one that had run, whose offloads are waited for; in the backward the one that was to
            run.
    """

    begin_ms: float
    end_ms: float
    segment: MeasuredSegment


@dataclass(frozen=True)
class MeasuredStep:
    """One step that followed a plan: of those that were measured, the one whose time is nearest to the median.

    Attributes:
        segments: in the order in which they ran.
        forward_ms: from the step's beginning to the forward's end on the compute stream.
        step_ms: forward and backward.
    """

    segments: tuple[MeasuredSegment, ...]
    forward_ms: float
    step_ms: float

    def stands_still(self) -> Iterator[Stall]:
        """The times between segments, in order."""
        for phase, begin, end in (("forward", 0.0, self.forward_ms), ("backward", self.forward_ms, self.step_ms)):
            segments = [s for s in self.segments if s.phase == phase]
            now = begin
            for i, segment in enumerate(segments):
                if segment.begin_ms > now:
                    yield Stall(now, segment.begin_ms, segments[max(i - 1, 0)] if phase == "forward" else segment)
                now = max(now, segment.end_ms)
            if segments and end > now:
                yield Stall(now, end, segments[-1])


def measured_step_of(readings: Readings, layers: Mapping[tuple[Phase, str], str]) -> MeasuredStep | None:
    """The step that stands for those that were read; None where forward or backward is missing, or the two take turns
    as in a pipeline.

    Args:
        readings: of the segments.
        layers: phase and name of a segment -> label of its layer; in the order of the step.
    """
    found, phases = readings.typical(), [phase for phase, _ in layers]
    if found is None or phases != sorted(phases, key=PHASES.index):
        return None
    peaks, forward_ms = readings.segment_peaks(), found[0].phase_ms
    segments: list[MeasuredSegment] = []
    for phase, sample, begins_ms in zip(PHASES, found, (0.0, forward_ms), strict=True):
        for name, at in sorted(sample.begin_ms.items(), key=lambda item: item[1]):
            begin, peak = begins_ms + at, peaks.get(phase, {}).get(name)
            segments.append(
                MeasuredSegment(
                    phase,
                    name,
                    layers.get((phase, name), ""),
                    begin,
                    begin + sample.segment_ms[name],
                    sample.live_before.get(name),
                    sample.gap_peaks.get(name) if peak is None else peak,
                    sample.live_after.get(name),
                )
            )
    return MeasuredStep(tuple(segments), forward_ms, forward_ms + found[1].phase_ms)
