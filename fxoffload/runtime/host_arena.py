"""Host memory for offloaded values: exact-size blocks from one growing, pinned range of addresses.

[Note: Host arena]
The arena reserves addresses once, without memory behind them, and backs them from the bottom up, one chunk at a time:
fault the pages in, then register them with CUDA. A block may lie across two chunks, so nothing is lost at chunk ends; a
copy across a chunk border is split in two, because one copy may not touch two registrations. Alternatives that were
rejected: PyTorch's caching host allocator rounds every block up to a power of two (up to twice the memory), and fixed
slabs lose their ends. Pinning runs at a few GB/s, so a background thread does it while the model compiles; a step waits
only for what is not ready yet, and never again afterwards.

[Note: Block fences]
Freeing a block says nothing about copies that still read it. A freed range remembers the event of the last host-to-
device copy out of it; the next device-to-host copy into it waits for that event on its stream. Copies of one direction
run on one stream in order, so of several events the youngest stands for all.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

log = logging.getLogger(__name__)

# Blocks start at multiples of this, so that every dtype and every copy engine is aligned.
ALIGNMENT = 512
# The arena grows by at least this much at a time; large enough that registrations are few.
MIN_CHUNK_BYTES = 64 << 20
MAX_CHUNK_BYTES = 1 << 30
_PAGE = 2 << 20  # huge page: chunk borders are multiples of it


class Pinner(Protocol):
    """Makes host memory fit for asynchronous copies, or leaves it alone (the CPU rehearsal)."""

    pinned: bool

    def register(self, address: int, nbytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Fence:
    """The event after which a freed range may be written again; ``order`` grows with every copy of its stream."""

    order: int
    event: object


@dataclass(slots=True)
class HostBlock:
    """A range of the arena: ``offset`` and ``nbytes`` in bytes; ``fence``: wait for it before writing."""

    offset: int
    nbytes: int
    fence: Fence | None


@dataclass(slots=True)
class _Free:
    start: int
    end: int
    fence: Fence | None


def _younger(a: Fence | None, b: Fence | None) -> Fence | None:
    if a is None or b is None:
        return a or b
    return a if a.order >= b.order else b


class HostArena:
    """See [Note: Host arena]. Thread-safe.

    Args:
        pinner: registers chunks with the device driver.
        capacity_bytes: addresses to reserve; no memory is used for them until the arena grows.
    """

    def __init__(self, pinner: Pinner, capacity_bytes: int) -> None:
        self._pinner = pinner
        self._capacity = _round_up(capacity_bytes, _PAGE)
        self._map: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None
        self._address = 0
        self._borders: list[int] = [0]  # chunk borders; the last one is the number of bytes that are ready
        self._free: list[_Free] = []
        self._in_use = 0
        self._target = 0
        self._failed: BaseException | None = None
        self._warned_failed = False
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._dead: deque[HostBlock] = deque()
        self.num_growths = 0
        self.wait_ms = 0.0

    @property
    def reserved_bytes(self) -> int:
        """Bytes of host memory that are backed (and pinned, on a GPU machine)."""
        return self._borders[-1]

    @property
    def in_use_bytes(self) -> int:
        """Bytes in live blocks."""
        with self._changed:
            self._collect()
            return self._in_use

    def reserve(self, nbytes: int, limit_bytes: int) -> None:
        """Grow to at least ``nbytes`` in the background, at most to ``limit_bytes``. Returns at once."""
        with self._changed:
            self._grow_to(nbytes, limit_bytes)

    def allocate_ready(self, nbytes: int) -> HostBlock | None:
        """A block of ``nbytes`` bytes out of what is ready now; None where there is none."""
        with self._changed:
            self._collect()
            return self._take(_round_up(max(nbytes, 1), ALIGNMENT))

    def allocate(self, nbytes: int, limit_bytes: int) -> HostBlock | None:
        """A block of ``nbytes`` bytes; None where more than ``limit_bytes`` would be in use or reserved.

        Blocks the caller while memory that fits the limit is still being pinned; the time is added to ``wait_ms``.
        """
        size = _round_up(max(nbytes, 1), ALIGNMENT)
        with self._changed:
            self._collect()
            if self._in_use + size > _whole_pages(limit_bytes):
                return None
            block = self._take(size)
            began = time.perf_counter()
            while block is None:
                ready = self._borders[-1]
                tail = self._free[-1] if self._free and self._free[-1].end == ready else None
                needed = ready + size - (tail.end - tail.start if tail else 0)
                if needed > min(_whole_pages(limit_bytes), self._capacity) or self._failed is not None:
                    self._warn_failed()
                    return None
                self._grow_to(needed, limit_bytes)
                self._changed.wait(timeout=60.0)
                self._collect()
                block = self._take(size)
                self.wait_ms += 1e3 * (time.perf_counter() - began)
                began = time.perf_counter()
            return block

    def free(self, block: HostBlock, fence: Fence | None) -> None:
        """Return a block, from any thread and from finalizers: takes no lock. ``fence``: see [Note: Block fences]."""
        block.fence = _younger(block.fence, fence)
        self._dead.append(block)

    def pieces(self, block: HostBlock, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(offset within the block, uint8 host tensor) for each chunk that the block's first ``nbytes`` touch."""
        assert self._bytes is not None
        start, end = block.offset, block.offset + nbytes
        while start < end:
            border = self._borders[bisect.bisect_right(self._borders, start)]
            stop = min(end, border)
            yield start - block.offset, self._bytes[start:stop]
            start = stop

    def release(self) -> int:
        """Give all memory back to the operating system. Returns the bytes given back.

        The caller has made sure that no copy is under way.

        Raises:
            RuntimeError: blocks are in use.
        """
        with self._changed:
            self._target = 0
            while self._thread is not None:
                self._changed.wait()
            self._collect()
            if self._in_use:
                raise RuntimeError(
                    f"expected no offloaded values, found {self._in_use} bytes in use: run or drop the pending "
                    "backward passes (delete their losses) first"
                )
            given = self._borders[-1]
            for start in self._borders[:-1]:
                self._pinner.unregister(self._address + start)
            # Unmapped with the last reference: closing it would pull the memory from under a view that somebody holds.
            self._bytes = None
            self._map, self._address, self._borders, self._free, self._failed = None, 0, [0], [], None
            return given

    # -- free list -----------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> HostBlock | None:
        for i, item in enumerate(self._free):
            if item.end - item.start >= size:
                block = HostBlock(item.start, size, item.fence)
                item.start += size
                if item.start == item.end:
                    del self._free[i]
                self._in_use += size
                return block
        return None

    def _collect(self) -> None:
        while self._dead:
            block = self._dead.popleft()
            self._in_use -= block.nbytes
            self._insert(_Free(block.offset, block.offset + block.nbytes, block.fence))

    def _insert(self, item: _Free) -> None:
        i = bisect.bisect_left(self._free, item.start, key=lambda f: f.start)
        if i < len(self._free) and self._free[i].start == item.end:
            item.end, item.fence = self._free[i].end, _younger(item.fence, self._free[i].fence)
            del self._free[i]
        if i > 0 and self._free[i - 1].end == item.start:
            before = self._free[i - 1]
            before.end, before.fence = item.end, _younger(before.fence, item.fence)
        else:
            self._free.insert(i, item)

    # -- growth --------------------------------------------------------------------------------------------------------

    def _grow_to(self, nbytes: int, limit_bytes: int) -> None:
        # The last chunk under a limit may end between two huge pages, but not between two pages.
        wanted = min(_round_up(nbytes, _PAGE), self._capacity, _whole_pages(limit_bytes))
        if wanted <= max(self._target, self._borders[-1]):
            return
        self._target = wanted
        self._failed, self._warned_failed = None, False
        if self._thread is None:
            self._thread = threading.Thread(target=self._grow, name="fxoffload-pin", daemon=True)
            self._thread.start()

    def _grow(self) -> None:
        try:
            if self._bytes is None:
                self._open()
            while True:
                with self._changed:
                    ready = self._borders[-1]
                    missing = self._target - ready
                    if missing <= 0:
                        self._thread = None
                        self._changed.notify_all()
                        return
                size = min(MAX_CHUNK_BYTES, missing)
                began = time.perf_counter()
                self._back(ready, size)
                log.debug("pinned %d MiB at %.1f GB/s", size >> 20, size / 1e9 / (time.perf_counter() - began))
                with self._changed:
                    self._borders.append(ready + size)
                    self._insert(_Free(ready, ready + size, None))
                    self.num_growths += 1
                    self._changed.notify_all()
        except BaseException as error:  # reported to the next allocate(), which keeps values on the device
            with self._changed:
                self._failed, self._thread, self._target = error, None, self._borders[-1]
                self._changed.notify_all()

    def _open(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._map = mmap.mmap(-1, self._capacity, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                try:
                    self._map.madvise(getattr(mmap, advice))
                except OSError as error:
                    log.debug("%s refused: %s", advice, error)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()

    def _back(self, start: int, size: int) -> None:
        assert self._bytes is not None
        if self._pinner.pinned:
            # Fault the pages in with all threads first: the driver would do it with one.
            self._bytes[start : start + size].zero_()
        self._pinner.register(self._address + start, size)

    def _warn_failed(self) -> None:
        if self._failed is not None and not self._warned_failed:
            self._warned_failed = True
            log.warning("could not get more pinned host memory (%s); values stay on the device", self._failed)


class HeapMemory:
    """The CPU rehearsal's pinner: ordinary memory."""

    pinned = False

    def register(self, address: int, nbytes: int) -> None:
        """Nothing to do."""

    def unregister(self, address: int) -> None:
        """Nothing to do."""


class CudaPinner:
    """Registers memory with CUDA, so that copies to and from it run asynchronously at the speed of the link."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._device):
            result = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[attr-defined]
        if int(result) != 0:
            raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed: {result}")

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[attr-defined]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _whole_pages(nbytes: int) -> int:
    return nbytes // mmap.PAGESIZE * mmap.PAGESIZE


def address_space_bytes(limit_bytes: int) -> int:
    """Addresses to reserve for an arena that may hold ``limit_bytes``: room to spare costs nothing on 64 bits."""
    return limit_bytes if ctypes.sizeof(ctypes.c_void_p) < 8 else max(limit_bytes, 1 << 40)
