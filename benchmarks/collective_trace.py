"""How long the collectives of a step ran, from the profiler's records of NCCL's kernels."""

import contextlib
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.copy_trace import Interval, busy_ms
from benchmarks.schema import Collective
from benchmarks.steps import Stepper

# Under the profiler. In one step a rank may come late to many.
STEPS = 3
# With and without copies in turn, so that whatever else changes on the machine falls on both.
ROUNDS = 2

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
    """``STEPS`` extra steps; all ranks take them. NCCL's kernels."""
    stepper.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            stepper.step()
        torch.cuda.synchronize()
    return [event for event in profiler.events() or () if KERNEL.match(event.name)]


def trace_with_and_without(
    stepper: Stepper, without_copies: Callable[[], contextlib.AbstractContextManager[None]] | None
) -> tuple[dict[str, Collective], dict[str, Collective]]:
    """By kind of collective; and the same of steps in which nothing is copied, where they can be had.

    Args:
        without_copies: a context in which the steps move nothing.
    """
    beside: list[Event] = []
    alone: list[Event] = []
    for _ in range(ROUNDS):
        beside += trace_collectives(stepper)
        if without_copies is not None:
            with without_copies():
                alone += trace_collectives(stepper)
    return summarize_collectives(beside, ROUNDS * STEPS), summarize_collectives(alone, ROUNDS * STEPS)


def _lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def all_there_ms(by_rank: Sequence[Mapping[str, Collective]]) -> dict[str, float]:
    """What collectives took once all ranks had come to them, by kind: see ``Collective``. All ranks make the same ones.
    Kinds of which a rank saw another number are left out."""
    found = {}
    for kind, mine in by_rank[0].items():
        peers = [ours[kind] for ours in by_rank if kind in ours]
        if mine.count and len(peers) == len(by_rank) and len({len(peer.each_ms) for peer in peers}) == 1:
            shortest = map(min, zip(*(peer.each_ms for peer in peers), strict=True))
            found[kind] = sum(shortest) * mine.count / len(mine.each_ms)
    return found


def summarize_collectives(events: Iterable[Event], steps: int = 1) -> dict[str, Collective]:
    """Of so many steps. A kernel runs from the moment its own rank starts it: what it waits for its peers is in its
    time."""
    found: dict[str, list[Interval]] = {}
    for event in events:
        if named := KERNEL.match(event.name):
            found.setdefault(named[1], []).append(Interval(event.time_range.start, event.time_range.end))
    summary = {}
    for kind, kernels in sorted(found.items()):
        each_ms = [(k.end_us - k.start_us) / 1e3 for k in sorted(kernels, key=lambda k: k.start_us)]
        summary[kind] = Collective(
            count=len(each_ms) / steps,
            kernel_ms=sum(each_ms) / steps,
            busy_ms=busy_ms(kernels) / steps,
            lower_quartile_ms=_lower_quartile(each_ms),
            each_ms=each_ms,
        )
    return summary
