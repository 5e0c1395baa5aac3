"""The scenario ``pinning``: how fast host memory is faulted in and registered, and what it competes with.

Rows as in results/2026-11-22-h200-pinning.json. ``touch`` says who faults the pages in before they are registered:
"first" (all of them, by all threads, before any is registered), "own" (each chunk by the thread that registers it),
"page" (as own, one byte of each page), "none" (the driver does, while it registers).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.phases import Phases
from benchmarks.rl.host_pages import Mapping, Registrar, in_threads, touch, touch_pages
from benchmarks.rl.records import RlResult
from benchmarks.schema import Request, Result

MIB = 1 << 20
# (threads, MiB of a chunk, who touches); the threads beyond the machine's cores are left out.
ROWS = (
    (1, 1024, "first"),
    (1, 1024, "none"),
    (4, 256, "first"),
    (8, 256, "first"),
    (16, 256, "first"),
    (8, 256, "own"),
    (16, 128, "own"),
    (16, 256, "none"),
    (16, 128, "page"),
)
STAGED_THREADS = (4, 8, 16)
STAGE_MIB = 32
RESIZES = (2, 16, 64)
NUM_RESIZED = 200


class MeasurePinning:
    """``huge`` and ``small``: registration with MADV_HUGEPAGE and without; ``staged``: the alternative, copies through
    small pinned buffers into plain memory; ``resize``: what freeing and allocating device storages takes."""

    def __init__(self, request: Request, device: torch.device, result: Result) -> None:
        self.request, self.device = request, device
        self.rl = result.rl = RlResult()
        self.cores = len(os.sched_getaffinity(0))
        self.nbytes = int(request.protocol.pin_gib * (1 << 30))

    def run(self, phases: Phases) -> None:
        kind = self.request.variant.kind
        phases.required(kind, {"staged": self.staged, "resize": self.resizes}.get(kind, self.registrations))

    def registrations(self) -> None:
        huge = self.request.variant.kind == "huge"
        for threads, chunk_mib, who in ROWS:
            if threads <= max(self.cores, 1):
                # One thread takes seconds for what sixteen do at once.
                nbytes = self.nbytes // 2 if threads == 1 else self.nbytes
                self.rl.pinning.append(self._registration(nbytes, huge, threads, chunk_mib, who))

    def _registration(self, nbytes: int, huge: bool, threads: int, chunk_mib: int, who: str) -> dict[str, Any]:
        mapping, registrar = Mapping(nbytes, huge=huge), Registrar(self.device)
        chunks = mapping.chunks(chunk_mib * MIB)
        touching = {"own": touch, "page": touch_pages}.get(who)

        def pin(address: int, size: int) -> None:
            if touching is not None:
                touching(address, size)
            registrar.register(address, size)

        touched = _seconds(lambda: in_threads(threads, touch, chunks)) if who == "first" else None
        registered = _seconds(lambda: in_threads(threads, pin, chunks))
        unregistered = _seconds(lambda: in_threads(threads, registrar.unregister, chunks))
        mapping.close()
        row = {"gib": nbytes / (1 << 30), "huge": huge, "threads": threads, "chunk_mib": chunk_mib, "touch": who}
        row["touch_gbs"] = nbytes / 1e9 / touched if touched is not None else None
        row["register_gbs"] = nbytes / 1e9 / registered
        row["all_gbs"] = nbytes / 1e9 / (registered + (touched or 0.0))
        row["unregister_gbs"] = nbytes / 1e9 / unregistered
        return {**row, "bad": registrar.num_failures}

    def staged(self) -> None:
        for huge in (True, False):
            for threads in STAGED_THREADS:
                if threads <= max(self.cores, 1):
                    self._staged(huge, threads)

    def _staged(self, huge: bool, threads: int) -> None:
        """Each thread has a pinned buffer, which the device fills and the thread empties; then the same again, into
        pages that are there by now."""
        mapping = Mapping(self.nbytes, huge=huge)
        source = torch.empty(STAGE_MIB * MIB, dtype=torch.uint8, device=self.device)
        local = threading.local()

        def through(address: int, size: int) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = torch.empty(STAGE_MIB * MIB, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
                local.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
            if local.stream is not None:
                with torch.cuda.stream(local.stream):
                    local.buffer[:size].copy_(source[:size], non_blocking=True)
                local.stream.synchronize()
            _memmove(address, local.buffer.data_ptr(), size)

        chunks = mapping.chunks(STAGE_MIB * MIB)
        for name in (True, "again"):
            seconds = _seconds(lambda: in_threads(threads, through, chunks))
            row = {"staged": name, "huge": huge, "threads": threads, "gbs": self.nbytes / 1e9 / seconds}
            self.rl.pinning.append(row)
        mapping.close()

    def resizes(self) -> None:
        for size_mib in RESIZES:
            count = NUM_RESIZED if self.device.type == "cuda" else 4
            blocks = [torch.empty(size_mib * MIB, dtype=torch.uint8, device=self.device) for _ in range(count)]
            storages = [block.untyped_storage() for block in blocks]
            row: dict[str, Any] = {"resize_mib": size_mib, "n": count}
            row["free_ms"] = 1e3 * _seconds(lambda s=storages: [storage.resize_(0) for storage in s])
            row["empty_ms"] = 1e3 * _seconds(self._empty_cache)
            nbytes = size_mib * MIB
            row["alloc_ms"] = 1e3 * _seconds(lambda s=storages, n=nbytes: [storage.resize_(n) for storage in s])
            self.rl.pinning.append(row)
            del blocks, storages
            self._empty_cache()

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def _memmove(target: int, source: int, nbytes: int) -> None:
    import ctypes

    ctypes.memmove(target, source, nbytes)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
