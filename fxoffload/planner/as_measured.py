"""A step with measurements in place of its estimates; and what they say of another partition of the same graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fxoffload.planner.steps import SegmentStep, TrainingStep
from fxoffload.step.readings import Phase

Phases = Mapping[Phase, Mapping[str, float]]


def measured_step(
    step: TrainingStep, ms: Phases, temp_bytes: Mapping[Phase, Mapping[str, int | None]] | None = None
) -> TrainingStep:
    """``step`` with measurements of its segments; the rest stays as estimated."""

    def known(phase: Phase, segments: tuple[SegmentStep, ...]) -> tuple[SegmentStep, ...]:
        times = ms.get(phase, {})
        sizes = (temp_bytes or {}).get(phase, {})
        found = []
        for segment in segments:
            size = sizes.get(segment.name)
            found.append(
                replace(
                    segment,
                    ms=times.get(segment.name, segment.ms),
                    temp_bytes=segment.temp_bytes if size is None else max(size, 0),
                )
            )
        return tuple(found)

    return replace(step, forward=known("forward", step.forward), backward=known("backward", step.backward))


def as_measured(other: TrainingStep, estimated: TrainingStep, measured: TrainingStep) -> TrainingStep:
    """``other``, another partition of the same graph: its estimates, corrected by the measurements of one partition.

    Where a segment has the same estimate in both, it is the same code. Others take as much longer than their estimate
    as the whole step does.
    """
    ratio = measured.compute_ms / max(estimated.compute_ms, 1e-9)

    def known(
        segments: tuple[SegmentStep, ...], before: tuple[SegmentStep, ...], after: tuple[SegmentStep, ...]
    ) -> tuple[SegmentStep, ...]:
        pairs = {b.name: (b, a) for b, a in zip(before, after, strict=True)}
        found = []
        for segment in segments:
            pair = pairs.get(segment.name)
            if pair is not None and (pair[0].ms, pair[0].temp_bytes) == (segment.ms, segment.temp_bytes):
                found.append(replace(segment, ms=pair[1].ms, temp_bytes=pair[1].temp_bytes))
            else:
                found.append(replace(segment, ms=segment.ms * ratio))
        return tuple(found)

    return replace(
        other,
        forward=known(other.forward, estimated.forward, measured.forward),
        backward=known(other.backward, estimated.backward, measured.backward),
    )


def shared(
    sizes: Mapping[Phase, Mapping[str, int | None]], alike: Mapping[Phase, Mapping[str, object]]
) -> dict[Phase, dict[str, int | None]]:
    """``sizes``, where an unmeasured segment takes the measurement of one of the same code."""
    found: dict[Phase, dict[str, int | None]] = {}
    for phase, codes in alike.items():
        known: dict[object, int] = {}
        for name, size in sizes.get(phase, {}).items():
            if size is not None and name in codes:
                known[codes[name]] = max(size, known.get(codes[name], size))
        found[phase] = {name: known.get(code) for name, code in codes.items()}
    return found
