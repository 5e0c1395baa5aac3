"""The scenario ``pinning``: how fast host memory is faulted in and registered, and the competing work.

Rows as in results/2026-11-22-h200-pinning.json. ``touch`` says who faults the pages in before they are registered.
"first": all of them, by all threads, before any is registered. "own": each chunk by the thread that registers it.
"page": as own, one byte of each page. "none": the driver does, while it registers.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.phases import Phases
from benchmarks.rl.host_pages import Mapping, Registrar, in_threads, touch, touch_pages
from benchmarks.rl.measure_small_copies import measure_small_copies
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
# Storages that are allocated again, and for how many MiB the driver is asked at once; 0: for each of them.
ROOM_STORAGE_MIB, NUM_ROOM_STORAGES = 16, 800
ROOMS_MIB = (0, 128, 256, 1024)
# Chunks that are unregistered, and steps meanwhile: 40 products of 8192 x 8192 matrices, about 60 ms.
GIVEN_MIB, GIVEN_STEPS, STEP_PRODUCTS = 128, 8, 40


class MeasurePinning:
    """``huge`` and ``small``: registration with MADV_HUGEPAGE and without; ``staged``: the alternative, copies through
    small pinned buffers into plain memory; ``resize``: the time of freeing and allocating device storages; ``room``:
    the same for many storages, with a call of the driver for each or per block of bytes. ``give_back``: how long steps
    take while memory is unregistered, by a thread ("thread"), by one that rests after each chunk ("resting"), or
    between two steps ("between"); ``small_copies``: see measure_small_copies.py."""

    def __init__(self, request: Request, device: torch.device, result: Result) -> None:
        self.request, self.device = request, device
        self.rl = result.rl = RlResult()
        self.cores = len(os.sched_getaffinity(0))
        self.nbytes = int(request.protocol.pin_gib * (1 << 30))

    def run(self, phases: Phases) -> None:
        kind = self.request.variant.kind
        phases.required(kind, self._others().get(kind, self.registrations))

    def _others(self) -> dict[str, Callable[[], None]]:
        return {
            "staged": self.staged,
            "resize": self.resizes,
            "room": self.rooms,
            "give_back": self.give_back,
            "small_copies": self.small_copies,
        }

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

    def rooms(self) -> None:
        on_gpu = self.device.type == "cuda"
        storages = [
            torch.empty(ROOM_STORAGE_MIB * MIB, dtype=torch.uint8, device=self.device).untyped_storage()
            for _ in range(NUM_ROOM_STORAGES if on_gpu else 4)
        ]
        for room_mib in ROOMS_MIB:
            for storage in storages:
                storage.resize_(0)
            self._empty_cache()
            seconds = _seconds(lambda mib=room_mib: self._allocate(storages, mib))
            self.rl.pinning.append({"room_mib": room_mib, "n": len(storages), "alloc_ms": 1e3 * seconds})

    def _allocate(self, storages: list[torch.UntypedStorage], room_mib: int) -> None:
        at_once = max(room_mib // ROOM_STORAGE_MIB, 1)
        for i, storage in enumerate(storages):
            if room_mib and i % at_once == 0:
                torch.empty(room_mib * MIB, dtype=torch.uint8, device=self.device)
            storage.resize_(ROOM_STORAGE_MIB * MIB)

    def small_copies(self) -> None:
        self.rl.pinning += measure_small_copies(self.device)

    def give_back(self) -> None:
        for how in ("none", "thread", "resting", "between"):
            self.rl.pinning.append(self._given_back(how))

    def _given_back(self, how: str) -> dict[str, Any]:
        mapping, registrar = Mapping(self.nbytes, huge=True), Registrar(self.device)
        chunks = mapping.chunks(GIVEN_MIB * MIB)
        in_threads(min(16, max(self.cores, 1)), lambda *chunk: (touch(*chunk), registrar.register(*chunk))[1], chunks)
        steps = _Steps(self.device)
        for _ in range(GIVEN_STEPS):
            steps.run()  # warm-up
        took: list[float] = []

        def give() -> None:
            def all_of_them() -> None:
                for address, size in reversed(chunks):
                    seconds = _seconds(lambda a=address, s=size: registrar.unregister(a, s))
                    if how == "resting":
                        time.sleep(seconds)

            took.append(_seconds(all_of_them))

        thread = threading.Thread(target=give)
        times = []
        if how in ("thread", "resting"):
            thread.start()
        elif how == "between":
            give()
        while len(times) < GIVEN_STEPS or thread.is_alive():
            times.append(1e3 * steps.run())
        if how == "none":
            give()
        mapping.close()
        row = {"give_back": how, "gib": self.nbytes / (1 << 30), "n": len(chunks), "unregister_ms": 1e3 * took[0]}
        row |= {"steps": len(times), "step_ms": statistics.median(times), "longest_step_ms": max(times)}
        return {**row, "bad": registrar.num_failures}

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


class _Steps:
    """Work for the device that takes the host far less, then a wait for it, as a training step has one."""

    def __init__(self, device: torch.device) -> None:
        size = 8192 if device.type == "cuda" else 64
        self._factor = torch.zeros(size, size, device=device, dtype=torch.bfloat16)
        self._device = device

    def run(self) -> float:
        """Seconds of one."""
        return _seconds(self._work)

    def _work(self) -> None:
        for _ in range(STEP_PRODUCTS):
            torch.mm(self._factor, self._factor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _memmove(target: int, source: int, nbytes: int) -> None:
    import ctypes

    ctypes.memmove(target, source, nbytes)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
