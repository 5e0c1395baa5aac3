"""Plans again, once, when the first steps have been measured; then measures whether the prediction came true.

Nothing waits for it: the segment clock is asked whether it is done, the new schedule is worked out on a thread of its
own, and the next forward follows it. Only keep, offload and windows change; nothing is compiled, and nothing is
exchanged between ranks.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from fxoffload.compiler.explain import decisions_of
from fxoffload.compiler.planning import Planned
from fxoffload.graphs import CompiledGraph
from fxoffload.planner.goal import PlanGoal
from fxoffload.planner.plan import Prediction
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.shown import PlanBox
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import SegmentStep, TrainingStep
from fxoffload.runtime.segment_clock import SegmentClock, clock_for
from fxoffload.runtime.segment_readings import Phase, Readings
from fxoffload.runtime.windows import Choice
from fxoffload.sizes import format_bytes

log = logging.getLogger(__name__)

# A new schedule has to be better by this part of the step, or of the peak, to replace the one that runs.
_BETTER = 0.003

Phases = Mapping[Phase, Mapping[str, float]]


class Replan:
    """Follows one planned graph through its first steps.

    The drafts of the plan, whose graphs are as large as what was compiled, are held until the calibration has ended.

    Args:
        calibration: what plans again.
        box: where the plan is shown.
        make_clock: makes the clock of the next measurement.
        in_background: whether to plan on a thread of its own.
    """

    def __init__(
        self,
        calibration: Calibration,
        box: PlanBox,
        *,
        make_clock: Callable[[], SegmentClock],
        in_background: bool = True,
    ) -> None:
        self._calibration: Calibration | None = calibration
        self._box = box
        self._make_clock = make_clock
        self._in_background = in_background
        self._lock = threading.Lock()
        self.clock: SegmentClock | None = make_clock()

    def poll(self) -> SegmentClock | None:
        """Called when a forward begins. Returns the clock that measures now, None when there is nothing left to do."""
        clock = self.clock
        if clock is None or not clock.ready():
            return clock
        with self._lock:
            if self.clock is not clock:
                return self.clock
            self.clock = None
            calibration, self._calibration = self._calibration, None
        if calibration is None:
            self._check(clock)
        elif self._in_background:
            threading.Thread(
                target=self._calibrate, args=(calibration, clock), name="fxoffload-replan", daemon=True
            ).start()
        else:
            self._calibrate(calibration, clock)
        return self.clock

    def _calibrate(self, calibration: Calibration, clock: SegmentClock) -> None:
        try:
            calibration.plan_again(clock.readings())
        except Exception as error:
            warnings.warn(
                f"fxoffload could not plan again with measured times and goes on with its first plan: {error}",
                stacklevel=2,
            )
        self.clock = self._make_clock()

    def _check(self, clock: SegmentClock) -> None:
        """What the steps behind the calibration took."""
        readings = clock.readings()
        segments = readings.segment_ms()
        total = sum(readings.step_ms().values())
        self._box.update(
            measured_step_ms=total,
            measured_peak_bytes=readings.peak_bytes(),
            measured_exposed_ms=max(0.0, total - sum(sum(s.values()) for s in segments.values())),
        )


class Calibration:
    """Plans one graph again, once, with what was measured of it.

    Args:
        graph: the compiled graph.
        planned: its plan.
        box: where the plan is shown.
        goal: of the plan.
        order: positions in the step's candidates of the graph's candidates.
        alike: phase -> segment -> its code: segments of the same code have the same working set.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        planned: Planned,
        box: PlanBox,
        goal: PlanGoal,
        order: list[int],
        alike: Mapping[Phase, Mapping[str, object]],
    ) -> None:
        assert planned.schedule is not None and planned.scheduler is not None
        self._graph = graph
        self._planned = planned
        self._schedule: Schedule = planned.schedule
        self._scheduler: Scheduler = planned.scheduler
        self._box = box
        self._goal = goal
        self._order = order
        self._alike = alike

    def plan_again(self, readings: Readings) -> None:
        """From the next forward on the graph follows the new schedule, where that is better."""
        sizes = shared(readings.temp_bytes(), self._alike)
        step = measured_step(self._scheduler.step, readings.segment_ms(), sizes)
        rates, budget = self._scheduler.rates, self._goal.budget_bytes
        ratio = step.compute_ms / max(self._scheduler.step.compute_ms, 1e-9)
        baseline = scale(self._box.plan.baseline, ratio)
        offload, windows = self._schedule.offload, self._schedule.windows
        now = Schedule(offload, windows, simulate(step, offload, copies=rates, windows=windows))
        # No more than is pinned already, or a later step would wait for pinning; but the budget comes first.
        exceeds = budget is not None and now.simulation.peak_bytes > budget
        host_bytes = self._scheduler.host_bytes if exceeds else now.simulation.bytes_offloaded
        scheduler = self._scheduler.with_step(step, host_bytes)
        found = self._aim(scheduler, baseline)
        if found is not None and self._is_better(found, now, baseline):
            log.info(
                "planned again with measured times: %.1f -> %.1f ms", now.simulation.step_ms, found.simulation.step_ms
            )
            now = found
            self._graph.planned = Choice(tuple(found.offload[i] for i in self._order), found.windows)
        if budget is not None and now.simulation.peak_bytes > budget:
            warnings.warn(
                f"by what was measured, the plan takes {format_bytes(now.simulation.peak_bytes)}, more than the "
                f"activation_budget of {format_bytes(budget)}, and no other choice of what to keep fits; raise it",
                stacklevel=2,
            )
        if self._planned.base is not None:
            self._box.update(decisions=decisions_of(self._planned.draft, now, self._planned.base, now.simulation))
        self._box.update(
            calibrated=Prediction.of(now.simulation), calibrated_baseline=baseline, simulation=now.simulation
        )

    def _aim(self, scheduler: Scheduler, baseline: Prediction) -> Schedule | None:
        if self._goal.budget_bytes is not None:
            return scheduler.least_time(self._goal.budget_bytes, refined=True)
        assert self._goal.max_slowdown is not None
        return scheduler.least_peak(baseline.step_ms * (1 + self._goal.max_slowdown))

    def _is_better(self, found: Schedule, now: Schedule, baseline: Prediction) -> bool:
        budget, slowdown = self._goal.budget_bytes, self._goal.max_slowdown
        mine, other = now.simulation, found.simulation
        if budget is not None:
            return mine.peak_bytes > budget or other.step_ms < mine.step_ms * (1 - _BETTER)
        assert slowdown is not None
        too_slow = mine.step_ms > baseline.step_ms * (1 + slowdown + _BETTER)
        return too_slow or other.peak_bytes < mine.peak_bytes * (1 - _BETTER)


def measured_step(
    step: TrainingStep, ms: Phases, temp_bytes: Mapping[Phase, Mapping[str, int | None]] | None = None
) -> TrainingStep:
    """``step`` with what was measured of its segments; what was not stays."""

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


def shared(
    sizes: Mapping[Phase, Mapping[str, int | None]], alike: Mapping[Phase, Mapping[str, object]]
) -> dict[Phase, dict[str, int | None]]:
    """``sizes``, where a segment that was not measured takes what was measured of one of the same code."""
    found: dict[Phase, dict[str, int | None]] = {}
    for phase, codes in alike.items():
        known: dict[object, int] = {}
        for name, size in sizes.get(phase, {}).items():
            if size is not None and name in codes:
                known[codes[name]] = max(size, known.get(codes[name], size))
        found[phase] = {name: known.get(code) for name, code in codes.items()}
    return found


def scale(prediction: Prediction, ratio: float) -> Prediction:
    """The same with all times multiplied: what was measured of one partition, told of another one."""
    return replace(
        prediction,
        step_ms=prediction.step_ms * ratio,
        forward_ms=prediction.forward_ms * ratio,
        backward_ms=prediction.backward_ms * ratio,
        exposed_ms=prediction.exposed_ms * ratio,
    )


def replan_for(
    graph: CompiledGraph,
    planned: Planned,
    box: PlanBox,
    goal: PlanGoal,
    alike: Mapping[Phase, Mapping[str, object]],
    device: torch.device,
) -> Replan | None:
    """A follower for a graph on a GPU. On the CPU, times are no prediction of anything."""
    if device.type != "cuda" or planned.schedule is None or planned.draft.step is None:
        return None
    place = {c.name: i for i, c in enumerate(planned.draft.step.candidates)}
    order = [place[c.name] for c in graph.saved.candidates]
    calibration = Calibration(graph, planned, box, goal, order, alike)
    return Replan(calibration, box, make_clock=lambda: clock_for(device))
