"""Replans a step over several graphs when its first steps were measured (``fxoffload.compiler.replan``).

Where variants are compiled, calls may run others of them afterwards, once (``fxoffload.compiler.chain_reselect``).
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from functools import partial

from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.compiler.chain_reselect import Reselected, reselect_variants
from fxoffload.compiler.chain_search import CallVariants, ChainObjective
from fxoffload.compiler.measured_chain import MeasuredChain, as_compiled
from fxoffload.compiler.recalibration import Recalibration
from fxoffload.compiler.replan import Replan, TrackedGraphs
from fxoffload.plan_report.registry import PlanBox
from fxoffload.planner.as_measured import measured_step, shared
from fxoffload.planner.chain import NO_EXTRA_MEMORY, with_turn
from fxoffload.planner.extra_memory import extra_memory_of_segments
from fxoffload.planner.fit_link import fit_link, waits_of
from fxoffload.planner.plan import Decision, Prediction
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import TrainingStep
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.profiler.step_clock import step_clock_for
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.step.readings import PHASES, Phase, Readings
from fxoffload.step.segment_names import segment_of

log = logging.getLogger(__name__)

# Other variants have to be better by this part of the step than those that run. A choice that measures worse than the
# one before is taken back, so little is at stake. With 0.01, a simulation of the steps of two H200s (2026-11-24) went
# on waiting for 13 ms of copies of a step of 832.
_WORTH_MS = 0.003


@dataclass(frozen=True)
class Before:
    """The run of a chain before other variants were chosen.

    Attributes:
        variants: that its calls ran.
        schedule: what moves.
        summary: the plan's summary for it.
        took_ms: a step's measured time; where that step exceeded the budget, the time that it takes to meet it.
        forward_ms: of each call.
    """

    variants: CallVariants
    schedule: Schedule
    summary: str
    took_ms: float
    forward_ms: list[float]


class ChainRecalibration(Recalibration):
    """Makes one chain's plan once more, with measurements of its steps.

    It chooses what moves. Where there is a budget and variants are compiled, it also chooses each call's variant. Steps
    with other variants are measured and planned once more: the calibration chooses what moves, or returns to the
    variants before, if those took less.

    Args:
        planning: of the chain, which has settled what each call runs.
        schedule: that runs.
        first: the place where the chain begins.
        box: where the plan is shown.
        rates: of the machine, with the link as it was found before; None: as it was planned with.
        before: the run before this choice.
    """

    def __init__(
        self,
        planning: ChainPlanning,
        schedule: Schedule,
        first: weakref.ref[TrackedGraph],
        box: PlanBox,
        *,
        rates: ProfileRates | None = None,
        before: Before | None = None,
    ) -> None:
        scheduler = planning.choice.scheduler
        if rates is not None:
            scheduler = scheduler.with_step(scheduler.step, scheduler.host_bytes, rates)
        super().__init__(schedule, scheduler, box, planning.objective, planning.limit_bytes)
        self._planning = planning
        self._first = first
        self._before = before
        self._took_ms = 0.0
        self._found: MeasuredChain | None = None
        self._rates: ProfileRates | None = None
        self._once_more: ChainRecalibration | None = None

    def measured(self, readings: Readings) -> tuple[TrainingStep, Prediction]:
        """See ``Recalibration``."""
        ms = readings.segment_ms()
        self._took_ms = sum(readings.step_ms().values())
        # Memory outside the graphs comes from the measurements too.
        ran, compiled = (
            c.chain.with_extra_memory(NO_EXTRA_MEMORY) for c in (self._planning.choice, self._planning.compiled)
        )
        sizes = shared(readings.temp_bytes(), self._alike())
        varied = [v is not None for v in self._planning.choice.variants]
        times = as_compiled(compiled, ran, varied, [id(d.graph) for d in self._planning.descriptions], ms)
        ran = ran.with_step(measured_step(with_turn(ran.step), ms, sizes))
        compiled = compiled.with_step(measured_step(with_turn(compiled.step), times))
        rates, offload, windows = self._scheduler.rates, self._schedule.offload, self._schedule.windows
        graphs = simulate(ran.step, offload, copies=rates, windows=windows)
        planning = self._planning
        extra_memory = planning.extra_memory = planning.with_margin(
            extra_memory_of_segments(ran, graphs, readings, planning.without_margin(planning.extra_memory))
        )
        self._found = MeasuredChain(ms, sizes, extra_memory)
        self._planning.forward_ms = [sum(s.ms for s in call) for call in ran.segments_of_calls("forward")]
        keep = simulate(
            compiled.with_extra_memory(extra_memory).step, (False,) * len(compiled.step.candidates), copies=rates
        )
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
        self._rates = found
        return found

    def pin(self, found: Schedule, now: Schedule) -> bool:
        """See ``Recalibration``. The steps before the plan moved everything: mostly it is there."""
        return engine_for(self._planning.device).pin(found.simulation.bytes_offloaded, self._planning.budgets)

    def summary_of(self, found: Schedule, baseline: Prediction) -> str:
        """See ``Recalibration``."""
        planning = self._planning
        planning.summary = planning.summary_of(planning.choice.variants, found, baseline)
        return planning.full_summary

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

    def settle(self, now: Schedule, baseline: Prediction) -> Schedule:
        """See ``Recalibration``."""
        before = self._before
        if before is not None and self._is_worse(now, before):
            log.info("the reselected variants took %.1f ms, those before %.1f", self._took_ms, before.took_ms)
            self._planning.forward_ms = before.forward_ms
            return self._run(before.variants, before.schedule, before.summary)
        reselected = self._reselect(now) if before is None else None
        if reselected is None:
            self._pace(now)
            return now
        log.info("variants were reselected: %.1f -> %.1f ms", now.simulation.step_ms, reselected.ms)
        self.pin(reselected.schedule, now)
        planning = self._planning
        # What exceeded the budget was faster for it; what meets it was not measured where it is something else.
        took_ms = max(self._took_ms, now.simulation.step_ms) if self.exceeded else self._took_ms
        before = Before(planning.choice.variants, now, planning.summary, took_ms, planning.forward_ms)
        summary = planning.summary_of(reselected.variants, reselected.schedule, baseline)
        self._run(reselected.variants, reselected.schedule, summary)
        self._once_more = ChainRecalibration(
            planning, reselected.schedule, self._first, self._box, rates=self._rates, before=before
        )
        return reselected.schedule

    def _pace(self, now: Schedule) -> None:
        """Measured times may say that other calls are to be paced."""
        paced = self._planning.paced
        if [c.paced for c in self._planning.choices(now)] != paced:
            self.follow(now)

    def _run(self, variants: CallVariants, schedule: Schedule, summary: str) -> Schedule:
        self._planning.run_instead(variants, summary)
        self.follow(schedule)
        self._box.update(summary=self._planning.full_summary)
        return schedule

    def _reselect(self, now: Schedule) -> Reselected | None:
        """Other variants, where a budget measurably costs more time than it must, or is exceeded."""
        found, rates, planning, limit = self._found, self._rates, self._planning, self._limit
        if limit is None or found is None or rates is None or not any(planning.numbers):
            return None
        reselected = reselect_variants(planning, found, rates, ChainObjective(limit_bytes=limit), planning.host_bytes)
        if reselected is None or reselected.variants == planning.choice.variants:
            return None
        if now.simulation.peak_bytes > limit:
            return reselected
        # Compare with the running chain both by times per call and by times per graph: they differ where calls of one
        # graph take different times.
        least = min(now.simulation.step_ms, reselected.now_ms) * (1 - _WORTH_MS)
        more = reselected.schedule.simulation.bytes_offloaded > now.simulation.bytes_offloaded
        return reselected if reselected.ms < least and (not more or self.pin(reselected.schedule, now)) else None

    def _is_worse(self, now: Schedule, before: Before) -> bool:
        """Whether the new choice is no better than the one before, by both measurements."""
        limit, peak, other = self._limit, now.simulation.peak_bytes, before.schedule.simulation.peak_bytes
        if limit is not None and (peak > limit) != (other > limit):
            return peak > limit
        return self._took_ms > before.took_ms

    @property
    def once_more(self) -> ChainRecalibration | None:
        """See ``Recalibration``."""
        return self._once_more

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
        records=planning.records,
        left_bytes=planning.others_bytes,
        first_bytes=planning.first_bytes,
    )
    return Replan(ChainRecalibration(planning, schedule, tracked_graphs[0], box), box, tracked_graphs, make_clock=clock)
