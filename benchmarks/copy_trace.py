"""How fast the copies of a step ran, from the profiler's memcpy records: the copy engines' times, not the step's."""

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.offload import read_stats, reset_stats
from benchmarks.schema import Copies, Variant
from benchmarks.steps import Stepper


@dataclass(frozen=True)
class Interval:
    start_us: float
    end_us: float


def way_of_copy(name: str) -> str | None:
    """Of a profiler's record: "down" to the host, "up" from it; None: it is neither."""
    if not name.startswith("Memcpy"):
        return None
    return "down" if "DtoH" in name else "up" if "HtoD" in name else None


def trace_copies(stepper: Stepper, variant: Variant) -> Copies:
    """One extra step. Bytes are fxoffload's count for it, of a peer those of all memcpy records; times are CUPTI's."""
    stepper.step()
    reset_stats(variant)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        stepper.step()
        torch.cuda.synchronize()
    counted = read_stats(variant)
    stats = counted or _copied_bytes(profiler)
    down: list[Interval] = []
    up: list[Interval] = []
    for event in profiler.events() or ():
        if (way := way_of_copy(event.name)) is not None:
            copies = down if way == "down" else up
            copies.append(Interval(event.time_range.start, event.time_range.end))
    # A peer that only checkpoints copies its loss down and nothing up.
    if counted and counted["bytes_offloaded"] and not (down and up):
        raise RuntimeError(f"the profiler recorded {len(down)} copies down and {len(up)} up, but bytes were offloaded")
    return summarize_copies(down, up, int(stats["bytes_offloaded"]), int(stats["bytes_reloaded"]))


def _copied_bytes(profiler: profile) -> dict[str, float]:
    """What a peer moved. Only the exported trace has the sizes."""
    with tempfile.TemporaryDirectory(prefix="fxoffload-copies-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return sum_copies(json.loads(path.read_text()))


def sum_copies(trace: Mapping[str, Any]) -> dict[str, float]:
    """Bytes down and up of a Chrome trace's memcpy records, under the names of fxoffload's counters."""
    copied = {"DtoH": 0.0, "HtoD": 0.0}
    for event in trace.get("traceEvents", ()):
        if event.get("cat") == "gpu_memcpy":
            for way in copied:
                if way in event["name"]:
                    copied[way] += event.get("args", {}).get("bytes", 0)
    return {"bytes_offloaded": copied["DtoH"], "bytes_reloaded": copied["HtoD"]}


def summarize_copies(down: list[Interval], up: list[Interval], d2h_bytes: int, h2d_bytes: int) -> Copies:
    """Busy time is the union of the copies of a direction, span is from the first start to the last end."""
    d2h_ms, h2d_ms = busy_ms(down), busy_ms(up)
    return Copies(
        d2h_bytes=d2h_bytes,
        h2d_bytes=h2d_bytes,
        d2h_count=len(down),
        h2d_count=len(up),
        d2h_busy_ms=d2h_ms,
        h2d_busy_ms=h2d_ms,
        d2h_span_ms=span_ms(down),
        h2d_span_ms=span_ms(up),
        d2h_gb_per_s=d2h_bytes / d2h_ms / 1e6 if d2h_ms else 0.0,
        h2d_gb_per_s=h2d_bytes / h2d_ms / 1e6 if h2d_ms else 0.0,
    )


def busy_ms(intervals: Iterable[Interval]) -> float:
    """Time in which at least one of the intervals ran."""
    total = 0.0
    reached = float("-inf")
    for interval in sorted(intervals, key=lambda i: i.start_us):
        total += max(0.0, interval.end_us - max(interval.start_us, reached))
        reached = max(reached, interval.end_us)
    return total / 1e3


def span_ms(intervals: list[Interval]) -> float:
    if not intervals:
        return 0.0
    return (max(i.end_us for i in intervals) - min(i.start_us for i in intervals)) / 1e3
