"""Measures time and memory of work on a device, and leaves the device as it was.

Operators and segments are measured by a ``Meter`` before the first step, while its graphs are compiled.

[Note: Left as it was] Measuring changes nothing that a user can see:

- Random generators are put back. Autograd records nothing. Tensors are real, though the thread is compiling
  (``real_tensors``).
- On a GPU, all memory comes from a private pool, which is given back to the driver at the end. Nothing stays cached,
  and the user's cached memory is not touched. Only the workspace of cuBLAS stays, as after a step's first product.
- ``max_memory_allocated`` and ``max_memory_reserved`` are the same afterwards. If the work exceeded them, they are
  reset, and allocations from cached memory lift the first to its old value. Where that is not possible,
  ``room_bytes`` lets the work stay below the old peaks.
- Counters that add up (``allocation.all.allocated`` and the like) go on. Peaks of other counters may be lower.
- Work runs on the current stream, after the user's. Giving memory back waits for the device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import psutil
import torch

from fxoffload.machine.clocks import CpuClock, CudaClock
from fxoffload.runtime.profiler.allocator_history import cuda_history
from fxoffload.runtime.profiler.allocator_trace import AllocatorTrace, cuda_memory
from fxoffload.sizes import format_bytes
from fxoffload.torch_private.compile_context import real_tensors

log = logging.getLogger(__name__)

Work = Callable[[], object]

# How long a round of the same call should last: many operators share three seconds.
_ROUND_MS = 2.0
_CPU_ROUND_MS = 0.5
# Part of free device memory that is left alone.
_LEFT = 0.1
# Memory that the pool reserves without allocating it, and the clock's tensors.
_SPARE_BYTES = 256 << 20
# The caching allocator serves larger sizes from large blocks, and splits those only where more than this remains. It
# splits small ones always (kSmallSize and DeviceCachingAllocator::should_split).
_SMALL_BYTES = 1 << 20


class HostMeter:
    """Runs work on the CPU: wall time, no peaks. Everything but ``why_not`` is called within ``undisturbed``.

    Attributes:
        least_ms: operators that take less by estimate are not worth a measurement.
        warm_up_s: what ``undisturbed`` takes itself.
        sustained_ms: after so much work the device is as fast as in a step.
    """

    least_ms = warm_up_s = sustained_ms = 0.0

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._clock = CpuClock(_CPU_ROUND_MS)

    def why_not(self) -> str:
        """Why nothing can be measured now; "" where it can."""
        return ""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Within it work may run. See [Note: Left as it was]."""
        return real_tensors()

    def ms(self, work: Work) -> float:
        """Milliseconds of one call of ``work`` among calls of it; warmed up."""
        return self._clock.ms(work)

    def once_ms(self, work: Work) -> float:
        """Milliseconds of this one call of ``work``."""
        return self._clock.once_ms(work)

    def each_ms(self, works: Sequence[Work]) -> list[float]:
        """Milliseconds of each of ``works``, which run one after another without a pause."""
        return [self.once_ms(work) for work in works]

    def peak_bytes(self, work: Work) -> int | None:
        """Most bytes allocated while ``work`` runs, above those at its beginning; None where that is not known."""
        work()
        return None

    def room_bytes(self) -> int:
        """How many bytes the work may take, its inputs included."""
        return psutil.virtual_memory().available // 2


class _Bytes(NamedTuple):
    """The caching allocator's counters, now and at the most."""

    allocated: int
    most_allocated: int
    reserved: int
    most_reserved: int


class CudaMeter:
    """As HostMeter, on a GPU: by CUDA events ([Note: Held queue] in ``clocks``) and the caching allocator."""

    least_ms = 0.01  # kernels this short take as long as a launch
    warm_up_s = 0.6
    sustained_ms = 200.0  # see [Note: Sustained rates] in ``clocks``

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._clock: CudaClock | None = None
        self._room = 0

    def why_not(self) -> str:
        if torch.cuda.get_allocator_backend() != "native":
            return "the allocator has no private pools"
        if torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        if torch.cuda.mem_get_info(self.device)[0] < 2 * _SPARE_BYTES:
            return "too little memory is free"
        if _room(self.device, _bytes(self.device)) == 0:
            return "the allocator's peaks could not be put back"
        return ""

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        with torch.cuda.device(self.device), real_tensors():
            before = _bytes(self.device)
            pool = torch.cuda.MemPool()
            try:
                with torch.cuda.use_mem_pool(pool, self.device):
                    factor, product = (
                        torch.zeros((16, 16), dtype=torch.bfloat16, device=self.device) for _ in range(2)
                    )
                before = _with_workspaces(before, factor, product)
                self._room = _room(self.device, before)
                del factor, product
                with torch.cuda.use_mem_pool(pool, self.device):
                    # Other streams may wait for other ranks.
                    wait = torch.cuda.current_stream(self.device).synchronize
                    self._clock = CudaClock(self.device, _ROUND_MS, wait)
                    self._clock.sustain()
                    try:
                        yield
                    finally:
                        self._clock = None
            finally:
                # The last reference gives the pool's memory back to the driver.
                del pool
                _restore_peaks(self.device, before)

    def ms(self, work: Work) -> float:
        assert self._clock is not None
        return self._clock.ms(work)

    def once_ms(self, work: Work) -> float:
        assert self._clock is not None
        return self._clock.once_ms(work)

    def each_ms(self, works: Sequence[Work]) -> list[float]:
        assert self._clock is not None
        return self._clock.each_ms(works)

    def peak_bytes(self, work: Work) -> int | None:
        memory, history = cuda_memory(self.device), cuda_history(self.device)
        if memory is None:
            work()
            return None
        record = None if history is None else history()
        try:
            trace = AllocatorTrace.begin(memory())
            work()
            trace.add(memory())
        finally:
            if record is not None:
                record.end()
        peak = trace.exact_peak(record)
        return None if peak is None else peak - trace.first.allocated

    def room_bytes(self) -> int:
        free = torch.cuda.mem_get_info(self.device)[0]
        return min(self._room, int((1 - _LEFT) * free))


Meter = HostMeter | CudaMeter


def meter_for(device: torch.device) -> Meter:
    """The meter for ``device``: a GPU or the CPU."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter()


# -- the allocator's counters ------------------------------------------------------------------------------------------


def _bytes(device: torch.device) -> _Bytes:
    found = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
    return _Bytes(allocated["current"], allocated["peak"], reserved["current"], reserved["peak"])


def _with_workspaces(before: _Bytes, factor: torch.Tensor, product: torch.Tensor) -> _Bytes:
    """``before``, with what cuBLAS keeps for each thread and stream from its first product on: never in a pool that is
    given back."""
    device = factor.device
    then = _bytes(device)
    torch.mm(factor, factor, out=product)
    torch.addmm(factor[0], factor, factor, out=product)  # cublasLt
    now = _bytes(device)
    allocated, reserved = now.allocated - then.allocated, now.reserved - then.reserved
    return _Bytes(
        before.allocated + allocated,
        max(before.most_allocated, before.allocated + allocated),
        before.reserved + reserved,
        max(before.most_reserved, before.reserved + reserved),
    )


def _room(device: torch.device, now: _Bytes) -> int:
    """How many bytes may be allocated so that the peaks can be put back."""
    free = torch.cuda.mem_get_info(device)[0]
    if now.reserved == now.most_reserved and _lifting_sizes(device, now.most_allocated - now.allocated) is not None:
        return free
    return max(min(now.most_allocated - now.allocated, now.most_reserved - now.reserved, free) - _SPARE_BYTES, 0)


class _Cached(NamedTuple):
    """A block that is cached, or a part of it. ``stream``: that it is cached for; None: the current one."""

    size: int
    stream: int | None = None


def _lifting_sizes(device: torch.device, nbytes: int) -> list[_Cached] | None:
    """Allocations that are served from cached memory and take exactly ``nbytes`` together; None where none were found.

    Whole large blocks, as long as they fit, and an end of one block or of several small ones. Where no end fits, one of
    the large blocks is left out.
    """
    whole: list[_Cached] = []
    larger: list[_Cached] = []
    for block in sorted(_cached_blocks(device, "large"), key=lambda b: -b.size):
        if block.size <= _SMALL_BYTES:
            break  # Requests of this size are served from small blocks.
        if block.size <= nbytes:
            whole.append(block)
            nbytes -= block.size
        else:
            larger.append(block)
    small = sorted(_cached_blocks(device, "small"), key=lambda b: -b.size)
    for spared in (None, *reversed(whole)):
        rest = nbytes if spared is None else nbytes + spared.size
        end = _part_of_one(larger, rest) if rest > _SMALL_BYTES else None
        end = _parts_of_small(small, rest) if end is None else end
        if end is not None:
            return [*(b for b in whole if b is not spared), *end]
    return None


def _part_of_one(blocks: Sequence[_Cached], nbytes: int) -> list[_Cached] | None:
    """The allocation of ``nbytes`` that a large block serves without being taken whole."""
    fitting = [b for b in blocks if b.size >= nbytes]
    for stream in dict.fromkeys(b.stream for b in fitting):
        # The allocator takes the smallest block that fits.
        if min(b.size for b in fitting if b.stream == stream) - nbytes > _SMALL_BYTES:
            return [_Cached(nbytes, stream)]
    return None


def _parts_of_small(blocks: Sequence[_Cached], nbytes: int) -> list[_Cached] | None:
    """Allocations of ``nbytes`` in all that small blocks serve, which are split wherever they are larger.

    The largest come first, in ``blocks`` and in the result, so that each finds a block that no later one needs.
    Gradients of norms and biases are such blocks, between the optimizer's.
    """
    if sum(b.size for b in blocks) < nbytes:
        return None
    found: list[_Cached] = []
    for block in blocks:
        left = block.size
        while left and nbytes:
            part = min(left, nbytes, _SMALL_BYTES)
            found.append(_Cached(part, block.stream))
            left, nbytes = left - part, nbytes - part
    return sorted(found, key=lambda b: -b.size)


def _cached_blocks(device: torch.device, kind: str) -> list[_Cached]:
    """Each block that is cached outside private pools."""
    current = torch.cuda.current_stream(device).cuda_stream
    segments = [
        s
        for s in torch.cuda.memory_snapshot()
        if s["device"] == device.index
        and s["segment_type"] == kind
        and tuple(s.get("segment_pool_id", (0, 0))) == (0, 0)
    ]
    return [
        _Cached(b["size"], None if s["stream"] == current else s["stream"])
        for s in segments
        for b in s["blocks"]
        if b["state"] == "inactive"
    ]


def _allocate(device: torch.device, block: _Cached) -> torch.Tensor:
    if block.stream is None:
        return torch.empty(block.size, dtype=torch.uint8, device=device)
    is_default = block.stream == 0
    stream = torch.cuda.default_stream(device) if is_default else torch.cuda.ExternalStream(block.stream, device)
    with torch.cuda.stream(stream):
        return torch.empty(block.size, dtype=torch.uint8, device=device)


def _restore_peaks(device: torch.device, before: _Bytes) -> None:
    now = _bytes(device)
    if (now.most_allocated, now.most_reserved) == (before.most_allocated, before.most_reserved):
        return
    torch.cuda.reset_peak_memory_stats(device)
    sizes = _lifting_sizes(device, max(before.most_allocated - now.allocated, 0))
    held = [_allocate(device, block) for block in sizes or ()]
    del held
    now = _bytes(device)
    if (now.most_allocated, now.most_reserved) != (before.most_allocated, before.most_reserved):
        log.warning(
            "measuring left max_memory_allocated at %s (it was %s) and max_memory_reserved at %s (it was %s)",
            format_bytes(now.most_allocated),
            format_bytes(before.most_allocated),
            format_bytes(now.most_reserved),
            format_bytes(before.most_reserved),
        )
