"""Runs the compiled segments of a step on made-up inputs, before the first step: times, and the allocator's peaks.

Each distinct segment runs five times: once to tune its kernels, as the first step would, three times to be timed, and
once for its peak, where inputs die in it as they do in a step. The results are ``Readings``, as of real steps, and go
the same way (``replan.Calibration``).
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxoffload.compiler.made_up import MadeUp, NotMadeUpError, why_not
from fxoffload.compiler.measuring import NO_ROOM, NO_TIME, Allowance, note_estimated, reason_of
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.compiler.segments import SegmentCall
from fxoffload.counters import counters
from fxoffload.machine.meters import Meter
from fxoffload.passes.cut_segments import Segment
from fxoffload.passes.estimate_memory import dying_inputs
from fxoffload.planner.steps import SegmentStep, TrainingStep
from fxoffload.runtime.clocks.segment_readings import Phase, Readings, Sample

log = logging.getLogger(__name__)

# Runs that are timed, and all runs of a segment.
_TIMED = 3
_RUNS = _TIMED + 2
# Room for more than the estimate, as a factor.
_MARGIN = 1.25


@dataclass(eq=False)
class _Distinct:
    """Calls of one code.

    Attributes:
        segment, call, estimate: of the first one.
        dying: positions of inputs that die in all of them.
        names: of all of them, by phase.
    """

    segment: Segment
    call: SegmentCall
    estimate: SegmentStep
    dying: frozenset[int]
    names: list[tuple[Phase, str]] = field(default_factory=list)

    @property
    def total_ms(self) -> float:
        return len(self.names) * self.estimate.ms


@dataclass(frozen=True)
class RanSegments:
    """Results of ``measure_segments``.

    Attributes:
        readings: of the segments that ran, as of one step.
        are_all: whether all did.
    """

    readings: Readings
    are_all: bool


def measure_segments(
    forward: ForwardState, backward: BackwardState, step: TrainingStep, meter: Meter, allowance: Allowance
) -> RanSegments | None:
    """Run the segments of two compiled graphs. Those that cannot run are counted; None where none could.

    Args:
        forward: compiled.
        backward: compiled.
        step: the estimate, by which the longest come first.
        meter: measures.
        allowance: is spent.
    """
    wanted = _distinct(forward, backward, step)
    if reason := meter.why_not() or (allowance.left_s <= meter.warm_up_s and NO_TIME):
        note_estimated("segments", reason, len(wanted))
        return None
    ms: dict[Phase, dict[str, float]] = {"forward": {}, "backward": {}}
    peaks: dict[Phase, dict[str, int | None]] = {"forward": {}, "backward": {}}
    reasons: Counter[str] = Counter()
    with allowance.spending(), meter.undisturbed():
        for distinct in wanted:
            found = _measure(distinct, meter, allowance)
            if isinstance(found, str):
                reasons[found] += 1
                continue
            counters.add("num_segments_measured")
            for phase, name in distinct.names:
                ms[phase][name], peaks[phase][name] = found
    for reason, count in reasons.items():
        note_estimated("segments", reason, count)
    log.info("ran %d of %d distinct segments", len(wanted) - reasons.total(), len(wanted))
    if not ms["forward"] and not ms["backward"]:
        return None
    samples: dict[Phase, Sequence[Sample]] = {
        phase: [Sample(sum(ms[phase].values()), segment_ms=ms[phase], temp_bytes=peaks[phase])] for phase in ms
    }
    return RanSegments(Readings(samples), not reasons)


def _distinct(forward: ForwardState, backward: BackwardState, step: TrainingStep) -> list[_Distinct]:
    """Segments of different code, those that take longest in all first."""
    found: dict[int, _Distinct] = {}
    graphs: Sequence[tuple[Phase, ForwardState | BackwardState, Sequence[SegmentStep], Collection[str]]] = (
        ("forward", forward, step.forward, frozenset()),
        ("backward", backward, step.backward, backward.owned),
    )
    for phase, state, steps, owned in graphs:
        dying = dying_inputs(state.gm, state.segmentation, owned)
        estimates: Mapping[str, SegmentStep] = {s.name: s for s in steps}
        for segment in state.segmentation.segments:
            call = state.modules[segment.name]
            ends = frozenset(i for i, v in enumerate(segment.inputs) if v.name in dying[segment.name])
            distinct = found.setdefault(
                id(call.fn), _Distinct(segment, call, estimates.get(segment.name, SegmentStep(segment.name)), ends)
            )
            distinct.dying &= ends
            distinct.names.append((phase, segment.name))
    return sorted(found.values(), key=lambda d: -d.total_ms)


def _measure(distinct: _Distinct, meter: Meter, allowance: Allowance) -> tuple[float, int | None] | str:
    """Milliseconds and ``SegmentStep.temp_bytes``; or why there are none."""
    segment = distinct.segment
    if reason := why_not(segment.nodes):
        return reason
    if _RUNS * distinct.estimate.ms / 1e3 > allowance.left_s:
        return NO_TIME
    try:
        made = MadeUp(segment.inputs, segment.nodes, meter.device)
        if _MARGIN * (made.nbytes + distinct.estimate.temp_bytes) > meter.room_bytes():
            return NO_ROOM
        return _run(distinct, made, meter, allowance)
    except NotMadeUpError as error:
        return str(error)
    except Exception as error:
        return reason_of(error)


def _run(distinct: _Distinct, made: MadeUp, meter: Meter, allowance: Allowance) -> tuple[float, int | None] | str:
    fn = distinct.call.fn
    assert fn is not None
    inputs = made.make()

    def timed() -> float:
        args = made.make_integers(inputs)
        return meter.once_ms(lambda: fn(args))

    with allowance.aside():  # kernels are tuned
        timed()
    times: list[float] = []
    while len(times) < _TIMED and (not times or allowance.left_s > 0):
        times.append(timed())
    args: list[Any] = made.make_integers(inputs)
    # The call alone holds what dies in it.
    inputs[:] = [value for i, value in enumerate(args) if i not in distinct.dying]
    peak = meter.peak_bytes(lambda: fn(args)) if allowance.left_s > 0 else None
    return statistics.median(times), None if peak is None else max(peak, 0)
