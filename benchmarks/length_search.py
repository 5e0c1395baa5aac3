"""The longest sequence that trains: whole training steps with AdamW, by bisection of the given lengths.

A step is ``zero_grad(set_to_none=True)``, forward, backward, ``AdamW(fused=True).step()``. The optimizer's states exist
before the first probe, as they do from a run's second step on. Weights change from step to step, by very little.

A length runs when ``1 + probe_steps`` steps of it do: fragmentation and late allocations show in the second.

A peer that changes the model for good has a process to itself for each of its lengths (see launch_lengths.py): memory
that it holds after running out would count against the next length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks import ranks
from benchmarks.activations.around import Around, around_step
from benchmarks.activations.available import NotAvailable
from benchmarks.activations.kinds import is_checkpointed, is_sharded
from benchmarks.bisection import bisect
from benchmarks.clock import new_clock, synchronize
from benchmarks.job import Job
from benchmarks.limits import empty_cache
from benchmarks.measure_plan import resolve
from benchmarks.offload import compile_module, read_stats, reset_stats, uses_fxoffload
from benchmarks.phases import Phases
from benchmarks.plans import PlanWatch
from benchmarks.schema import Probe, Request, Result, Variant
from benchmarks.single import set_checkpointing
from benchmarks.workloads import with_length

PHASES = ("forward", "backward", "optimizer")
LEARNING_RATE = 1e-6
NUM_LARGEST_BLOCKS = 8


class LengthSearch:
    """Probes of one variant."""

    def __init__(self, request: Request, result: Result, device: torch.device, job: Job) -> None:
        self.request = request
        self.result = result
        self.device = device
        self._job = job
        self._optimizer: torch.optim.Optimizer | None = None

    def run(self, phases: Phases) -> None:
        try:
            phases.required("model", self._prepare)
            self._search(phases)
        finally:
            ranks.close()

    def _prepare(self) -> None:
        """The optimizer's parameters are those that the variant leaves the model with."""
        if is_sharded(self.request.variant.kind):
            from benchmarks.activations import verl

            verl.join_and_shard(self.request, self._job, self.device)
        self._optimizer = _optimizer_with_states(self._job.module)

    def _search(self, phases: Phases) -> None:
        if self._optimizer is None:
            return
        lengths = self.request.variant.lengths or self.request.protocol.lengths
        for seq in bisect(lengths, self.request.protocol.probes, self._ran):
            self.result.probes.append(Probe(seq))
            phases.optional(f"{seq} tokens", lambda: self._probe(self.result.probes[-1]))
            if self.result.not_available:
                self.result.probes.pop()
                return
        if not any(probe.ran for probe in self.result.probes):
            self.result.failures.setdefault("search", "none of the lengths that were tried runs")

    def _ran(self, seq: int) -> bool:
        return any(probe.seq == seq and probe.ran for probe in self.result.probes)

    def _probe(self, probe: Probe) -> None:
        """One length. What fails is noted where it fails: it is the answer, not an error of the harness."""
        case = dataclasses.replace(self.request.case, seq=probe.seq)
        self._job.drop_gradients()
        torch._dynamo.reset()
        empty_cache(self.device)
        print(f"[benchmark] {self.request.variant.label}: {probe.seq} tokens", flush=True)
        job = with_length(self._job, case, self.device)
        watch = PlanWatch() if uses_fxoffload(self.request.variant) else None
        with _note_failure(probe, self.device):
            options = resolve(self.request, self.result, {}, self.device)
            variant = dataclasses.replace(self.request.variant, options=options)
            set_checkpointing(job.module, is_checkpointed(variant.kind))
            module = self._callable(job, variant)
            reset_stats(variant)
            assert self._optimizer is not None
            step = _Step(probe, job, module, self._optimizer, self.device, around_step(variant, job, self.device))
            self._steps(probe, step, watch)
            probe.stats = read_stats(variant)
            probe.ran = True
        if watch is not None and probe.plan is None:
            probe.plan = watch.freeze(0)
        gc.collect()

    def _callable(self, job: Job, variant: Variant) -> Callable[..., torch.Tensor]:
        if variant.kind == "titan":
            from benchmarks.activations import titan

            return titan.load_step(variant, self.device)(job)
        return compile_module(job.module, variant)

    def _steps(self, probe: Probe, step: _Step, watch: PlanWatch | None) -> None:
        with watch.timing() if watch is not None else contextlib.nullcontext():
            first = step.run()
            # The forward compiles; the rest is as in any other step.
            probe.first_step_ms, probe.phase_ms = sum(first), dict(zip(PHASES, first, strict=True))
        if watch is not None:
            probe.plan = watch.freeze(1)
        times = [step.run() for _ in range(self.request.protocol.probe_steps)]
        if times:
            fastest = min(times, key=sum)
            probe.step_ms = sum(fastest)
            probe.phase_ms = dict(zip(PHASES, fastest, strict=True))
        step.finish()


class _Step:
    """A training step; notes where it is, and the peak of each phase over all steps."""

    def __init__(
        self,
        probe: Probe,
        job: Job,
        module: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        around: Around,
    ) -> None:
        self._probe = probe
        self._job = job
        self._module = module
        self._optimizer = optimizer
        self._device = device
        self._around = around
        self._retries_before = self._num_retries()
        if device.type == "cuda":
            probe.allocated_before_bytes = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._max_reserved = 0

    def run(self) -> list[float]:
        """Milliseconds by phase."""
        self._optimizer.zero_grad(set_to_none=True)
        for tensor in self._job.inputs:
            tensor.grad = None
        synchronize(self._device)
        clock = new_clock(self._device)
        clock.mark()
        with self._around():
            with self._phase("forward"):
                loss = self._module(*self._job.inputs)
                clock.mark()
            with self._phase("backward"):
                loss.backward()
                clock.mark()
        with self._phase("optimizer"):
            self._optimizer.step()
            clock.mark()
        self._probe.loss = loss.item()
        self._probe.num_steps += 1
        return clock.gaps_ms()

    def finish(self) -> None:
        if self._device.type == "cuda":
            self._probe.peak_bytes = max(self._probe.phase_peak_bytes.values())
            self._probe.max_reserved_bytes = self._max_reserved
            self._probe.num_alloc_retries = self._num_retries() - self._retries_before

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """The counters are the host's: no waiting for the device."""
        self._probe.failed_in = name
        yield
        self._probe.failed_in = ""
        if self._device.type == "cuda":
            peaks = self._probe.phase_peak_bytes
            peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated(self._device))
            self._max_reserved = max(self._max_reserved, torch.cuda.max_memory_reserved(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)

    def _num_retries(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


def _optimizer_with_states(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW whose states exist, in the parameters' dtype. A step with zero gradients makes them."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


@contextlib.contextmanager
def _note_failure(probe: Probe, device: torch.device) -> Iterator[None]:
    """Notes an error, and the device's memory when it ran out, and goes on."""
    blocks: list[list[int]] = []
    observing = device.type == "cuda"
    if observing:
        _OBSERVERS.append(blocks)
        _attach_observer()
    try:
        yield
    except NotAvailable:
        raise  # of any length
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "no message")
        probe.reason = f"{type(error).__name__}: {first[:400]}"
        if blocks and isinstance(error, torch.cuda.OutOfMemoryError):
            probe.allocated_at_failure_bytes = blocks[0][0]
            probe.largest_blocks_at_failure = blocks[1:]
    finally:
        if observing:
            _OBSERVERS.remove(blocks)


# What an observer of the allocator's writes to; the observer itself cannot be detached.
_OBSERVERS: list[list[list[int]]] = []
_ATTACHED: list[bool] = []


def _attach_observer() -> None:
    """Have the blocks that are allocated when memory runs out listed: [allocated], then [bytes, how many] by total."""
    if _ATTACHED:
        return

    def observe(device: int, requested: int, total: int, free: int) -> None:
        # Called before the allocator gives up for good; the last call is what counts.
        for blocks in _OBSERVERS:
            blocks[:] = [[torch.cuda.memory_allocated(device)], *_largest_blocks(device)]

    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:
        attach(observe)
    _ATTACHED.append(True)


def _largest_blocks(device: int) -> list[list[int]]:
    sizes = Counter(
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    by_total = sorted(sizes.items(), key=lambda item: -item[0] * item[1])
    return [[size, count] for size, count in by_total[:NUM_LARGEST_BLOCKS]]
