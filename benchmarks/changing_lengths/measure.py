"""FSDP2 on batches of changing length: what grows, what is compiled again, what moves.

Layers are compiled with dynamic shapes, each on its own. Steps of the longest length come first, as many as a plan
needs, then ``warmup`` steps of random lengths, then ``steps`` timed ones. Every rank draws its own lengths, so that
ranks have different batches in the same step, as in RL post-training.
"""

from __future__ import annotations

import gc
import math
import random
from typing import TypeVar

import torch
import torch.distributed as dist

from benchmarks.changing_lengths.records import LengthsRun
from benchmarks.compile_profile import count_graphs, read_compile_times
from benchmarks.measure import Measurement
from benchmarks.offload import read_stats, reset_stats
from benchmarks.phases import Phases, host_after
from benchmarks.plans import join_planning
from benchmarks.process_memory import ProcessMemory
from benchmarks.quartiles import summarize
from benchmarks.steps import StepTime, end_memory_window, start_memory_window

T = TypeVar("T")

# Steps of the longest length that every variant has behind the first: the second, and one more.
LONGEST_STEPS = 2
# So many timed steps at a time: what they found is written down before the next.
STEPS_OF_A_PHASE = 25


class ChangingLengths(Measurement):
    """The phases of one variant on this rank."""

    def run(self, phases: Phases) -> None:
        phases.required("build", self.build)
        phases.required("first step", self.first_step)
        if self.request.protocol.num_processes > 1:
            phases.optional("ranks alone", self.measure_ranks)
        phases.optional("compile times", lambda: read_compile_times(self.result))
        phases.required("plan", self.await_plan_of_the_longest)
        phases.required("warm-up", self.warm_up)
        phases.required("draw lengths", self.begin)
        steps = self.request.protocol.steps
        for first in range(0, steps, STEPS_OF_A_PHASE):
            phases.required(f"timed steps to {min(first + STEPS_OF_A_PHASE, steps)}", self.some_timed_steps)

    def build(self) -> None:
        super().build()
        (self._longest,) = self.stepper.job.inputs
        self._draw = random.Random(1_000 * self.request.case.seed + self.request.rank)

    def await_plan_of_the_longest(self) -> None:
        """As many steps on every rank, and of every variant that has no plan the few that warm a step up."""
        self.result.second_step_ms = self.step(self._longest.shape[1]).host_wall_ms
        for _ in range(LONGEST_STEPS - 1):
            self.step(self._longest.shape[1])
        if self.request.variant.kind == "auto":
            self.await_plan()

    def warm_up(self) -> None:
        for length in self._lengths(self.request.protocol.warmup):
            join_planning()  # a plan in the making takes memory that it gives back
            self.step(length)
        self._read_memory()  # the first reading itself leaves something behind
        self._after_warmup = self._read_memory()

    def begin(self) -> None:
        """The longest batch is there as the window of memory begins, so no other adds to what was there before."""
        lengths = self._lengths(self.request.protocol.steps)
        lengths[len(lengths) // 2] = self._longest.shape[1]
        reset_stats(self.request.variant)
        self._before = start_memory_window(self.device)
        self._times: list[StepTime] = []
        self._to_come = lengths
        self._run = LengthsRun(self.request.protocol.warmup, [], [], [], [], self._after_warmup)

    def some_timed_steps(self) -> None:
        """The next few, and what all until now come to."""
        result, times, found = self.result, self._times, self._run
        now, self._to_come = self._to_come[:STEPS_OF_A_PHASE], self._to_come[STEPS_OF_A_PHASE:]
        for length in now:
            times.append(self.step(length))
            result.losses.append(times[-1].loss)
            found.lengths.append(length)
            self._note(found)
        result.memory = end_memory_window(self.device, self._before)
        result.num_timed_steps = len(times)
        result.step_ms = summarize([t.step_ms for t in times])
        result.forward_ms = summarize([t.forward_ms for t in times])
        result.backward_ms = summarize([t.backward_ms for t in times])
        result.host_wall_ms = summarize([t.host_wall_ms for t in times])
        result.stats_timed_steps = read_stats(self.request.variant)
        result.num_graphs_at_end = count_graphs()
        found.grown_by_rank = self._of_all_ranks(self._read_memory().since(self._after_warmup))
        found.graphs_by_rank = self._of_all_ranks(count_graphs())
        result.changing_lengths = found
        if result.host is not None:
            host_after(result.host)

    def step(self, length: int) -> StepTime:
        """One step on the first ``length`` tokens of the longest batch.

        Contiguous in all strides: ``clone`` alone keeps that of the batch's dimension, on which Dynamo guards.
        """
        job = self.stepper.job
        whole = self._longest
        batch = whole
        if length < whole.shape[1]:
            batch = whole.detach()[:, :length].clone(memory_format=torch.contiguous_format).requires_grad_()
        job.inputs = (batch,)
        job.allocate_gradients()
        return self.stepper.step()

    def _lengths(self, count: int) -> list[int]:
        return draw_lengths(self._draw, count, self.request.protocol.shortest, self._longest.shape[1])

    def _note(self, found: LengthsRun) -> None:
        stats = read_stats(self.request.variant) or {}
        moved = int(stats.get("bytes_offloaded", 0)) - sum(found.offloaded_bytes)
        on_gpu = self.device.type == "cuda"
        found.offloaded_bytes.append(moved)
        found.device_reserved_bytes.append(torch.cuda.memory_reserved(self.device) if on_gpu else 0)
        found.host_reserved_bytes.append(int(stats.get("host_bytes_reserved", 0)))

    def _read_memory(self) -> ProcessMemory:
        """With no batch but the longest, and no plan in the making."""
        join_planning()
        self.stepper.job.inputs = (self._longest,)
        gc.collect()
        return ProcessMemory.read()

    def _of_all_ranks(self, mine: T) -> list[T]:
        everyone: list[T] = [mine] * self.request.protocol.num_processes
        if len(everyone) > 1:
            dist.all_gather_object(everyone, mine)
        return everyone


def draw_lengths(draw: random.Random, count: int, shortest: int, longest: int) -> list[int]:
    """``count`` lengths, both ends included, their logarithms evenly spread: many short ones and few long ones, as
    answers have them.

    Raises:
        ValueError: the shortest is none that there can be.
    """
    if not 1 <= shortest <= longest:
        raise ValueError(f"expected shortest to be from 1 to seq={longest}, found {shortest}")
    low, high = math.log(shortest), math.log(longest)
    return [round(math.exp(draw.uniform(low, high))) for _ in range(count)]
