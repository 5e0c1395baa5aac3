"""Memory as the driver, the process and the pinned allocators see it; None where there is no such view."""

from __future__ import annotations

import gc
import time

import psutil
import torch

from benchmarks.clock import synchronize


def free_bytes(device: torch.device) -> int | None:
    """Free device memory as the driver sees it, once nothing is cached that could be given back."""
    if device.type != "cuda":
        return None
    gc.collect()
    give_back(device)
    return torch.cuda.mem_get_info(device)[0]


def give_back(device: torch.device) -> None:
    """The cache of torch's allocator goes back to the driver. No garbage collection: this is timed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def reserved_bytes(device: torch.device) -> int | None:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def rss_bytes() -> int:
    return psutil.Process().memory_info().rss


def torch_pinned_bytes() -> int | None:
    """What torch's caching host allocator has from the driver, rounded up as it rounds."""
    if not torch.cuda.is_available():
        return None
    stats = torch.cuda.host_memory_stats()
    found = [stats[name] for name in ("reserved_bytes.current", "allocated_bytes.current") if name in stats]
    return int(max(found)) if found else None


def difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


class Stopwatch:
    """Host seconds between two moments in which the device is idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        synchronize(device)
        self._start = time.perf_counter()

    def seconds(self) -> float:
        synchronize(self._device)
        return time.perf_counter() - self._start
