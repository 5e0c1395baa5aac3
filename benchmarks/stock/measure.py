"""The measurement of one variant of a stock model: as of a sweep, or of ranks, with every step written down."""

from __future__ import annotations

import statistics

from benchmarks.clock import StepTime
from benchmarks.measure import Measurement
from benchmarks.measure_plan import PlanMeasurement
from benchmarks.offload import uses_fxoffload
from benchmarks.plans import PlanWatch, join_planning
from benchmarks.quartiles import summarize
from benchmarks.schema import Result
from benchmarks.stock.apply import StockStepper
from benchmarks.stock.estimates import segment_estimates
from benchmarks.stock.records import StockRun

# At most this many times `calibration_steps`, until a plan is there, calibrated and measured.
PATIENCE = 3


class StockMeasurement(PlanMeasurement):
    """On one device. A model with graph breaks is planned when its steps were seen: plans are looked for after every
    step, until one is calibrated."""

    def first_step(self) -> None:
        super().first_step()
        _keep_first(self.result, _stepper(self))

    def freeze_plan(self) -> None:
        assert self._watch is not None
        take_over(self.result, self._watch, self._num_steps)

    def warm_up(self) -> None:
        stepper, result, watch = _stepper(self), self.result, self._watch
        least = 1 + self.request.protocol.warmup

        def begins(index: int) -> bool:
            if watch is None:
                return False
            self._num_steps = len(stepper.facts)
            if index:
                _note_uncalibrated(result, stepper, watch)
            join_planning()
            take_over(result, watch, self._num_steps)
            return index >= least and result.plan is not None and watch.is_settled()

        more = PATIENCE * self.request.protocol.calibration_steps if watch is not None else 0
        _keep_warm_up(result, stepper, watch, stepper.row(least + more, begins))
        self._num_steps = len(stepper.facts)

    def timed_steps(self) -> None:
        super().timed_steps()
        _keep_timed(self.result, _stepper(self))

    def finish_plan(self) -> None:
        super().finish_plan()
        _keep_estimates(self.result)


class ShardedStockMeasurement(Measurement):
    """On one of several ranks, which all take as many steps."""

    def first_step(self) -> None:
        super().first_step()
        _keep_first(self.result, _stepper(self))

    def warm_up(self) -> None:
        """As in a training loop, where variants compile while steps go on. All ranks take as many steps."""
        stepper, result, protocol = _stepper(self), self.result, self.request.protocol
        least = 1 + protocol.warmup
        watch = PlanWatch(seen=()) if uses_fxoffload(self.request.variant) else None
        more = (PATIENCE + 1) * protocol.calibration_steps if watch is not None else 0

        def begins(index: int) -> None:
            if watch is None:
                return
            if index:
                _note_uncalibrated(result, stepper, watch)
            if index >= least + PATIENCE * protocol.calibration_steps:
                join_planning()
            take_over(result, watch, len(stepper.facts))

        _keep_warm_up(result, stepper, watch, stepper.row(least + more, begins))

    def await_plan(self) -> None:
        """The steps of the warm-up waited for it."""

    def timed_steps(self) -> None:
        super().timed_steps()
        _keep_timed(self.result, _stepper(self))
        _keep_estimates(self.result)


def _run_of(result: Result) -> StockRun:
    if result.stock is None:
        result.stock = StockRun()
    return result.stock


def _stepper(measurement: Measurement) -> StockStepper:
    stepper = measurement.stepper
    assert isinstance(stepper, StockStepper)
    return stepper


def take_over(result: Result, watch: PlanWatch, num_steps: int) -> None:
    """Show the newest plan from here on: of several graphs, the step's replaces the graphs'.

    It is written down only then. That takes the host 14 ms for 234 values and 75 for 913, in which the device of a VLM
    idled before each step (H200, 2026-12-01).
    """
    newest = watch.newest()
    if newest is not None and (result.plan is None or newest != result.plan.graph):
        result.plan = watch.freeze(num_steps)
        _run_of(result).plan_after_steps = num_steps


def _note_uncalibrated(result: Result, stepper: StockStepper, watch: PlanWatch) -> None:
    """A step has run: its peak is what the first prediction is about, if the plan is not calibrated yet."""
    if result.plan is not None and not watch.is_calibrated():
        _run_of(result).uncalibrated_peak_bytes = stepper.facts[-1].peak_bytes


def _keep_first(result: Result, stepper: StockStepper) -> None:
    _run_of(result).steps = stepper.facts
    first = stepper.facts[-1]
    if result.first_step_memory is not None and first.peak_bytes is not None:
        result.first_step_memory.peak_bytes = first.peak_bytes


def _keep_warm_up(result: Result, stepper: StockStepper, watch: PlanWatch | None, found: list[StepTime]) -> None:
    result.second_step_ms = found[0].host_wall_ms
    result.losses += [time.loss for time in found]
    if watch is not None and result.plan is not None:
        _note_uncalibrated(result, stepper, watch)
        watch.freeze_calibrated(result.plan, len(stepper.facts))


def _keep_timed(result: Result, stepper: StockStepper) -> None:
    run = _run_of(result)
    run.num_timed = result.num_timed_steps
    timed = stepper.facts[-run.num_timed :]
    result.optimizer_ms = summarize([fact.optimizer_ms for fact in timed])
    run.row_ms = statistics.fmean(f.forward_ms + f.backward_ms + (f.idle_ms or 0.0) for f in timed)
    for fact in timed:
        fact.peak_bytes = None if result.memory is None else result.memory.peak_bytes


def _keep_estimates(result: Result) -> None:
    if result.plan is not None:
        _run_of(result).segments = segment_estimates(result.plan.texts)
