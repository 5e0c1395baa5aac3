"""A chain of calls with measurements in the place of estimates."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxoffload.planner.chain import Chain, ExtraMemory
from fxoffload.planner.steps import SegmentStep, TrainingStep
from fxoffload.step.readings import PHASES, Phase
from fxoffload.step.segment_names import segment_of

Times = Mapping[Phase, Mapping[str, float]]
Sizes = Mapping[Phase, Mapping[str, int | None]]


@dataclass(frozen=True)
class MeasuredChain:
    """Measurements of a chain as it ran.

    Attributes:
        ms: of its segments, and between its calls.
        temp_bytes: working sets of its segments.
        extra_memory: memory on the device outside its graphs.
    """

    ms: Times
    temp_bytes: Sizes
    extra_memory: ExtraMemory


def as_compiled(
    compiled: Chain, ran: Chain, varied: Sequence[bool], graphs: Sequence[object], ms: Times
) -> dict[Phase, dict[str, float]]:
    """Times of a chain whose calls run their graphs as compiled, from measurements of one in which some ran variants.

    Such a call takes the median time of the calls that ran the same graph as compiled. Where there are none, its
    estimate is as wrong as that of the variant that ran. Between the calls nothing changes.

    Args:
        compiled: the chain that is asked for.
        ran: the chain that was measured.
        varied: per call, whether it ran a variant.
        graphs: per call, which graph it is of.
        ms: of ``ran``.
    """
    found: dict[Phase, dict[str, float]] = {}
    for phase in PHASES:
        mine, others = (c.segments_of_calls(phase) for c in (compiled, ran))
        measured = ms.get(phase, {})
        times = found[phase] = dict(measured)
        for call, (own, other) in enumerate(zip(mine, others, strict=True)):
            if not varied[call]:
                continue
            alike = [mine[k] for k, g in enumerate(graphs) if g == graphs[call] and not varied[k]]
            estimated = sum(s.ms for s in other)
            ratio = sum(measured.get(s.name, s.ms) for s in other) / estimated if estimated > 0 else 1.0
            for at, segment in enumerate(own):
                taken = [measured[a[at].name] for a in alike if a[at].name in measured]
                times[segment.name] = statistics.median(taken) if taken else segment.ms * ratio
    return found


def measured_calls(
    steps: Sequence[TrainingStep], kinds: Sequence[object], found: MeasuredChain
) -> dict[object, TrainingStep]:
    """The step of one call of each kind that ran.

    Calls of one kind are the same code. So a segment takes its time from the median call, and its working set from the
    largest.
    """
    each: dict[object, list[int]] = {}
    for call, kind in enumerate(kinds):
        each.setdefault(kind, []).append(call)
    return {kind: _measured_call(steps[calls[0]], calls, found) for kind, calls in each.items()}


def _measured_call(step: TrainingStep, calls: Sequence[int], found: MeasuredChain) -> TrainingStep:
    def known(phase: Phase, segments: Sequence[SegmentStep]) -> tuple[SegmentStep, ...]:
        ms, sizes = found.ms.get(phase, {}), found.temp_bytes.get(phase, {})
        new = []
        for segment in segments:
            names = [segment_of(call, segment.name) for call in calls]
            times = [ms[name] for name in names if name in ms]
            needs = [size for name in names if (size := sizes.get(name)) is not None]
            new.append(
                replace(
                    segment,
                    ms=statistics.median(times) if times else segment.ms,
                    temp_bytes=max(0, *needs) if needs else segment.temp_bytes,
                )
            )
        return tuple(new)

    return replace(step, forward=known("forward", step.forward), backward=known("backward", step.backward))


def scaled(step: TrainingStep, ratios: Mapping[Phase, float]) -> TrainingStep:
    """A step that never ran, slowed down by the ratios of measured to estimated times of those that did."""

    def slower(segments: Sequence[SegmentStep], ratio: float) -> tuple[SegmentStep, ...]:
        return tuple(replace(s, ms=s.ms * ratio) for s in segments)

    down, up = (ratios.get(phase, 1.0) for phase in PHASES)
    return replace(step, forward=slower(step.forward, down), backward=slower(step.backward, up))


def ratios_of(ran: Chain, ms: Times) -> dict[Phase, float]:
    """How many times longer the segments of all calls took than was thought, per phase."""
    found: dict[Phase, float] = {}
    for phase in PHASES:
        segments = [s for call in ran.segments_of_calls(phase) for s in call]
        estimated = sum(s.ms for s in segments)
        if estimated > 0:
            found[phase] = sum(ms.get(phase, {}).get(s.name, s.ms) for s in segments) / estimated
    return found
