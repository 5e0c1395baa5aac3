"""Runs and times steps of a job. A step is forward and backward; gradients are zeroed in place before it, untimed."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.clock import Clock, StepTime, new_clock, synchronize
from benchmarks.job import Job
from benchmarks.quartiles import summarize
from benchmarks.schema import Memory, Protocol, Result


class HostTime(NamedTuple):
    """A step on the host's clock, in seconds: until ``backward`` returned (``host_s``, and the forward's part of it).
    Also the processor time of all threads until then, and the wait for the device after it."""

    host_s: float
    forward_s: float
    cpu_s: float
    tail_s: float


class Stepper:
    """One compiled callable with its job. The device is idle before and after each ``step``.

    ``around`` gives the context of one step, forward and backward (saved-tensor hooks of a peer).
    """

    def __init__(
        self,
        job: Job,
        callable_module: Callable[..., torch.Tensor],
        device: torch.device,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.job = job
        self.device = device
        self._module = callable_module
        self._around = around
        self._begin: Callable[[], None] | None = None

    @contextlib.contextmanager
    def beginning_with(self, begin: Callable[[], None]) -> Iterator[None]:
        """Steps call it first, when the device is idle."""
        self._begin = begin
        try:
            yield
        finally:
            self._begin = None

    def step(self) -> StepTime:
        self.job.zero_gradients()
        synchronize(self.device)
        if self._begin is not None:
            self._begin()
        clock = new_clock(self.device)
        start = time.perf_counter()
        loss = self.launch(clock)
        synchronize(self.device)
        forward_ms, backward_ms, optimizer_ms = clock.gaps_ms()
        host_wall_ms = (time.perf_counter() - start) * 1e3
        return StepTime(forward_ms, backward_ms, host_wall_ms, loss.item(), optimizer_ms)

    def launch(self, clock: Clock) -> torch.Tensor:
        """One step, with marks before its forward, its backward and its optimizer, and after that: its loss."""
        clock.mark()
        with self._around():
            loss = self._module(*self.job.inputs)
            clock.mark()
            loss.backward()
        clock.mark()
        self.job.finish_step()
        clock.mark()
        return loss.detach()

    def steps(self, count: int) -> list[StepTime]:
        """Those that a measurement times."""
        return [self.step() for _ in range(count)]

    def host_step(self) -> HostTime:
        """A step as the host sees it: it is not stopped between forward and backward, nor before the clock is read."""
        self.job.zero_gradients()
        synchronize(self.device)
        cpu, start = time.process_time(), time.perf_counter()
        with self._around():
            loss = self._module(*self.job.inputs)
            forward_end = time.perf_counter()
            loss.backward()
        end, cpu_end = time.perf_counter(), time.process_time()
        synchronize(self.device)
        return HostTime(end - start, forward_end - start, cpu_end - cpu, time.perf_counter() - end)


def measure_first_step(stepper: Stepper, result: Result) -> None:
    """The call that compiles, on the host's clock: tracing and compilation are host work."""
    time_of_step = stepper.step()
    result.first_step_ms = time_of_step.host_wall_ms
    result.losses.append(time_of_step.loss)


def measure_warmup(stepper: Stepper, result: Result, protocol: Protocol) -> None:
    second = stepper.step()
    result.second_step_ms = second.host_wall_ms
    result.losses.append(second.loss)
    for _ in range(protocol.warmup):
        result.losses.append(stepper.step().loss)


def measure_timed_steps(stepper: Stepper, result: Result, protocol: Protocol) -> None:
    """Times, and the peak over all timed steps above the bytes before the first of them."""
    stepper.job.zero_gradients()
    before = start_memory_window(stepper.device)
    times = stepper.steps(protocol.steps)
    result.memory = end_memory_window(stepper.device, before)
    result.num_timed_steps = len(times)
    result.step_ms = summarize([t.step_ms for t in times])
    result.forward_ms = summarize([t.forward_ms for t in times])
    result.backward_ms = summarize([t.backward_ms for t in times])
    result.host_wall_ms = summarize([t.host_wall_ms for t in times])
    result.losses += [t.loss for t in times]
    if result.first_step_ms is not None:
        result.compile_s = (result.first_step_ms - result.host_wall_ms.median) / 1e3


def start_memory_window(device: torch.device) -> int:
    """Bytes allocated now; the peak counters start here."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def end_memory_window(device: torch.device, before_bytes: int) -> Memory | None:
    """None on a CPU: its allocator counts nothing, and a process's RSS is not a peak of tensors."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    statistics = torch.cuda.memory_stats(device)
    return Memory(
        before_bytes=before_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(device) - before_bytes,
        max_reserved_bytes=torch.cuda.max_memory_reserved(device),
        num_alloc_retries=int(statistics.get("num_alloc_retries", 0)),
        num_ooms=int(statistics.get("num_ooms", 0)),
    )
