"""Times of copies between device and host, as curves over sizes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxoffload.errors import ProfileError
from fxoffload.machine.clocks import ROUNDS, Clock, CudaClock
from fxoffload.machine.curve import CopyCurve
from fxoffload.runtime.host_memory.arena import CudaPinner, HostArena

CUDA_SIZES = tuple(1 << power for power in range(18, 29))  # 256 KiB to 256 MiB
CPU_SIZES = tuple(1 << power for power in range(16, 25, 2))  # 64 KiB to 16 MiB
_LATENCY_BYTES = 4096  # moved in next to no time, so its time is the copy's own cost
_ROUND_BYTES = 32 << 20
_MAX_QUEUED = 32


def cpu_curves(clock: Clock) -> dict[str, Any]:
    """The rehearsal's "link": memory copies on the caller's thread, so two at once take twice as long.

    Curves by their names in MachineProfile.
    """
    source, target = (torch.ones(CPU_SIZES[-1], dtype=torch.uint8) for _ in range(2))

    def copy_ms(nbytes: int) -> float:
        return clock.ms(lambda: target[:nbytes].copy_(source[:nbytes]))

    latency_ms, times_ms = copy_ms(_LATENCY_BYTES), [copy_ms(size) for size in CPU_SIZES]
    alone = make_curve(latency_ms, CPU_SIZES, times_ms)
    both = make_curve(latency_ms, CPU_SIZES, [2 * ms for ms in times_ms])
    return {"d2h": alone, "h2d": alone, "duplex_d2h": both, "duplex_h2d": both}


def cuda_curves(device: torch.device, clock: CudaClock) -> dict[str, Any]:
    """The same, over the link, out of and into memory that is pinned as the runtime pins it; all of it is given back.

    Raises ProfileError (a RuntimeError) where no memory can be pinned.
    """
    largest = CUDA_SIZES[-1]
    with _pinned(device, 2 * largest) as host:
        there = [torch.ones(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        down = _Way(host[:largest], there[0], torch.cuda.Stream(device))
        up = _Way(there[1], host[largest:], torch.cuda.Stream(device))
        try:
            for _ in range(2):
                _round_ms(clock, down, up, largest, 1)
            d2h, h2d = (_curve(lambda n, way=way: _copy_ms(clock, way, None, n)) for way in (down, up))
            both_d2h = _curve(lambda n: _copy_ms(clock, down, up, n), at_least=d2h)
            both_h2d = _curve(lambda n: _copy_ms(clock, up, down, n), at_least=h2d)
        finally:
            torch.cuda.synchronize(device)
    return {"d2h": d2h, "h2d": h2d, "duplex_d2h": both_d2h, "duplex_h2d": both_h2d}


def make_curve(latency_ms: float, sizes: Sequence[int], times_ms: Sequence[float]) -> CopyCurve:
    """A curve of measured times, without the noise that would make a larger copy the faster one.

    Disturbances only add time: a copy that took longer than a larger one is given the time of the larger one.
    """
    # Rounded to nanoseconds, and never to zero.
    rising = [max(round(ms, 6), 1e-6) for ms in itertools.accumulate(reversed(times_ms), min)][::-1]
    return CopyCurve(latency_ms=min(round(latency_ms, 6), rising[0]), sizes_bytes=tuple(sizes), times_ms=tuple(rising))


@dataclass(frozen=True, slots=True)
class _Way:
    """One direction of the link: buffers of the largest size, and the stream that its copies run on."""

    target: Tensor
    source: Tensor
    stream: torch.cuda.Stream

    def queue(self, nbytes: int, copies: int) -> None:
        """Start copies of ``nbytes``, each of other bytes than the one before where there is room."""
        places = len(self.target) // nbytes
        with torch.cuda.stream(self.stream):
            for i in range(copies):
                here = slice(i % places * nbytes, (i % places + 1) * nbytes)
                self.target[here].copy_(self.source[here], non_blocking=True)


@contextmanager
def _pinned(device: torch.device, nbytes: int) -> Iterator[Tensor]:
    """``nbytes`` bytes of pinned host memory, returned to the operating system afterwards."""
    arena = HostArena(CudaPinner(device), nbytes, chunk_bytes=nbytes)
    block = arena.allocate(nbytes, nbytes)
    if block is None:
        raise ProfileError(
            f"expected {nbytes >> 20} MiB of host memory that can be pinned to measure the link, found less "
            "(see the log); free host memory or raise the limit of locked memory (ulimit -l)"
        )
    try:
        # One chunk, so one piece.
        ((_, host),) = arena.pieces(block, nbytes)
        yield host
    finally:
        arena.free(block, None)
        arena.release()


def _curve(copy_ms: Callable[[int], float], at_least: CopyCurve | None = None) -> CopyCurve:
    """``at_least``: of one direction alone; both at once are not faster, whatever the noise says."""
    times_ms = [copy_ms(size) for size in CUDA_SIZES]
    if at_least is None:
        return make_curve(copy_ms(_LATENCY_BYTES), CUDA_SIZES, times_ms)
    least_ms = [max(pair) for pair in zip(times_ms, at_least.times_ms, strict=True)]
    return make_curve(at_least.latency_ms, CUDA_SIZES, least_ms)


def _copy_ms(clock: CudaClock, way: _Way, other: _Way | None, nbytes: int) -> float:
    copies = max(2, min(_MAX_QUEUED, _ROUND_BYTES // nbytes))
    return statistics.median(_round_ms(clock, way, other, nbytes, copies) for _ in range(ROUNDS)) / copies


def _round_ms(clock: CudaClock, way: _Way, other: _Way | None, nbytes: int, copies: int) -> float:
    """Milliseconds of ``copies`` copies one way, during twice as many the other way, which so end later."""
    torch.cuda.synchronize()
    gate = torch.cuda.Event()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clock.hold()  # both ways start at once, when everything has been queued: [Note: Held queue]
    gate.record()
    for each in (way, other):
        if each is not None:
            each.stream.wait_event(gate)
    if other is not None:
        other.queue(nbytes, 2 * copies)
    start.record(way.stream)
    way.queue(nbytes, copies)
    end.record(way.stream)
    torch.cuda.synchronize()
    return start.elapsed_time(end)
