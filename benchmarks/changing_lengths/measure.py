"""FSDP2 on batches of changing length: growth of memory, recompilation, offloading.

Layers are compiled with dynamic shapes, each on its own. Steps of the longest length come first, as many as a plan
needs. Then come ``warmup`` steps of lengths all over the range, one more of the longest, and ``steps`` timed ones of
random lengths. The last of those come once more: growth then is not due to new lengths. Every rank draws its own, so
that ranks have different batches in the same step, as in RL post-training.
"""

from __future__ import annotations

import gc
import math
import random
import time
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

# Steps of the longest length that every variant has after the first: the second, and one more.
LONGEST_STEPS = 2
# Timed steps at a time: their findings are written down before the next.
STEPS_OF_A_PHASE = 25
# Timed lengths that come once more, after the timed steps.
STEPS_AGAIN = 50


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
        phases.optional("lengths again", self.lengths_again)

    def build(self) -> None:
        super().build()
        job = self.stepper.job
        (self._tokens,) = (batch.detach() for batch in job.inputs)
        self._longest = self._tokens.shape[1]
        self._load(self._longest)
        self._draw = random.Random(1_000 * self.request.case.seed + self.request.rank)

    def await_plan_of_the_longest(self) -> None:
        """As many steps on every rank, and of every variant that has no plan the few that warm a step up."""
        self.result.second_step_ms = self.step(self._longest).host_wall_ms
        for _ in range(LONGEST_STEPS - 1):
            self.step(self._longest)
        if self.request.variant.kind == "auto":
            self.await_plan()

    def warm_up(self) -> None:
        """Lengths all over the range, so that what a length needs for the first time is there."""
        begin = time.perf_counter()
        shortest, count = self.request.protocol.shortest, self.request.protocol.warmup
        for length in spread_lengths(self._draw, count, shortest, self._longest):
            join_planning()  # a plan in the making takes memory that it gives back
            self.step(length)
        join_planning()
        self.step(self._longest)  # what the last plan wants compiled is compiled where a step begins
        self._warmup_s = time.perf_counter() - begin
        self._read_memory()  # the first reading itself leaves something behind
        self._after_warmup = self._read_memory()

    def begin(self) -> None:
        """The longest batch is there as the window of memory begins, so no other adds to the memory before it."""
        protocol = self.request.protocol
        lengths = draw_lengths(self._draw, protocol.steps, protocol.shortest, self._longest)
        lengths[len(lengths) // 2] = self._longest
        reset_stats(self.request.variant)
        self._load(self._longest)
        self._before = start_memory_window(self.device)
        self._times: list[StepTime] = []
        self._to_come = lengths
        self._run = LengthsRun(protocol.warmup, self._after_warmup, warmup_s=self._warmup_s)

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
        self._now = self._read_memory()
        found.grown.append(self._now.since(self._after_warmup))
        found.grown_by_rank = self._of_all_ranks(found.grown[-1])
        found.graphs_by_rank = self._of_all_ranks(count_graphs())
        result.changing_lengths = found
        if result.host is not None:
            host_after(result.host)

    def lengths_again(self) -> None:
        """What torch and the library keep for each length is there by now."""
        for length in self._run.lengths[-STEPS_AGAIN:]:
            self.step(length)
        self._run.grown_again_by_rank = self._of_all_ranks(self._read_memory().since(self._now))

    def step(self, length: int) -> StepTime:
        """One step on the first ``length`` tokens."""
        self._load(length)
        return self.stepper.step()

    def _load(self, length: int) -> None:
        """The batch of that length, in the place of the one before, with a gradient as leaves have it here.

        Contiguous in all strides: ``clone`` alone keeps that of the batch's dimension, on which Dynamo guards.
        """
        job = self.stepper.job
        job.inputs = ()
        job.inputs = (self._tokens[:, :length].clone(memory_format=torch.contiguous_format).requires_grad_(),)
        job.allocate_gradients()

    def _note(self, found: LengthsRun) -> None:
        stats = read_stats(self.request.variant) or {}
        moved = int(stats.get("bytes_offloaded", 0)) - sum(found.offloaded_bytes)
        on_gpu = self.device.type == "cuda"
        found.offloaded_bytes.append(moved)
        peak = torch.cuda.max_memory_allocated(self.device) - self._before if on_gpu else 0
        found.peak_so_far_bytes.append(peak)
        found.device_reserved_bytes.append(torch.cuda.memory_reserved(self.device) if on_gpu else 0)
        found.host_reserved_bytes.append(int(stats.get("host_bytes_reserved", 0)))

    def _read_memory(self) -> ProcessMemory:
        """With no batch but the longest, and no plan in the making."""
        join_planning()
        self._load(self._longest)
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
    low, high = _logarithms(shortest, longest)
    return [round(math.exp(draw.uniform(low, high))) for _ in range(count)]


def spread_lengths(draw: random.Random, count: int, shortest: int, longest: int) -> list[int]:
    """``count`` lengths from the shortest to the longest, each as many times the one before, in random order.

    Raises:
        ValueError: as there.
    """
    low, high = _logarithms(shortest, longest)
    found = [round(math.exp(low + (high - low) * i / max(count - 1, 1))) for i in range(count)]
    draw.shuffle(found)
    return found


def _logarithms(shortest: int, longest: int) -> tuple[float, float]:
    if not 1 <= shortest <= longest:
        raise ValueError(f"expected shortest to be from 1 to seq={longest}, found {shortest}")
    return math.log(shortest), math.log(longest)
