"""The measurement of one variant in this process: the same phases for every scenario that runs steps."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

from benchmarks.activations.kinds import PEERS, is_sharded
from benchmarks.allocator_trace import trace_step
from benchmarks.collective_trace import trace_in_turn
from benchmarks.compile_profile import count_graphs, read_compile_times
from benchmarks.copy_trace import trace_copies
from benchmarks.gradients import digest_gradients
from benchmarks.gradients_compare import relative_differences
from benchmarks.idle_copies import IdleCopies
from benchmarks.offload import budget_bytes, read_stats, reset_stats, uses_fxoffload, without_copies
from benchmarks.phases import Phases, host_after, host_before
from benchmarks.plans import PlanWatch, join_planning
from benchmarks.rank_machine import measure_ranks
from benchmarks.schema import Request, Result
from benchmarks.steps import (
    Stepper,
    end_memory_window,
    measure_first_step,
    measure_timed_steps,
    measure_warmup,
    start_memory_window,
)

# Copies that nothing waits for go on this many times as long as a step: under the profiler it takes longer.
IDLE_COPIES = 1.1

GAUGES = ("host_bytes_reserved", "host_bytes_in_use", "num_groups_on_tape")


class Measurement:
    """Builds once, then each method is one phase."""

    def __init__(self, request: Request, result: Result, device: torch.device, build: Callable[[], Stepper]) -> None:
        self.request = request
        self.result = result
        self.device = device
        self._build = build
        self._stepper: Stepper | None = None

    @property
    def stepper(self) -> Stepper:
        if self._stepper is None:
            raise AssertionError("expected the build phase to have run before this one")
        return self._stepper

    def run(self, phases: Phases) -> None:
        protocol = self.request.protocol
        on_gpu = self.device.type == "cuda"
        phases.required("build", self.build)
        phases.required("first step", self.first_step)
        if protocol.num_processes > 1:
            phases.optional("ranks alone", self.measure_ranks)
        phases.optional("compile times", lambda: read_compile_times(self.result))
        phases.required("warm-up", self.warm_up)
        if protocol.calibration_steps and uses_fxoffload(self.request.variant):
            phases.required("plan", self.await_plan)
        phases.required("timed steps", self.timed_steps)
        if protocol.gradients and protocol.process_group != "fake":
            phases.optional("gradients", self.gradients)
        # FSDP writes gradients itself: none arrives where the trace looks for it.
        plain = protocol.ranks == 1 and not is_sharded(self.request.variant.kind)
        if protocol.allocator_trace and on_gpu and plain:
            phases.optional("allocator trace", self.trace_allocator)
        variant = self.request.variant
        if protocol.copy_trace and on_gpu and (uses_fxoffload(variant) or variant.kind in PEERS):
            phases.optional("copy trace", self.trace_copies)
        if protocol.copy_trace and on_gpu and protocol.ranks > 1 and not protocol.process_group:
            phases.optional("collective trace", self.trace_collectives)
        phases.optional("graph count", self.count_graphs)

    def build(self) -> None:
        self.result.budget_bytes = budget_bytes(self.request.variant)
        self._stepper = self._build()
        job = self._stepper.job
        job.allocate_gradients()
        leaves = job.leaves().values()
        self.result.parameter_bytes = sum(p.numel() * p.element_size() for p in job.module.parameters())
        self.result.gradient_buffer_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        warm_up_device(self.device)
        self.result.host = host_before()

    def first_step(self) -> None:
        reset_stats(self.request.variant)
        before = start_memory_window(self.device)
        try:
            measure_first_step(self.stepper, self.result)
        finally:
            self.result.first_step_memory = end_memory_window(self.device, before)
        self.result.stats_first_step = read_stats(self.request.variant)

    def measure_ranks(self) -> None:
        self.result.machine_by_rank = measure_ranks(self.request, self.device)

    def warm_up(self) -> None:
        measure_warmup(self.stepper, self.result, self.request.protocol)

    def await_plan(self) -> None:
        """Exactly ``calibration_steps`` more: all ranks must take as many, and a rank cannot see another's plan."""
        watch, result = PlanWatch(seen=()), self.result
        for index in range(self.request.protocol.calibration_steps):
            join_planning()
            if result.plan is None:
                result.plan = watch.freeze(index)
            result.losses.append(self.stepper.step().loss)
        if result.plan is not None:
            watch.freeze_calibrated(result.plan, self.request.protocol.calibration_steps)

    def timed_steps(self) -> None:
        gc.collect()
        reset_stats(self.request.variant)
        measure_timed_steps(self.stepper, self.result, self.request.protocol)
        stats = read_stats(self.request.variant)
        if stats is not None:
            steps = self.result.num_timed_steps
            self.result.stats_timed_steps = stats
            self.result.stats_per_step = {n: v if n in GAUGES else v / steps for n, v in stats.items()}
        if self.result.host is not None:
            host_after(self.result.host)

    def gradients(self) -> None:
        self.stepper.step()
        self.repeat_gradients()

    def repeat_gradients(self) -> None:
        """Those of the last step, which nothing has zeroed since, and those of one more with the same inputs: what the
        two differ by is what the kernels themselves leave open."""
        result, seed = self.result, self.request.case.seed
        result.gradients = digest_gradients(self.stepper.job, seed)
        self.stepper.step()
        again = digest_gradients(self.stepper.job, seed)
        result.gradient_repeat_differences = relative_differences(again, result.gradients)
        result.gradient_repeat_difference = max(result.gradient_repeat_differences.values(), default=0.0)

    def trace_allocator(self) -> None:
        self.result.traced_peak = trace_step(self.stepper)

    def count_graphs(self) -> None:
        self.result.num_graphs_at_end = count_graphs()

    def trace_collectives(self) -> None:
        """With the plan's copies; of fxoffload also without any, and with copies to the host that nothing waits for.
        (As many from the host would hold the step: FSDP's own small copies come after them.)"""
        result = self.result
        if result.step_ms is None or not uses_fxoffload(self.request.variant):
            result.collectives = trace_in_turn(self.stepper, {"plan": contextlib.nullcontext})["plan"]
            return
        idle = IdleCopies(self.device, down=True, up=False)
        ms = IDLE_COPIES * result.step_ms.median

        @contextlib.contextmanager
        def copies_down() -> Iterator[None]:
            with without_copies(), self.stepper.beginning_with(lambda: idle.queue(down=True, up=False, ms=ms)):
                yield

        ways = {"plan": contextlib.nullcontext, "none": without_copies, "down": copies_down}
        found = trace_in_turn(self.stepper, ways)
        result.collectives, result.collectives_without = found.pop("plan"), found.pop("none")
        result.collectives_idle = found

    def trace_copies(self) -> None:
        self.result.copies = trace_copies(self.stepper, self.request.variant)


def warm_up_device(device: torch.device) -> None:
    """Context, cuBLAS and its workspaces (one for each thread: autograd has its own) exist before the first step of any
    variant, and count for none."""
    if device.type == "cuda":
        square = torch.ones(256, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
        (square @ square).sum().backward()
        torch.cuda.synchronize(device)
