"""How long the collectives of a step ran, from the profiler's records of NCCL's kernels."""

import contextlib
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.copy_trace import Interval, busy_ms, way_of_copy
from benchmarks.schema import Collective
from benchmarks.steps import Stepper

# Under the profiler. In one step a rank may come late to many, and other kernels run during each collective.
STEPS = 3
# Ways of taking steps in turn, so that whatever else changes on the machine falls on all of them.
ROUNDS = 4

# ncclDevKernel_AllGather_RING_LL(...), ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...), ncclKernel_AllReduce_...
KERNEL = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)")


class TimeRange(Protocol):
    start: float
    end: float


class Event(Protocol):
    """Of the profiler; microseconds."""

    @property
    def name(self) -> str: ...
    @property
    def time_range(self) -> TimeRange: ...


def trace_collectives(stepper: Stepper) -> list[Event]:
    """``STEPS`` extra steps; all ranks take them. NCCL's kernels, and copies from and to the host."""
    stepper.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            stepper.step()
        torch.cuda.synchronize()
    return [e for e in profiler.events() or () if KERNEL.match(e.name) or way_of_copy(e.name)]


StepsContext = Callable[[], contextlib.AbstractContextManager[None]]


def trace_in_turn(stepper: Stepper, ways: Mapping[str, StepsContext]) -> dict[str, dict[str, Collective]]:
    """The collectives of several ways of taking the same steps: by way, and by kind.

    Args:
        ways: by name, the context of their steps.
    """
    traces: dict[str, list[list[Event]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, context in ways.items():
            with context():
                traces[way].append(trace_collectives(stepper))
    return {way: summarize_collectives(found, STEPS) for way, found in traces.items()}


def _lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def summarize_collectives(traces: Sequence[Iterable[Event]], steps: int = 1) -> dict[str, Collective]:
    """Of traces of several steps each; times count from a trace's own beginning. A kernel runs from the moment its own
    rank starts it: its wait for its peers is in its time."""
    found: dict[str, list[list[Interval]]] = {}
    copies: list[list[Interval]] = [[] for _ in traces]
    for i, trace in enumerate(traces):
        for event in trace:
            if way_of_copy(event.name):
                copies[i].append(Interval(event.time_range.start, event.time_range.end))
            elif named := KERNEL.match(event.name):
                kernels = found.setdefault(named[1], [[] for _ in traces])[i]
                kernels.append(Interval(event.time_range.start, event.time_range.end))
    summary, steps = {}, steps * len(traces)
    for kind, by_trace in sorted(found.items()):
        in_order = [k for kernels in by_trace for k in sorted(kernels, key=lambda k: k.start_us)]
        each_ms = [(k.end_us - k.start_us) / 1e3 for k in in_order]
        summary[kind] = Collective(
            count=len(each_ms) / steps,
            kernel_ms=sum(each_ms) / steps,
            busy_ms=sum(map(busy_ms, by_trace)) / steps,
            lower_quartile_ms=_lower_quartile(each_ms),
            each_ms=each_ms,
            beside_copies=_part_beside(by_trace, copies),
        )
    return summary


def _part_beside(kernels: Sequence[list[Interval]], copies: Sequence[list[Interval]]) -> float:
    """The part of the kernels' time in which copies ran too: all but what kernels add to the time of copies."""
    ran = sum(map(busy_ms, kernels))
    alone = sum(busy_ms(ours + theirs) - busy_ms(theirs) for ours, theirs in zip(kernels, copies, strict=True))
    return 1 - alone / ran if ran else 0.0
