"""How long the collectives of a step ran, from the profiler's records of NCCL's kernels."""

import re
import statistics
from collections.abc import Iterable
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.copy_trace import Interval, busy_ms
from benchmarks.schema import Collective
from benchmarks.steps import Stepper

# ncclDevKernel_AllGather_RING_LL(...), ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...), ncclKernel_AllReduce_...
_KERNEL = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)")


class TimeRange(Protocol):
    start: float
    end: float


class Event(Protocol):
    """Of the profiler; microseconds."""

    @property
    def name(self) -> str: ...
    @property
    def time_range(self) -> TimeRange: ...


def trace_collectives(stepper: Stepper) -> dict[str, Collective]:
    """One extra step; all ranks take it. By kind of collective."""
    stepper.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        stepper.step()
        torch.cuda.synchronize()
    return summarize_collectives(profiler.events() or ())


def _lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def summarize_collectives(events: Iterable[Event]) -> dict[str, Collective]:
    """A kernel runs from the moment its own rank starts it: what it waits for its peers is in its time."""
    found: dict[str, list[Interval]] = {}
    for event in events:
        if named := _KERNEL.match(event.name):
            found.setdefault(named[1], []).append(Interval(event.time_range.start, event.time_range.end))
    return {
        kind: Collective(
            count=len(kernels),
            kernel_ms=sum(k.end_us - k.start_us for k in kernels) / 1e3,
            busy_ms=busy_ms(kernels),
            lower_quartile_ms=_lower_quartile([(k.end_us - k.start_us) / 1e3 for k in kernels]),
        )
        for kind, kernels in sorted(found.items())
    }
