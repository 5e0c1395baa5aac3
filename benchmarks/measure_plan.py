"""The measurement of one variant of a sweep: like measure.py, with the plan written down and its promises tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.budgets import resolve_budget
from benchmarks.compile_profile import read_compile_times
from benchmarks.limits import Limit, empty_cache, run_limited, run_long, total_bytes
from benchmarks.measure import Measurement
from benchmarks.offload import budget_bytes, uses_fxoffload
from benchmarks.phases import Phases
from benchmarks.plans import PlanWatch, join_planning
from benchmarks.schema import Request, Result
from benchmarks.steps import Stepper, measure_warmup


class PlanMeasurement(Measurement):
    """Phases in this order: build, first step (its peak counts too), plan, warm-up, calibration, timed steps,
    gradients, allocator trace, long run, limited run. The plan is frozen before the steps that it is compared with."""

    def __init__(self, request: Request, result: Result, device: torch.device, build: Callable[[], Stepper]) -> None:
        super().__init__(request, result, device, build)
        self._watch = PlanWatch() if uses_fxoffload(request.variant) else None
        self._num_steps = 0
        self._limit: Limit | None = None

    def run(self, phases: Phases) -> None:
        protocol, budget = self.request.protocol, self.result.budget_bytes
        on_gpu = self.device.type == "cuda"
        phases.required("build", self.build)
        if protocol.memory_fraction == "whole" and on_gpu and budget is not None:
            phases.required("limit", partial(self._limit_whole, budget))
        phases.required("first step", self.first_step)
        phases.optional("compile times", lambda: read_compile_times(self.result))
        if self._watch is not None:
            phases.optional("plan", self.freeze_plan)
        phases.required("warm-up", self.warm_up)
        phases.required("timed steps", self.timed_steps)
        if protocol.gradients:
            phases.optional("gradients", self.gradients)
        if protocol.allocator_trace and on_gpu:
            phases.optional("allocator trace", self.trace_allocator)
        if protocol.long_steps and budget is not None:
            phases.optional("long run", lambda: run_long(self.stepper, self.result, protocol.long_steps))
        if protocol.memory_fraction == "steps" and on_gpu and budget is not None:
            phases.optional("limited run", partial(run_limited, self.stepper, self.result, budget))
        phases.optional("plan at the end", self.finish_plan)
        phases.optional("graph count", self.count_graphs)

    def close(self) -> None:
        """Lift limits, and drop compiled code."""
        if self._limit is not None:
            result = self.result
            failures = "; ".join(f"{phase}: {why}" for phase, why in result.failures.items())
            self._limit.run.num_steps = result.num_timed_steps
            self._limit.run.step_ms = result.step_ms.median if result.step_ms else None
            self._limit.lift(result.step_ms is not None, failures)
            self._limit = None
        self._stepper = None

    # -- phases --------------------------------------------------------------------------------------------------------

    def first_step(self) -> None:
        empty_cache(self.device)
        if self._watch is None:
            super().first_step()
        else:
            with self._watch.timing():
                super().first_step()
        self._num_steps += 1

    def freeze_plan(self) -> None:
        assert self._watch is not None
        if self.request.case.compile == "layers":
            return  # there is none yet
        self.result.plan = self._watch.freeze(self._num_steps)

    def warm_up(self) -> None:
        """Until a plan is calibrated, but not for ever: a plan that does nothing never is."""
        measure_warmup(self.stepper, self.result, self.request.protocol)
        self._num_steps += 1 + self.request.protocol.warmup
        if self._watch is None:
            return
        if self.request.case.compile == "layers":
            self._await_plan(self._watch)
            return
        if self.result.plan is None:
            return
        for _ in range(self.request.protocol.calibration_steps):
            if self._watch.is_calibrated():
                break
            self._one_more()
        self._watch.freeze_calibrated(self.result.plan, self._num_steps)

    def _await_plan(self, watch: PlanWatch) -> None:
        """The plan of a step over several graphs is made after the first steps, and followed by the next one."""
        for _ in range(self.request.protocol.calibration_steps):
            join_planning()
            self.result.plan = watch.freeze(self._num_steps)
            self._one_more()
            if self.result.plan is not None:
                break
        if self.result.plan is None:
            return
        # Measuring takes time in each of a chain's calls, and their recomputation may be chosen once more, and
        # measured: the timed steps come after all of it.
        for _ in range(3 * self.request.protocol.calibration_steps):
            join_planning()
            if watch.is_calibrated() and watch.is_measured():
                break
            self._one_more()
        watch.freeze_calibrated(self.result.plan, self._num_steps)

    def _one_more(self) -> None:
        self.result.losses.append(self.stepper.step().loss)
        self._num_steps += 1

    def gradients(self) -> None:
        """Those of the last timed step, and of one more."""
        self.repeat_gradients()

    def finish_plan(self) -> None:
        if self._watch is not None and self.result.plan is not None:
            self._watch.finish(self.result.plan)

    def _limit_whole(self, budget_bytes: int) -> None:
        self._limit = Limit("whole", budget_bytes, self.device)
        self.result.limited_run = self._limit.run


def resolve(request: Request, result: Result, peaks: Mapping[str, int], device: torch.device) -> dict[str, Any]:
    """The variant's options with their budget in bytes, which the result notes."""
    options = dict(request.variant.options)
    if options.get("activation_budget") is None:
        return options
    known = dict(peaks)
    if device.type == "cuda":
        known["free"] = total_bytes(device) - torch.cuda.memory_allocated(device)
    options["activation_budget"] = resolve_budget(options["activation_budget"], known)
    result.budget_bytes = budget_bytes(replace(request.variant, options=options))
    return options
