"""Replans a graph, once, when its first steps have been measured; then measures whether the prediction came true.

Nothing waits for it: the segment clock is asked whether it is done, the new schedule is worked out on a thread of its
own, and the next forward follows it. Only keep, offload and windows change; nothing is compiled, and nothing is
exchanged between ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler.calibration import Recalibration
from fxoffload.compiler.explain import decisions_of
from fxoffload.compiler.planning import GraphPlanning
from fxoffload.errors import in_brief
from fxoffload.plan_report.registry import PlanBox
from fxoffload.plan_report.summary import aim_of, gain_of
from fxoffload.planner.chain import with_turn
from fxoffload.planner.measured import measured_step_of
from fxoffload.planner.objective import Objective
from fxoffload.planner.plan import Decision, Prediction
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import SegmentStep, TrainingStep
from fxoffload.runtime import background
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.profiler.segment_clock import SegmentClock, clock_for
from fxoffload.step.choice import Choice
from fxoffload.step.readings import Phase, Readings
from fxoffload.step.segment_names import lies_between

log = logging.getLogger(__name__)

# Of a step: code between its forward and its backward that takes less is no part of the plan.
_SMALL_TURN = 0.01
# Of a phase: segments that differ between two partitions and take less say little about others.
_FEW = 0.1

Phases = Mapping[Phase, Mapping[str, float]]


class StepClock(Protocol):
    """A clock that measures steps; see ``SegmentClock``."""

    def ready(self) -> bool: ...
    def readings(self) -> Readings: ...


_C = TypeVar("_C", bound=StepClock)


class Replan(Generic[_C]):
    """Follows one plan through its first steps.

    The partitionings of the plan, whose graphs are as large as the compiled ones, are held until the calibration has
    ended.

    Args:
        calibration: makes the new plan.
        box: where the plan is shown.
        make_clock: makes the clock of the next measurement.
        in_background: whether to plan on a thread of its own.
    """

    def __init__(
        self,
        calibration: Recalibration,
        box: PlanBox,
        *,
        make_clock: Callable[[], _C],
        in_background: bool = True,
    ) -> None:
        self._calibration: Recalibration | None = calibration
        self._box = box
        self._make_clock = make_clock
        self._in_background = in_background
        self._lock = threading.Lock()
        self._is_calibrating = False
        self._is_stopped = False
        self.clock: _C | None = make_clock()

    @property
    def calibration(self) -> Recalibration | None:
        """The calibration to come; None once it is done."""
        return self._calibration

    @property
    def has_ended(self) -> bool:
        """Whether no further planning will come."""
        with self._lock:
            return self._calibration is None and not self._is_calibrating

    @property
    def is_settled(self) -> bool:
        """Whether no measurement and no planning is left to do."""
        with self._lock:
            return self.clock is None and self._calibration is None and not self._is_calibrating

    def stop(self) -> None:
        """Nothing is measured or planned any more. Takes no lock: a finalizer may call it."""
        self._is_stopped = True
        self._calibration, self.clock = None, None

    def poll(self) -> _C | None:
        """Called when a forward begins. Returns the clock that measures now, None when there is nothing left to do."""
        clock = self.clock
        if clock is None or not clock.ready():
            return clock
        with self._lock:
            if self.clock is not clock:
                return self.clock
            self.clock = None
            calibration, self._calibration = self._calibration, None
            self._is_calibrating = calibration is not None
        if calibration is None:
            try:
                self._check(clock)
            except Exception as error:
                background.warn(f"fxoffload could not show measured times: {in_brief(error)}")
        elif self._in_background:
            background.start_planning(self._calibrate, calibration, clock, name="fxoffload-replan")
        else:
            self._calibrate(calibration, clock)
        return self.clock

    def _calibrate(self, calibration: Recalibration, clock: _C) -> None:
        again = None
        try:
            readings = clock.readings()
            log_times("before the calibration", readings)
            self._show_between(readings)
            calibration.recalibrate(readings)
            again = calibration.once_more
        except Exception as error:
            if background.is_ending():
                return
            background.warn(
                "fxoffload could not plan again with measured times and goes on with its plan as it is: "
                f"{in_brief(error)}"
            )
        finally:
            with self._lock:
                self._is_calibrating = False
                self._calibration, self.clock = again, self._make_clock()
                if self._is_stopped:  # meanwhile
                    self._calibration, self.clock = None, None

    def _show_between(self, readings: Readings) -> None:
        if (ms := readings.between_steps_ms()) is not None:
            self._box.update(between_steps_ms=ms)

    def _check(self, clock: _C) -> None:
        """Show the times of the steps after the calibration."""
        readings = clock.readings()
        segments = readings.segment_ms()
        total = sum(readings.step_ms().values())
        log_times("after the calibration", readings)
        self._show_between(readings)
        self._box.update(
            measured_step_ms=total + (readings.turn_ms() or 0.0),
            measured_peak_bytes=readings.peak_bytes(),
            measured_exposed_ms=max(0.0, total - sum(sum(s.values()) for s in segments.values())),
            measured_step=measured_step_of(
                readings, {(b.phase, b.segment): b.layer for b in self._box.plan.boundaries}
            ),
        )


def log_times(when: str, readings: Readings) -> None:
    """Where the time of the steps that were measured went."""
    segments = readings.segment_ms()
    for phase, total in readings.step_ms().items():
        ms = segments.get(phase, {})
        between = sum(t for name, t in ms.items() if lies_between(name))
        inside = sum(ms.values()) - between
        log.info(
            "%s, the %s took %.1f ms: %.1f in segments, %.1f between calls, %.1f waiting",
            when,
            phase,
            total,
            inside,
            between,
            total - inside - between,
        )


class Calibration(Recalibration):
    """Makes one graph's plan once more, with its measured times.

    Args:
        graph: the compiled graph.
        planned: its plan.
        box: where the plan is shown.
        objective: of the plan.
        order: positions in the step's candidates of the graph's candidates.
        alike: phase -> segment -> its code: segments of the same code have the same working set.
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
        alike: Mapping[Phase, Mapping[str, object]],
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

    def measured(self, readings: Readings) -> tuple[TrainingStep, Prediction]:
        """See ``Recalibration``."""
        if self.control is not None:
            self._schedule = self.control.schedule
        sizes = shared(readings.temp_bytes(), self._alike)
        step = measured_step(self._scheduler.step, readings.segment_ms(), sizes)
        step = self._with_outputs(step)
        turn = self._turn(step, readings)
        base, partitioning = self._planned.base, self._planned.partitioning
        if base is not None and base.step is not None and partitioning.step is not None:
            baseline = self._baseline(self._with_outputs(as_measured(base.step, partitioning.step, step)), turn)
        else:
            ratio = step.compute_ms / max(self._scheduler.step.compute_ms, 1e-9)
            baseline = scale(self._box.plan.baseline, ratio)
            if any(turn):  # At least what this partition takes with everything kept.
                kept = self._baseline(step, turn)
                baseline = replace(kept, step_ms=baseline.step_ms + turn[0], backward_ms=baseline.backward_ms)
        if any(turn):
            step = with_turn(step, *turn)
        if self.control is not None:
            step, baseline = self.control.with_margin(step), self.control.baseline_with_margin(baseline)
        return step, baseline

    def _baseline(self, step: TrainingStep, turn: tuple[float, int]) -> Prediction:
        """Of a partition, with everything kept."""
        plain = with_turn(step, *turn) if any(turn) else step
        return Prediction.of(simulate(plain, (False,) * len(plain.candidates), copies=self._scheduler.rates))

    def _turn(self, step: TrainingStep, readings: Readings) -> tuple[float, int]:
        """Milliseconds and bytes of the user's code between the forward and the backward (a loss in eager code); zeros
        where it takes next to nothing."""
        ms, peak = readings.turn_ms() or 0.0, readings.turn_peak() or 0
        offload, windows = self._schedule.offload, self._schedule.windows
        ran = simulate(with_turn(step), offload, copies=self._scheduler.rates, windows=windows)
        nbytes = max(peak - ran.boundaries[len(step.forward)].live_bytes, 0)
        is_small = ms < _SMALL_TURN * ran.step_ms and peak < (1 + _SMALL_TURN) * ran.peak_bytes
        return (0.0, 0) if is_small else (ms, nbytes)

    def _with_outputs(self, step: TrainingStep) -> TrainingStep:
        """``step``, whose outputs are what the caller made of them."""
        outputs = self._graph.outputs
        frees = step.frees_tangents and not outputs.have_gradients
        return replace(step, holds_outputs=bool(outputs.are_held), frees_tangents=frees)

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

    def settle(self, now: Schedule, baseline: Prediction) -> Schedule:
        """A graph has one recompute choice. The first step's schedule may still run (``CompileSession._settling``)."""
        if self.first is not None and self._graph.planned is self.first:
            self.follow(now)
        if self.control is not None:
            self.control.calibrated(self.scheduler, now)
        return now

    def decisions(self, now: Schedule) -> tuple[Decision, ...] | None:
        """See ``Recalibration``."""
        if self._planned.base is None:
            return None
        return decisions_of(self._planned.partitioning, now, self._planned.base, now.simulation)


def measured_step(
    step: TrainingStep, ms: Phases, temp_bytes: Mapping[Phase, Mapping[str, int | None]] | None = None
) -> TrainingStep:
    """``step`` with measurements of its segments; the rest stays as estimated."""

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


def as_measured(other: TrainingStep, estimated: TrainingStep, measured: TrainingStep) -> TrainingStep:
    """``other``, another partition of the same graph: its estimates, corrected by the measurements of one partition.

    Where a segment has the same estimate in both, it is the same code. Others take as much longer than their estimates
    as those do that differ in the measured partition. A loss is estimated worse than layers, and mostly the same in
    both: by the ratio of whole steps, plain Inductor's backward was 5 % too short (Qwen3, 8 layers, H200, 2026-11-27).
    """

    def known(
        segments: tuple[SegmentStep, ...], before: tuple[SegmentStep, ...], after: tuple[SegmentStep, ...]
    ) -> tuple[SegmentStep, ...]:
        pairs = {b.name: (b, a) for b, a in zip(before, after, strict=True)}
        same = {s.name for s in segments if s.name in pairs and _is_alike(s, pairs[s.name][0])}
        ratio = _ratio([pair for name, pair in pairs.items() if name not in same], pairs.values())
        found = []
        for segment in segments:
            if segment.name in same:
                measured_one = pairs[segment.name][1]
                found.append(replace(segment, ms=measured_one.ms, temp_bytes=measured_one.temp_bytes))
            else:
                found.append(replace(segment, ms=segment.ms * ratio))
        return tuple(found)

    return replace(
        other,
        forward=known(other.forward, estimated.forward, measured.forward),
        backward=known(other.backward, estimated.backward, measured.backward),
    )


def _is_alike(one: SegmentStep, other: SegmentStep) -> bool:
    return (one.ms, one.temp_bytes) == (other.ms, other.temp_bytes)


def _ratio(
    differing: Iterable[tuple[SegmentStep, SegmentStep]], everything: Iterable[tuple[SegmentStep, SegmentStep]]
) -> float:
    """Measured against estimated time of segments that differ; of all of a phase where those are a small part of it."""
    of_some, of_all = _times(differing), _times(everything)
    estimated, measured = of_some if of_some[0] > _FEW * of_all[0] else of_all
    return measured / max(estimated, 1e-9)


def _times(pairs: Iterable[tuple[SegmentStep, SegmentStep]]) -> tuple[float, float]:
    found = list(pairs)
    return sum(before.ms for before, _ in found), sum(after.ms for _, after in found)


def shared(
    sizes: Mapping[Phase, Mapping[str, int | None]], alike: Mapping[Phase, Mapping[str, object]]
) -> dict[Phase, dict[str, int | None]]:
    """``sizes``, where an unmeasured segment takes the measurement of one of the same code."""
    found: dict[Phase, dict[str, int | None]] = {}
    for phase, codes in alike.items():
        known: dict[object, int] = {}
        for name, size in sizes.get(phase, {}).items():
            if size is not None and name in codes:
                known[codes[name]] = max(size, known.get(codes[name], size))
        found[phase] = {name: known.get(code) for name, code in codes.items()}
    return found


def scale(prediction: Prediction, ratio: float) -> Prediction:
    """The same with all times multiplied: applies the measured ratio of one partition to another."""
    return replace(
        prediction,
        step_ms=prediction.step_ms * ratio,
        forward_ms=prediction.forward_ms * ratio,
        backward_ms=prediction.backward_ms * ratio,
        exposed_ms=prediction.exposed_ms * ratio,
    )


def replan_for(
    graph: CompiledGraph,
    planned: GraphPlanning,
    box: PlanBox,
    objective: Objective,
    alike: Mapping[Phase, Mapping[str, object]],
    device: torch.device,
    pin: Callable[[int], bool],
    records: bool = True,
) -> Replan[SegmentClock] | None:
    """An observer for a graph on a GPU. On the CPU, times are no prediction of anything."""
    calibration = calibration_of(graph, planned, box, objective, alike, pin) if device.type == "cuda" else None
    if calibration is None:
        return None
    calls = engine_for(device).calls
    clock = partial(clock_for, device, records=records, num_begun=lambda: calls.num_begun)
    return Replan(calibration, box, make_clock=clock)


def calibration_of(
    graph: CompiledGraph,
    planned: GraphPlanning,
    box: PlanBox,
    objective: Objective,
    alike: Mapping[Phase, Mapping[str, object]],
    pin: Callable[[int], bool],
) -> Calibration | None:
    """Replans a graph; None where nothing in it moves. Arguments as of ``Calibration``."""
    if planned.schedule is None or planned.partitioning.step is None:
        return None
    place = {c.name: i for i, c in enumerate(planned.partitioning.step.candidates)}
    order = [place[c.name] for c in graph.saved.candidates]
    return Calibration(graph, planned, box, objective, order, alike, pin)
