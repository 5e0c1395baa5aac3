"""Measures the steps that run graphs as they were compiled, before a plan for all of them is there.

Until that plan is there, steps follow one that takes a moment to make. They compute what plain Inductor's steps do, so
they tell how long each graph takes inside a step: beside collectives, and at the clocks that a device keeps. Segments
that ran alone were 11 % faster than those of FSDP2's steps (Qwen3, 16 layers, two H200s, 2026-11-28).
"""

from __future__ import annotations

import logging
import threading
import time

from fxoffload.compiler.chain_graphs import GraphDescription
from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.compiler.measured_chain import measured_calls
from fxoffload.planner.schedule import Schedule
from fxoffload.runtime import background
from fxoffload.runtime.profiler.step_clock import StepClock, StepRecording, step_clock_for
from fxoffload.step.readings import Readings
from fxoffload.step.segment_names import lies_between

log = logging.getLogger(__name__)

# The planner waits this long for the next step to begin: the program may do something else by now.
_PATIENCE_S = 2.0
# Steps may take longer, by this factor, than they are thought to.
_SLOWER = 4.0
_POLL_S = 5e-3
# Steps that wait for copies longer than this part of their time tell nothing. Under a budget, those of FSDP2 took 700
# ms for 400: measured, they left the plan's time 8.2 % too short, as without them (two H200s, 2026-11-28).
_WAITING = 0.1


class FirstSteps:
    """An observer of steps, and the thread that waits for what they tell.

    Args:
        clock: that measures them.
        patience_s: how long to wait for each step.
    """

    def __init__(self, clock: StepClock, patience_s: float) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._latest = time.monotonic()  # when a step began
        self._ended = threading.Event()

    @property
    def is_settled(self) -> bool:
        """Whether nothing is measured any more."""
        return self._ended.is_set() or not self._clock.measuring

    def step_begins(self, *, follows: bool = True) -> StepRecording | None:
        """See ``PlanObserver``. Never raises."""
        if self._ended.is_set():
            return None
        self._latest = time.monotonic()
        try:
            return self._clock.begin_step(follows=follows)
        except Exception as error:
            self._clock.fail(error)
            return None

    def wait(self) -> Readings | None:
        """The measurements. None: there are none, since no more steps come, or none counts.

        Raises:
            PlanCancelled: see ``background.check``.
        """
        try:
            while not self._clock.ready():
                background.check()
                late = time.monotonic() - self._latest > self._patience_s
                if late or self._clock.gave_up() or background.is_ending():
                    log.info("steps of the graphs as they are were not measured")
                    return None
                time.sleep(_POLL_S)
            return self._clock.readings()
        finally:
            self._ended.set()


def first_steps_of(planning: ChainPlanning, schedule: Schedule) -> FirstSteps | None:
    """The observer of a chain's steps under ``schedule``, before its plan.

    None: on the CPU, times are no prediction of anything; or it is not to be planned with measured times. Nor are those
    of steps that wait for copies: collectives then run in the waits, and not beside the graphs.
    """
    now = schedule.simulation
    if planning.device.type != "cuda" or not planning.calibrates or now.exposed_ms > _WAITING * now.step_ms:
        return None
    clock = step_clock_for(planning.device, len(planning.descriptions), records=False)
    return FirstSteps(clock, _PATIENCE_S + _SLOWER * now.step_ms / 1e3)


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
