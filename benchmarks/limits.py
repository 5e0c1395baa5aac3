"""What a sweep may do after the timed steps: many steps for the allocator's cache, and steps under a hard limit."""

from __future__ import annotations

import gc

import torch

from benchmarks.quartiles import summarize
from benchmarks.schema import LimitedRun, LongRun, Result
from benchmarks.steps import Stepper, end_memory_window, start_memory_window

# The "budget + 10 %".
HEADROOM = 1.1
LIMITED_STEPS = 3


def run_long(stepper: Stepper, result: Result, num_steps: int) -> None:
    """``num_steps`` steps from an empty cache. Reserved bytes beyond the allocated ones are fragmentation."""
    stepper.job.zero_gradients()
    empty_cache(stepper.device)
    before = start_memory_window(stepper.device)
    times = [stepper.step().step_ms for _ in range(num_steps)]
    memory = end_memory_window(stepper.device, before)
    ratio = memory.max_reserved_bytes / (memory.before_bytes + memory.peak_bytes) if memory else None
    result.long_run = LongRun(num_steps, memory, summarize(times), ratio)


class Limit:
    """The process's device memory, limited to the bytes allocated now and the budget with its headroom.

    Mode "whole" limits everything from the compile on, "steps" some steps after the measurement. The limit is one of
    reserved memory: the allocator gives cached blocks back and tries again before it fails, which is counted.
    """

    def __init__(self, mode: str, budget_bytes: int, device: torch.device) -> None:
        self._device = device
        empty_cache(device)
        limit_bytes = torch.cuda.memory_allocated(device) + int(HEADROOM * budget_bytes)
        fraction = min(1.0, limit_bytes / total_bytes(device))
        self.run = LimitedRun(mode, fraction, limit_bytes)
        torch.cuda.reset_peak_memory_stats(device)
        self._retries = _num_retries(device)
        torch.cuda.set_per_process_memory_fraction(fraction, device)

    def lift(self, completed: bool, reason: str) -> None:
        """Back to all of the device; says how it went."""
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)
        self.run.completed, self.run.reason = completed, reason
        self.run.max_reserved_bytes = torch.cuda.max_memory_reserved(self._device)
        self.run.num_alloc_retries = _num_retries(self._device) - self._retries


def run_limited(stepper: Stepper, result: Result, budget_bytes: int) -> None:
    """Steps of compiled code; raises their errors, after noting them."""
    stepper.job.zero_gradients()
    limit = Limit("steps", budget_bytes, stepper.device)
    result.limited_run = limit.run
    try:
        times = [stepper.step().step_ms for _ in range(LIMITED_STEPS)]
    except Exception as error:
        limit.lift(False, f"{type(error).__name__}: {str(error)[:300]}")
        raise
    limit.lift(True, "")
    limit.run.num_steps, limit.run.step_ms = len(times), summarize(times).median


def empty_cache(device: torch.device) -> None:
    """Nothing is held for later: memory reserved from here on is due to later steps."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def total_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _num_retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
