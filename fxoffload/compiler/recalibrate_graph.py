"""Replans a graph when its first steps were measured (``fxoffload.compiler.replan``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler.explain import decisions_of
from fxoffload.compiler.planning import GraphPlanning
from fxoffload.compiler.recalibration import Recalibration
from fxoffload.compiler.replan import Replan
from fxoffload.plan_report.registry import PlanBox
from fxoffload.plan_report.summary import aim_of, gain_of
from fxoffload.planner.as_measured import as_measured, measured_step, shared
from fxoffload.planner.chain import with_turn
from fxoffload.planner.objective import Objective
from fxoffload.planner.plan import Decision, Prediction
from fxoffload.planner.schedule import Schedule, as_inductor
from fxoffload.planner.simulate import Simulation, simulate
from fxoffload.planner.steps import TrainingStep
from fxoffload.planner.windows import no_windows
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.profiler.step_clock import step_clock_for
from fxoffload.step.choice import Choice, RanCall, Windows
from fxoffload.step.readings import Phase, Readings
from fxoffload.step.segment_names import TURN

# Of a step: code between its forward and its backward that takes less is no part of the plan.
_SMALL_TURN = 0.01
# Steps that are not measured. The device idles while a graph compiles, and is faster after that. Against later steps of
# 219 to 491 ms (default plans of stock cases), steps 2 to 4 took -1.4 to +0.4 %, and steps 4 to 6 -1.0 to +0.5 % (H200,
# 2026-11-29).
_COOL_STEPS = 3
# Part of a budget that is left to the program around the graph, such as losses that it keeps. A plan that took all of
# its budget exceeded it by 10 KB of 8 GB (Qwen3 padded, H200, 2026-11-29).
_AROUND = 1 / 4096

# phase -> segment -> its code: segments of the same code have the same working set.
SegmentCode = Mapping[Phase, Mapping[str, object]]


class GraphRecalibration(Recalibration):
    """Makes one graph's plan once more, with its measured times.

    Args:
        graph: the compiled graph.
        planned: its plan.
        box: where the plan is shown.
        objective: of the plan.
        order: positions in the step's candidates of the graph's candidates.
        alike: the code of each segment.
        pin: prepares that many more bytes of host memory, and says whether they are ready.

    Attributes:
        first: the choice of the first step; None: as in all steps.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        planned: GraphPlanning,
        box: PlanBox,
        objective: Objective,
        order: list[int],
        alike: SegmentCode,
        pin: Callable[[int], bool],
    ) -> None:
        assert planned.schedule is not None and planned.scheduler is not None
        super().__init__(planned.schedule, planned.scheduler, box, objective)
        self._graph = graph
        self._planned = planned
        self._order = order
        self._alike = alike
        self._pin = pin
        self.first: Choice | None = None

    @property
    def spare_bytes(self) -> int:
        """See ``Recalibration``."""
        budget = self._objective.budget_bytes
        return 0 if budget is None or self._objective.is_checkpointing else int(_AROUND * budget)

    def measured(self, readings: Readings) -> tuple[TrainingStep, Prediction]:
        """See ``Recalibration``."""
        if self.control is not None:
            self._schedule = self.control.schedule
        ran = self._ran(readings)
        sizes = shared(readings.temp_bytes(), self._alike)
        step = measured_step(self._scheduler.step, readings.segment_ms(), sizes)
        step = self._with_outputs(step)
        turn = self._turn(simulate(with_turn(step), ran[0], copies=self._scheduler.rates, windows=ran[1]), readings)
        base, partitioning = self._planned.base, self._planned.partitioning
        if base is not None and base.step is not None and partitioning.step is not None:
            baseline = self._baseline(self._with_outputs(as_measured(base.step, partitioning.step, step)), turn)
        else:
            ratio = step.compute_ms / max(self._scheduler.step.compute_ms, 1e-9)
            baseline = self._box.plan.baseline.scaled(ratio)
            if any(turn):  # At least what this partition takes with everything kept.
                kept = self._baseline(step, turn)
                baseline = replace(kept, step_ms=baseline.step_ms + turn[0], backward_ms=baseline.backward_ms)
        if any(turn):
            step = with_turn(step, *turn)
        if self.control is not None:
            step, baseline = self.control.with_margin(step), self.control.baseline_with_margin(baseline)
        return step, baseline

    def recalibrate(self, readings: Readings) -> None:
        """See ``Recalibration``. The smallest budget has to hold the code between forward and backward too."""
        super().recalibrate(readings)
        step = self.scheduler.step
        every = simulate(
            step, (True,) * len(step.candidates), copies=self._scheduler.rates, windows=no_windows(step)
        ).boundaries
        turn = max((b.peak_bytes + self._planned.around_bytes for b in every if b.segment == TURN), default=0)
        self._box.update(smallest_budget_bytes=max(self._box.plan.smallest_budget_bytes, turn))

    def _baseline(self, step: TrainingStep, turn: tuple[float, int]) -> Prediction:
        """Of a partition, as plain Inductor runs it."""
        plain = with_turn(step, *turn) if any(turn) else step
        return Prediction.of(as_inductor(plain, self._scheduler.rates))

    def _ran(self, readings: Readings) -> tuple[Sequence[bool], Windows]:
        """What moved in the steps that were measured, and the windows: the first step's schedule may still have run, or
        the one until a correction."""
        ran, now = readings.signature, self._schedule
        if not isinstance(ran, RanCall) or ran.windows is None:
            return now.offload, now.windows
        moved = dict(zip(self._order, ran.offload, strict=True))
        return [moved[at] for at in range(len(now.offload))], ran.windows

    def _turn(self, ran: Simulation, readings: Readings) -> tuple[float, int]:
        """Milliseconds and bytes of the user's code between the forward and the backward (a loss in eager code); zeros
        where it takes next to nothing. ``ran``: the step that was measured, without that code."""
        ms, peak = readings.segment_ms().get("forward", {}).get(TURN, 0.0), readings.gap_peaks().get(TURN, 0)
        turn = next(b for b in ran.boundaries if b.segment == TURN)
        nbytes = max(peak - turn.live_bytes, 0)
        is_small = ms < _SMALL_TURN * ran.step_ms and peak < (1 + _SMALL_TURN) * ran.peak_bytes
        return (0.0, 0) if is_small else (ms, nbytes)

    def _with_outputs(self, step: TrainingStep) -> TrainingStep:
        """``step``, whose outputs are what the caller made of them."""
        outputs = self._graph.outputs
        step = step.with_tangents() if outputs.have_gradients else step
        return replace(step, holds_outputs=bool(outputs.are_held))

    def pin(self, found: Schedule, now: Schedule) -> bool:
        """See ``Recalibration``."""
        return self._pin(found.simulation.bytes_offloaded - now.simulation.bytes_offloaded)

    def summary_of(self, found: Schedule, baseline: Prediction) -> str:
        """See ``Recalibration``."""
        _, also, said = self._box.plan.summary.partition("; ")
        return f"{aim_of(self._objective)}, by what was measured: {gain_of(found.simulation, baseline)}{also}{said}"

    def follow(self, found: Schedule) -> None:
        """See ``Recalibration``."""
        self._graph.planned = self._choice_of(found)

    def _choice_of(self, found: Schedule) -> Choice:
        return Choice(tuple(found.offload[i] for i in self._order), found.windows)

    def settle(self, now: Schedule) -> None:
        """See ``Recalibration``. The first step's schedule may still run (``PlanOfGraph.settling``)."""
        if self.first is not None and self._graph.planned is self.first:
            self.follow(now)
        if self.control is not None:
            self.control.calibrated(self.scheduler, now)

    def decisions(self, now: Schedule) -> tuple[Decision, ...] | None:
        """See ``Recalibration``."""
        if self._planned.base is None:
            return None
        return decisions_of(self._planned.partitioning, now, self._planned.base, now.simulation)


def replan_for(
    graph: CompiledGraph,
    planned: GraphPlanning,
    box: PlanBox,
    objective: Objective,
    alike: SegmentCode,
    device: torch.device,
    pin: Callable[[int], bool],
    records: bool = True,
) -> Replan | None:
    """An observer for a graph on a GPU. On the CPU, times are no prediction of anything."""
    calibration = calibration_of(graph, planned, box, objective, alike, pin) if device.type == "cuda" else None
    if calibration is None:
        return None
    calls = engine_for(device).calls
    clock = partial(step_clock_for, device, skip=_COOL_STEPS, records=records, num_begun=lambda: calls.num_begun)
    return Replan(calibration, box, make_clock=clock)


def calibration_of(
    graph: CompiledGraph,
    planned: GraphPlanning,
    box: PlanBox,
    objective: Objective,
    alike: SegmentCode,
    pin: Callable[[int], bool],
) -> GraphRecalibration | None:
    """Replans a graph; None where nothing in it moves. Arguments as of ``GraphRecalibration``."""
    if planned.schedule is None or planned.partitioning.step is None:
        return None
    place = {c.name: i for i, c in enumerate(planned.partitioning.step.candidates)}
    order = [place[c.name] for c in graph.saved.candidates]
    return GraphRecalibration(graph, planned, box, objective, order, alike, pin)
