"""Replans a step over several graphs when its first steps were measured (``fxoffload.compiler.replan``)."""

from __future__ import annotations

import logging
import weakref
from functools import partial

from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.compiler.measured_chain import as_compiled
from fxoffload.compiler.recalibration import Recalibration
from fxoffload.compiler.replan import Replan, TrackedGraphs
from fxoffload.plan_report.registry import PlanBox
from fxoffload.planner.as_measured import measured_step, shared
from fxoffload.planner.chain import NO_EXTRA_MEMORY, with_turn
from fxoffload.planner.extra_memory import extra_memory_of_segments
from fxoffload.planner.fit_link import fit_link, waits_of
from fxoffload.planner.plan import Decision, Prediction
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule, as_inductor
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import TrainingStep
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.profiler.step_clock import step_clock_for
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.step.readings import PHASES, Phase, Readings
from fxoffload.step.segment_names import segment_of

log = logging.getLogger(__name__)


class ChainRecalibration(Recalibration):
    """Schedules one chain once more, with measurements of its steps: keep, offload and windows.

    Its recomputation stays, for the reason that ``ChainPlanning.in_measured_time`` gives. Where steps then miss a
    budget, the budget loop has the chain planned anew.

    Args:
        planning: of the chain, which has settled what each call runs.
        schedule: that runs.
        first: the place where the chain begins.
        box: where the plan is shown.
    """

    def __init__(
        self, planning: ChainPlanning, schedule: Schedule, first: weakref.ref[TrackedGraph], box: PlanBox
    ) -> None:
        super().__init__(schedule, planning.choice.scheduler, box, planning.objective, planning.limit_bytes)
        self._planning = planning
        self._first = first

    def measured(self, readings: Readings) -> tuple[TrainingStep, Prediction]:
        """See ``Recalibration``."""
        ms = readings.segment_ms()
        # Memory outside the graphs comes from the measurements too.
        ran, compiled = (
            c.chain.with_extra_memory(NO_EXTRA_MEMORY) for c in (self._planning.choice, self._planning.compiled)
        )
        sizes = shared(readings.temp_bytes(), self._alike())
        varied = [v is not None for v in self._planning.choice.variants]
        graphs = [id(d.graph) for d in self._planning.descriptions]
        times = as_compiled(compiled, ran, varied, graphs, ms, is_measured=self._planning.is_measured)
        ran = ran.with_step(measured_step(with_turn(ran.step), ms, sizes))
        compiled = compiled.with_step(measured_step(with_turn(compiled.step), times))
        rates, offload, windows = self._scheduler.rates, self._schedule.offload, self._schedule.windows
        graphs = simulate(ran.step, offload, copies=rates, windows=windows)
        planning = self._planning
        extra_memory = planning.extra_memory = planning.with_margin(
            extra_memory_of_segments(ran, graphs, readings, planning.without_margin(planning.extra_memory))
        )
        self._planning.forward_ms = [sum(s.ms for s in call) for call in ran.segments_of_calls("forward")]
        keep = as_inductor(compiled.with_extra_memory(extra_memory).step, rates)
        baseline = Prediction.of(keep)
        if not self._planning.is_plain_compiled:
            # Of plain Inductor's step nothing was measured; it is as much slower than estimated as the graphs that ran.
            estimated = self._planning.compiled.scheduler.keep_all().step_ms
            baseline = self._box.plan.baseline.scaled(keep.step_ms / max(estimated, 1e-9))
        return ran.with_extra_memory(extra_memory).step, baseline

    def rates(self, step: TrainingStep, readings: Readings) -> ProfileRates:
        """See ``Recalibration``."""
        now = self._schedule
        found = fit_link(step, now.offload, now.windows, self._scheduler.rates, waits_of(readings))
        if found.link != self._scheduler.rates.link:
            log.info("copies reach %.2f and %.2f of what the machine profile says", *found.link)
        return found

    @property
    def expected_ms(self) -> float:
        """See ``Recalibration``."""
        return self._planning.expected_ms

    def pin(self, found: Schedule, now: Schedule) -> bool:
        """See ``Recalibration``. The steps before the plan moved everything: mostly it is there."""
        return engine_for(self._planning.device).pin(found.simulation.bytes_offloaded, self._planning.budgets)

    def summary_of(self, found: Schedule, baseline: Prediction) -> str:
        """See ``Recalibration``."""
        return self._planning.summary_of(found, baseline)

    def follow(self, found: Schedule) -> None:
        """See ``Recalibration``."""
        first, observer = self._first(), self.observer()
        if first is not None and observer is not None:
            planning = self._planning
            first.calls.follow_instead(first, observer, planning.choices(found), planning.spare_of(found))

    def warn(self, message: str) -> None:
        """See ``Recalibration``. Once, counting the warnings of the chain's other plans."""
        self._planning.warn("least", message)

    def decisions(self, now: Schedule) -> tuple[Decision, ...] | None:
        """See ``Recalibration``."""
        return self._planning.decisions(now)

    def settle(self, now: Schedule) -> None:
        """See ``Recalibration``. Measured times may say that other calls are to be paced."""
        paced = self._planning.paced
        if [c.paced for c in self._planning.choices(now)] != paced:
            self.follow(now)

    def _alike(self) -> dict[Phase, dict[str, object]]:
        """The code of each segment: calls of one graph that run the same variant have the same."""
        planning = self._planning
        found: dict[Phase, dict[str, object]] = {phase: {} for phase in PHASES}
        ran = zip(planning.descriptions, planning.numbers, planning.choice.steps, strict=True)
        for k, (description, number, step) in enumerate(ran):
            for phase in PHASES:
                segments = step.forward if phase == "forward" else step.backward
                found[phase].update({segment_of(k, s.name): (id(description.graph), number, s.name) for s in segments})
        return found


def replan_for_chain(
    planning: ChainPlanning, schedule: Schedule, tracked_graphs: TrackedGraphs, box: PlanBox
) -> Replan | None:
    """An observer for a chain on a GPU. On the CPU, times are no prediction of anything."""
    device = planning.device
    if device.type != "cuda" or not planning.calibrates:
        return None
    clock = partial(
        step_clock_for,
        device,
        len(tracked_graphs),
        order=planning.order,
        records=planning.records,
        left_bytes=planning.others_bytes,
        first_bytes=planning.first_bytes,
    )
    return Replan(ChainRecalibration(planning, schedule, tracked_graphs[0], box), box, tracked_graphs, make_clock=clock)
