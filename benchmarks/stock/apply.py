"""A variant applied to a stock model: compiled whole on one device, or layer by layer under FSDP2."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxoffload
from benchmarks.clock import Clock, StepTime, new_clock, synchronize
from benchmarks.job import Job
from benchmarks.offload import apply_settings, compile_arguments, compile_module
from benchmarks.schema import Request, Variant
from benchmarks.steps import Stepper
from benchmarks.stock.models import CHECKPOINTING
from benchmarks.stock.records import StepFact
from benchmarks.stock.workload import StockJob, StockModule, build_stock_job
from benchmarks.workloads import decoder_layers

KINDS = ("eager", "inductor", "checkpoint", "keep_all", "offload_all", "auto", "torch_budget")


# The device is busy for so long when a row of steps begins, as it is with AdamW in a loop.
_HOST_AHEAD_CYCLES = 20_000_000  # some 10 ms


# Steps in a row before those that count: host memory that no step needs any more goes in them. With 8, RL took
# 309.5 ms for 292.9, since 4.8 GB still went; with 20, 354 ms within its smallest budget, and 344 from the 27th step on
# (H200, 2026-11-30).
_UNCOUNTED = 32


class StockStepper(Stepper):
    """Writes down every step. Steps follow one another, as in a training loop. A device that idles before a step is
    faster in it: by 4 % in a backward, with 25 ms of 380 (H200, 2026-11-29)."""

    def __init__(self, job: Job, module: StockModule, device: torch.device) -> None:
        super().__init__(job, module, device)
        self.facts: list[StepFact] = []
        self._last_end: Clock | None = None  # of the step before

    def step(self) -> StepTime:
        return self.row(1)[0]

    def steps(self, count: int) -> list[StepTime]:
        """In a row, after some that do not count."""

        def begins(index: int) -> None:
            if index == _UNCOUNTED:
                fxoffload.reset_stats()

        found = self.row(_UNCOUNTED + count, begins, counts_peaks=False)[_UNCOUNTED:]
        del self.facts[-_UNCOUNTED - count : -count]
        return found

    def row(
        self, most: int, begins: Callable[[int], bool | None] = lambda index: None, *, counts_peaks: bool = True
    ) -> list[StepTime]:
        """Steps that the host launches while the device runs the one before.

        Args:
            most: steps of the row.
            begins: called before each, with its place in the row. The row ends where it returns True.
            counts_peaks: whether each step begins with new counters of the allocator's peak. It is read when the step
                was launched, above the bytes at the beginning of the row.
        """
        row: list[_Launched] = []
        counts_peaks = counts_peaks and self.device.type == "cuda"
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda._sleep(_HOST_AHEAD_CYCLES)
        before = None
        for index in range(most):
            if begins(index):
                break
            self.job.zero_gradients()
            if self._begin is not None:
                self._begin()
            if counts_peaks:
                torch.cuda.reset_peak_memory_stats(self.device)
                before = torch.cuda.memory_allocated(self.device) if before is None else before
            row.append(self._launch())
            if before is not None:
                row[-1].fact.peak_bytes = torch.cuda.max_memory_allocated(self.device) - before
            if index:
                row[-2].finish()
        for last in row[-1:]:
            last.finish()
        # Reading a loss waits for all that was launched.
        return [StepTime(f.forward_ms, f.backward_ms, f.wall_ms, loss.item(), f.optimizer_ms) for f, *_, loss in row]

    def _launch(self) -> _Launched:
        start, clock, idle = time.perf_counter(), new_clock(self.device), self._last_end
        if idle is not None:
            idle.mark()
        loss = self.launch(clock)
        self._last_end = new_clock(self.device)
        self._last_end.mark()
        fact = StepFact(0.0, 0.0, 0.0, 0.0)
        self.facts.append(fact)
        return _Launched(fact, clock, idle, start, loss)


class _Launched(NamedTuple):
    """A step whose times are not known yet. ``start``: on the host's clock."""

    fact: StepFact
    clock: Clock
    idle: Clock | None
    start: float
    loss: torch.Tensor

    def finish(self) -> None:
        """Wait until the device has ended it, and write its fact."""
        fact, (forward, backward, optimizer) = self.fact, self.clock.gaps_ms()
        fact.forward_ms, fact.backward_ms, fact.optimizer_ms = forward, backward, optimizer
        if self.idle is None:
            fact.wall_ms = (time.perf_counter() - self.start) * 1e3
        else:
            (fact.idle_ms,) = self.idle.gaps_ms()
            fact.wall_ms = fact.idle_ms + forward + backward + optimizer


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
        # Transformers leaves its hook where PEFT's model is around its own, and the hook breaks LoRA's graph.
        model.disable_input_require_grads()  # type: ignore[operator]


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
