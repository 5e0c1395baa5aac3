"""Measures steps that run graphs as they were compiled, while a plan for all of them is made.

Until that plan is there, steps follow one that takes a moment to make. They tell how long each graph takes inside a
step: while collectives run, and at the clocks that a device keeps. Segments that ran alone were 11 % faster than those
of FSDP2's steps (Qwen3, 16 layers, two H200s, 2026-11-28).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from fxoffload.compiler.chain_graphs import GraphDescription
from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.compiler.measured_chain import Times, measured_calls
from fxoffload.planner.as_measured import measured_step
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.steps import SegmentStep, TrainingStep
from fxoffload.runtime.profiler.step_clock import StepClock, StepRecording, step_clock_for
from fxoffload.step.readings import Readings
from fxoffload.step.segment_names import call_of, lies_between
from fxoffload.torch_private.fsdp2 import fsdp2_is_used

log = logging.getLogger(__name__)

# A call counts if it begins with no wait longer than this part of its time: collectives that run during the wait slow
# no kernel down. Under a budget FSDP2's first backwards find their values on the device, and its forwards wait at their
# end, when the next layer's parameters are there. With those the plan's time was 2.8 % too short, with segments that
# ran alone 8 to 14 % (two H200s, 2026-11-28).
_WAITING = 0.05
# The device may notice a late host at each call.
_HOST_MS = 0.3
# How much longer segments take in a step of FSDP2, whose device is busy all the time, than on made-up inputs. First
# steps that copy for half of their time tell less. Their backwards took 206 to 233 ms; on made-up inputs they take 204
# to 210, and in the first steps of default plans 219 to 228. With 206 the plan's time was 10 % too short. In 41 of 42
# calibrated plans they took 217 ms or more, and forwards of 89 ms took 93 to 100. A plan with 89 left the link idle for
# the last 12 ms of each forward, and recomputed more instead (pairs of H200s, 2026-11-28 to -30).
_LONGER_IN_STEPS = 1.07


class FirstSteps:
    """An observer of steps. No thread waits for it.

    Args:
        clock: that measures them.

    Attributes:
        readings: the measurements; None: there are none yet.
    """

    def __init__(self, clock: StepClock) -> None:
        self.readings: Readings | None = None
        self._clock = clock

    @property
    def is_settled(self) -> bool:
        """Whether nothing is measured any more."""
        return not self._clock.measuring

    def step_begins(self, *, follows: bool = True) -> StepRecording | None:
        """See ``PlanObserver``. Never raises."""
        if self.readings is not None:
            return None
        try:
            if self._clock.ready():
                self.readings = self._clock.readings()
            return self._clock.begin_step(follows=follows)
        except Exception as error:
            self._clock.fail(error)
            return None


def first_steps_of(planning: ChainPlanning) -> FirstSteps | None:
    """The observer of a chain's steps until its plan is there.

    None: on the CPU, times are no prediction of anything; or it is not to be planned with measured times.
    """
    if planning.device.type != "cuda" or not planning.calibrates:
        return None
    return FirstSteps(step_clock_for(planning.device, len(planning.descriptions), order=planning.order, records=False))


def as_in_steps(descriptions: Sequence[GraphDescription]) -> list[GraphDescription]:
    """``descriptions``, whose segments take as long as in a step where they were timed on made-up inputs."""
    if not fsdp2_is_used():
        return list(descriptions)
    found = {id(d): _lengthened(d) if d.basis == "segments" else d for d in descriptions}
    return [found[id(d)] for d in descriptions]


def _lengthened(description: GraphDescription) -> GraphDescription:
    def longer(segments: Sequence[SegmentStep]) -> dict[str, float]:
        return {s.name: s.ms * _LONGER_IN_STEPS for s in segments}

    step = description.step
    times: Times = {"forward": longer(step.forward), "backward": longer(step.backward)}
    return description.measured(measured_step(step, times), description.basis)


def measured_descriptions(planning: ChainPlanning, readings: Readings) -> list[GraphDescription] | None:
    """The graphs of a chain, per call, with the times that they took in steps which ran them as compiled.

    None: all calls of a phase began with a wait.
    """
    counted = _without_waits(readings)
    if not all(counted.values()):
        return None
    graphs = [id(d) for d in planning.descriptions]
    ran = measured_calls(planning.compiled.steps, graphs, counted)
    found = {}
    for description in planning.descriptions:
        step, is_measured = ran[id(description)]
        if description.basis == "segments" and fsdp2_is_used():
            step = _no_faster(step, description.step)
        found[id(description)] = description.measured(step, "steps" if is_measured else description.basis)
    return [found[graph] for graph in graphs]


def _no_faster(step: TrainingStep, before: TrainingStep) -> TrainingStep:
    """``step`` with phases that take at least as long as in ``before``."""

    def longer(segments: Sequence[SegmentStep], others: Sequence[SegmentStep]) -> dict[str, float]:
        took, least = sum(s.ms for s in segments), sum(s.ms for s in others)
        return {s.name: s.ms * max(least / took, 1.0) for s in segments} if took > 0 else {}

    times = {"forward": longer(step.forward, before.forward), "backward": longer(step.backward, before.backward)}
    return measured_step(step, times)  # type: ignore[arg-type]


def _without_waits(readings: Readings) -> Times:
    """Times of the segments of calls that did not wait before one, for a copy or for the host."""
    waits, found = readings.waits_ms(), {}
    for phase, times in readings.segment_ms().items():
        calls: dict[str, dict[str, float]] = defaultdict(dict)
        for name, ms in times.items():
            if not lies_between(name):
                calls[call_of(name)][name] = ms
        waited = {call: sum(waits[phase][name] for name in own) for call, own in calls.items()}
        counted = [own for call, own in calls.items() if waited[call] <= max(_HOST_MS, _WAITING * sum(own.values()))]
        log.info("%d of %d calls of the %s began without a wait", len(counted), len(calls), phase)
        found[phase] = {name: ms for own in counted for name, ms in own.items()}
    return found


def in_measured_time(planning: ChainPlanning, readings: Readings, found: Schedule) -> Schedule:
    """``found`` in the time that the steps took; as it is where they tell nothing."""
    measured = measured_descriptions(planning, readings)
    if measured is None:
        return found
    times = [pair for of in readings.segment_ms().values() for pair in of.items()]
    return planning.in_measured_time(measured, {name: ms for name, ms in times if lies_between(name)}, found)
