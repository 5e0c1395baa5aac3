"""The scenario ``rl-step``: rollout, log-probs, training and weight sync, by one strategy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from benchmarks.clock import synchronize
from benchmarks.phases import Phases
from benchmarks.rl.machine_memory import Stopwatch, free_bytes, give_back
from benchmarks.rl.make_strategy import make_strategy
from benchmarks.rl.ours import Fxoffload
from benchmarks.rl.process import RlProcess, spread
from benchmarks.rl.records import RlStep
from benchmarks.rl.weight_reader import WeightReader, full
from benchmarks.schema import Request, Result

MATMUL_SIZE = {"cuda": 8192, "cpu": 128}
PHASES = ("rollout", "logprob", "train", "sync")


class Rollout:
    """What stands for an engine's generation: a KV cache of the size asked for, written to, and matmuls.

    A fixed number of matmuls, so that all rollouts are the same work.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        size = MATMUL_SIZE[device.type]
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._square = torch.full((size, size), 1.0 / size, dtype=self._dtype, device=device)
        self._product = torch.empty_like(self._square)
        self._matmuls(3)
        synchronize(device)
        start = time.perf_counter()
        self._matmuls(10)
        synchronize(device)
        self.matmuls = int(seconds / ((time.perf_counter() - start) / 10)) + 1

    def run(self, kv_bytes: int) -> None:
        """The memory is allocated at once, as an engine's is, and goes back to the driver at the end."""
        cache = torch.empty(kv_bytes, dtype=torch.uint8, device=self._device)
        cache.fill_(1)
        self._matmuls(self.matmuls)
        synchronize(self._device)
        del cache
        give_back(self._device)

    def _matmuls(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._square, self._square, out=self._product)


class MeasureRlStep:
    """First the work alone, everything resident and a small cache; then whole steps with the strategy's switches."""

    def __init__(self, request: Request, device: torch.device, result: Result) -> None:
        self.process = RlProcess(request, device, result)
        self.device = device
        self.protocol = request.protocol

    def run(self, phases: Phases) -> None:
        phases.required("strategy", self._make_strategy)
        self.process.prepare(phases)
        phases.required("build", self.build)
        phases.required("alone", self.alone)
        phases.required("steps", self.steps)
        phases.optional("link", self.process.measure_link)
        phases.required("leave", self.process.leave)

    def _make_strategy(self) -> None:
        self.strategy = make_strategy(self.process.request.variant)

    def build(self) -> None:
        self.process.build(self.strategy)
        self.job = self.process.job
        self.found = self.process.rl.step = RlStep()
        before = self.process.free_before
        self.found.kv_bytes = int((before if before is not None else 1 << 26) * self.protocol.kv_fraction)
        self.rollout = Rollout(self.device, self.protocol.rollout_s)
        self.found.matmuls = self.rollout.matmuls
        self.reader = WeightReader(self.job)
        self.job.train_step()
        self.found.forwards = self.job.forwards_for(self.protocol.logprob_s)

    def alone(self) -> None:
        """Nothing moves; the cache is the rest of the device."""
        free = free_bytes(self.device)
        kv_bytes = self.found.kv_bytes if free is None else min(self.found.kv_bytes, free // 2)
        work: dict[str, Callable[[], object]] = {
            "rollout": lambda: self.rollout.run(kv_bytes),
            "logprob": lambda: self.job.logprobs(self.found.forwards),
            "train": self.job.train_step,
            "sync": lambda: self.reader.read(self._resident()),
        }
        self._step(work)
        rounds = [self._step(work) for _ in range(self.protocol.steps)]
        self.found.alone = spread([sum(times.values()) for times in rounds])
        self.found.phase_alone_s = _medians(rounds)

    def steps(self) -> None:
        """A first step, ``warmup`` more, then ``steps`` timed ones, of which none but the first begins after
        ``cycles_s`` seconds."""
        self.job.reshard()
        watch = Stopwatch(self.device)
        self.strategy.attach(self.job)
        attach_s = watch.seconds()
        work = {phase: self._with_switch(phase) for phase in PHASES}
        self.found.first_step_s = attach_s + sum(self._step(work).values())
        for _ in range(self.protocol.warmup):
            self._step(work)
        end = time.monotonic() + self.protocol.cycles_s
        rounds: list[dict[str, float]] = []
        while len(rounds) < self.protocol.steps and self.job.agreed(not rounds or time.monotonic() < end):
            rounds.append(self._step(work))
        step = self.found.step = spread([sum(times.values()) for times in rounds])
        self.found.phase_s = _medians(rounds)
        if self.found.alone is not None:
            self.found.switching_s = step.median - self.found.alone.median
            self.found.switching_share = self.found.switching_s / step.median

    def _with_switch(self, phase: str) -> Callable[[], object]:
        work: dict[str, Callable[[], object]] = {
            "rollout": lambda: self.rollout.run(self.found.kv_bytes),
            "logprob": lambda: self.job.logprobs(self.found.forwards),
            "train": self.job.train_step,
            "sync": self._sync,
        }

        def switch_and_work() -> None:
            self.strategy.enter(phase)
            work[phase]()

        return switch_and_work

    def _sync(self) -> None:
        if isinstance(self.strategy, Fxoffload):
            self.reader.read(self.strategy.stream(bucket_bytes=self.protocol.bucket))
        else:
            self.reader.read(self._resident())

    def _resident(self) -> Iterable[tuple[str, Tensor]]:
        self.job.reshard()
        return ((name, full(parameter.detach())) for name, parameter in self.job.model.named_parameters())

    def _step(self, work: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Seconds by phase. Between phases the host waits for its compute stream only: copies may go on."""
        self.job.barrier()
        times: dict[str, float] = {}
        for phase in PHASES:
            start = time.perf_counter()
            work[phase]()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            times[phase] = time.perf_counter() - start
        return times


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {phase: spread([times[phase] for times in rounds]).median for phase in PHASES}
