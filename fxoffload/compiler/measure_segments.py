"""Runs the compiled segments of a step on made-up inputs, before the first step: times, and the allocator's peaks.

Each distinct segment runs once to tune its kernels, as the first step would. It runs once more for its peak, where
inputs die in it as they do in a step. Then all are timed (``time_segments``). The results are ``Readings``, as of real
steps, and go the same way (``GraphRecalibration``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxoffload.compiler.constant_values import ConstantValues
from fxoffload.compiler.distinct_segments import CallName, DistinctSegment, distinct_segments
from fxoffload.compiler.made_up import MadeUp, NotMadeUpError, why_not
from fxoffload.compiler.measuring import FAILED, NO_ROOM, NO_TIME, Allowance, note_estimated, reason_of
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.compiler.time_segments import MARGIN, time_segments
from fxoffload.counters import counters
from fxoffload.machine.meters import Meter
from fxoffload.planner.steps import TrainingStep
from fxoffload.step.readings import PHASES, Phase, Readings, Sample

log = logging.getLogger(__name__)

# Runs of a segment, at least.
_RUNS = 3


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
        step: the estimate, by which the longest come first.
    """
    wanted = distinct_segments(forward, backward, step)
    if reason := meter.why_not() or (allowance.left_s <= meter.warm_up_s and NO_TIME):
        note_estimated("segments", reason, len(wanted))
        return None
    prepared: list[DistinctSegment] = []
    constants = ConstantValues(forward.gm)
    reasons: Counter[str] = Counter()
    with allowance.spending(), meter.undisturbed():
        for distinct in wanted:
            if reason := _prepare(distinct, constants, meter, allowance):
                reasons[reason] += 1
            else:
                prepared.append(distinct)
        ms = time_segments(prepared, meter, allowance)
    timed = [d for d in prepared if any(name in ms for name in d.places)]
    if len(timed) < len(prepared):
        reasons[FAILED] += len(prepared) - len(timed)
    counters.add("num_segments_measured", len(timed))
    for reason, count in reasons.items():
        note_estimated("segments", reason, count)
    log.info("ran %d of %d distinct segments", len(timed), len(wanted))
    if not timed:
        return None
    samples: dict[Phase, Sequence[Sample]] = {phase: [_sample(phase, timed, ms)] for phase in PHASES}
    return RanSegments(Readings(samples), len(timed) == len(wanted))


def _prepare(distinct: DistinctSegment, constants: ConstantValues, meter: Meter, allowance: Allowance) -> str:
    """Tune the kernels, and read the peak; returns why that is not possible, or ""."""
    segment = distinct.segment
    if reason := why_not(segment.nodes):
        return reason
    if _RUNS * distinct.estimate.ms / 1e3 > allowance.left_s:
        return NO_TIME
    try:
        distinct.made = made = MadeUp(
            segment.inputs, segment.nodes, meter.device, distinct.dying, distinct.call.left_out, constants
        )
        if MARGIN * (made.nbytes + distinct.estimate.temp_bytes) > meter.room_bytes():
            return NO_ROOM
        inputs = made.make()
        args = list(inputs)
        with allowance.aside():  # kernels are tuned
            meter.once_ms(lambda: distinct.run(args))
        args = made.make_integers(inputs)
        # Only the call has references to inputs that die in it.
        inputs[:] = [value for i, value in enumerate(args) if i not in distinct.dying]
        peak = meter.peak_bytes(lambda: distinct.run(args))
    except NotMadeUpError as error:
        return str(error)
    except Exception as error:
        return reason_of(error)
    distinct.peak = None if peak is None else max(peak, 0)
    return ""


def _sample(phase: Phase, timed: Sequence[DistinctSegment], ms: Mapping[CallName, float]) -> Sample:
    times = {name: found for (of, name), found in ms.items() if of == phase}
    peaks = {name: d.peak for d in timed for of, name in d.places if of == phase}
    return Sample(sum(times.values()), segment_ms=times, temp_bytes=peaks)
