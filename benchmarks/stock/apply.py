"""A variant applied to a stock model: compiled whole on one device, or layer by layer under FSDP2."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxoffload
from benchmarks.clock import Clock, StepTime, new_clock
from benchmarks.job import Job
from benchmarks.offload import apply_settings, compile_arguments, compile_module
from benchmarks.schema import Request, Variant
from benchmarks.steps import Stepper, end_memory_window, start_memory_window
from benchmarks.stock.models import CHECKPOINTING
from benchmarks.stock.records import StepFact
from benchmarks.stock.workload import StockJob, StockModule, build_stock_job
from benchmarks.workloads import decoder_layers

KINDS = ("eager", "inductor", "checkpoint", "keep_all", "offload_all", "auto", "torch_budget")


# The device is busy for so long when a step begins, as it is with AdamW in a loop that seldom reads the loss.
_HOST_AHEAD_CYCLES = 20_000_000  # some 10 ms


# Steps in a row before those that count: host memory that no step needs any more goes in the first ones.
_UNCOUNTED = 8


class StockStepper(Stepper):
    """Writes down every step. Timed steps follow one another, as in a training loop. The others begin with an idle
    device and new counters of the allocator's peak."""

    def __init__(self, job: Job, module: StockModule, device: torch.device) -> None:
        super().__init__(job, module, device)
        self.facts: list[StepFact] = []
        self._idle: Clock | None = None  # since the step before
        self._begin = self._begin_step

    def _begin_step(self) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(_HOST_AHEAD_CYCLES)
        if self._idle is not None:
            self._idle.mark()

    def step(self) -> StepTime:
        self.job.zero_gradients()
        before = start_memory_window(self.device)
        found = super().step()
        idle_ms = None if self._idle is None else self._idle.gaps_ms()[0]
        self._idle = new_clock(self.device)
        self._idle.mark()
        memory = end_memory_window(self.device, before)
        peak = memory.peak_bytes if memory is not None else None
        fact = StepFact(found.forward_ms, found.backward_ms, found.optimizer_ms, found.host_wall_ms, peak, idle_ms)
        self.facts.append(fact)
        return found

    def steps(self, count: int) -> list[StepTime]:
        """In a row, after some that do not count: nothing waits for the device until all were launched."""
        clock, start, losses = new_clock(self.device), 0.0, []
        self._idle = None
        self._begin_step()
        for index in range(_UNCOUNTED + count):
            if index == _UNCOUNTED:
                start = time.perf_counter()
                fxoffload.reset_stats()
            self.job.zero_gradients()
            losses.append(self.launch(clock))
        gaps = clock.gaps_ms()
        wall_ms = (time.perf_counter() - start) * 1e3 / count
        found = []
        for at in range(_UNCOUNTED, _UNCOUNTED + count):
            idle, forward, backward, optimizer = gaps[4 * at - 1 : 4 * at + 3]
            found.append(StepTime(forward, backward, wall_ms, losses[at].item(), optimizer))
            self.facts.append(StepFact(forward, backward, optimizer, wall_ms, idle_ms=idle))
        return found


def apply_stock(request: Request, variant: Variant, job: Job, device: torch.device) -> StockStepper:
    """The model itself is compiled, as users do it; the loss of RL stays in eager code.

    Where the case has checkpointing on, all variants but plain Inductor have it.

    Raises:
        ValueError: a peer, which these scenarios do not run.
    """
    module = _module_of(job)
    _check(variant)
    wanted = variant.kind == "checkpoint" or (request.case.form == CHECKPOINTING and variant.kind != "inductor")
    set_checkpointing(module.decoder, wanted)
    module.call = compile_module(module.decoder, variant)
    return StockStepper(job, module, device)


def set_checkpointing(model: nn.Module, on: bool) -> None:
    """Hugging Face's, with its defaults."""
    if on:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    elif model.is_gradient_checkpointing:
        disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        disable()  # type: ignore[operator]


def build_sharded(request: Request, device: torch.device) -> StockStepper:
    """FSDP2 per layer, each layer compiled on its own; embedding, head and loss in eager code.

    ``checkpoint`` is inside the compiled layer, as in the scenario ``fsdp``.
    """
    variant = request.variant
    _check(variant)
    apply_settings(variant)
    job = build_stock_job(request.case, device, request.rank)
    layers = decoder_layers(job.module)
    mesh = init_device_mesh(device.type, (request.protocol.ranks,))
    arguments = compile_arguments(variant)
    for index, layer in enumerate(list(layers)):
        block: nn.Module = layer
        if variant.kind == "checkpoint":
            block = checkpoint_wrapper(layer)
            layers[index] = block
        if arguments is not None:
            block.compile(**arguments)
        fully_shard(block, mesh=mesh)
    module = _module_of(job)
    fully_shard(module.decoder, mesh=mesh)
    return StockStepper(job, module, device)


def _module_of(job: Job) -> StockModule:
    if not isinstance(job, StockJob) or not isinstance(job.module, StockModule):
        raise AssertionError(f"expected the job of a stock model, found {type(job).__name__}")
    return job.module


def _check(variant: Variant) -> None:
    if variant.kind not in KINDS:
        raise ValueError(f"stock models run as {', '.join(KINDS)}; found {variant.kind}")
