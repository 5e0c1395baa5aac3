"""Measures steps that run graphs as they were compiled, while a plan for all of them is made.

Until that plan is there, steps follow one that takes a moment to make. They tell how long each graph takes inside a
step: while collectives run, and at the clocks that a device keeps. Segments that ran alone were 11 % faster than those
of FSDP2's steps (Qwen3, 16 layers, two H200s, 2026-11-28).
"""

from __future__ import annotations

from fxoffload.compiler.chain_graphs import GraphDescription
from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.compiler.measured_chain import measured_calls
from fxoffload.planner.schedule import Schedule
from fxoffload.runtime.profiler.step_clock import StepClock, StepRecording, step_clock_for
from fxoffload.step.readings import Readings
from fxoffload.step.segment_names import lies_between

# Steps that wait for copies longer than this part of their time tell nothing. Under a budget, those of FSDP2 took 700
# ms for 400: measured, they left the plan's time 8.2 % too short, as without them (two H200s, 2026-11-28).
_WAITING = 0.1


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


def first_steps_of(planning: ChainPlanning, schedule: Schedule) -> FirstSteps | None:
    """The observer of a chain's steps under ``schedule``, until its plan is there.

    None: on the CPU, times are no prediction of anything; or it is not to be planned with measured times. Steps that
    wait for copies are not measured either: collectives run during the waits, where they slow no graph down.
    """
    now = schedule.simulation
    if planning.device.type != "cuda" or not planning.calibrates or now.exposed_ms > _WAITING * now.step_ms:
        return None
    return FirstSteps(step_clock_for(planning.device, len(planning.descriptions), records=False))


def measured_descriptions(planning: ChainPlanning, readings: Readings) -> list[GraphDescription]:
    """The graphs of a chain, per call, with the times that they took in steps which ran them as compiled."""
    graphs = [id(d) for d in planning.descriptions]
    ran = measured_calls(planning.compiled.steps, graphs, readings.segment_ms())
    found = {id(d): d.measured(ran[id(d)], "steps") for d in planning.descriptions}
    return [found[graph] for graph in graphs]


def gaps_of(readings: Readings) -> dict[str, float]:
    """Time between the calls, by the empty segment that stands there."""
    times = [pair for of in readings.segment_ms().values() for pair in of.items()]
    return {name: ms for name, ms in times if lies_between(name)}
