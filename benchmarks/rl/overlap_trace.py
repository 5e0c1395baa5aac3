"""Where the time of work went during which tensors leave and come, by one run under the profiler.

The profiler slows the host down: the comparison is with the same run without copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.copy_trace import Interval, busy_ms, span_ms
from benchmarks.rl.records import WhereTimeWent

WORK = "benchmark::work"
OURS = "fxoffload::"
CALLS = ("cuda", "cuMem")  # of the runtime, and of the driver what maps memory
# Calls that are not worth a row: less than that in all.
LEAST_MS = 1.0


def trace_work(work: Callable[[], object], device: torch.device) -> WhereTimeWent:
    """Run it once, under the profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        with record_function(WORK):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return summarize_work(profiler.events() or ())


def summarize_work(events: Iterable[Any]) -> WhereTimeWent:
    """Of the profiler's events."""
    kernels: list[Interval] = []
    collectives: list[Interval] = []
    copies: dict[str, list[Interval]] = defaultdict(list)
    ranges: list[Any] = []
    calls: list[Any] = []
    host: Any = None
    for event in events:
        interval = Interval(event.time_range.start, event.time_range.end)
        if event.device_type == DeviceType.CUDA:
            if event.name.startswith("Memcpy"):
                copies["up" if "HtoD" in event.name else "down" if "DtoH" in event.name else "within"].append(interval)
            elif event.name.startswith("nccl"):
                collectives.append(interval)
            elif not event.name.startswith(("Memset", "fxoffload::", "benchmark::", "##", "FSDP::")):
                kernels.append(interval)
        elif event.name == WORK:
            host = event
        elif event.name.startswith(OURS):
            ranges.append(event)
        elif event.name.startswith(CALLS):
            calls.append(event)
    began = host.time_range.start if host is not None else 0.0
    ended = host.time_range.end if host is not None else float("inf")
    calls = [call for call in calls if call.time_range.start < ended]  # not the wait after the work
    own = [r for r in ranges if host is not None and r.thread == host.thread]
    return WhereTimeWent(
        host_ms=span_ms([Interval(began, host.time_range.end)]) if host is not None else 0.0,
        until_first_kernel_ms=(min(k.start_us for k in kernels) - began) / 1e3 if kernels else None,
        until_last_kernel_ms=(max(k.end_us for k in kernels) - began) / 1e3 if kernels else None,
        kernels_ms=busy_ms(kernels),
        collectives_ms=busy_ms(collectives),
        device_busy_ms=busy_ms([*kernels, *collectives]),
        copies_ms={way: busy_ms(found) for way, found in sorted(copies.items())},
        ours_on_host_ms=busy_ms([Interval(r.time_range.start, r.time_range.end) for r in own]),
        ours_ms=_sums(ranges),
        cuda_calls_ms={name: ms for name, ms in _sums(calls).items() if ms >= LEAST_MS},
    )


def _sums(ranges: Iterable[Any]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for event in ranges:
        found[event.name] += (event.time_range.end - event.time_range.start) / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1]))
