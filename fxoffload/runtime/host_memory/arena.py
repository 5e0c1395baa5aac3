"""Host memory for offloaded values: exact-size blocks from one growing, pinned range of addresses.

[Note: Host arena]
The arena reserves addresses once, without memory behind them, and backs them from the bottom up, one chunk at a time:
fault the pages in, then register them with CUDA. A block may lie across two chunks, so nothing is lost at chunk ends; a
copy across a chunk border is split in two, because one copy may not touch two registrations. Alternatives that were
rejected: PyTorch's caching host allocator rounds every block up to a power of two (up to twice the memory), and fixed
slabs lose their ends. Threads in the background do the pinning while the model compiles (see [Note: Chunk threads] in
``fxoffload.runtime.host_memory.chunk_threads``); a step waits only for what is not ready yet, and never again
afterwards, unless memory was trimmed. What the arena has or is about to have is booked, so that other processes do not
count on it (``fxoffload.runtime.host_memory.ledger``).

[Note: Trim]
``trim`` gives chunks at the end of the range back while steps go on. All of them are taken out of the free list at
once, so that no block comes to lie in them any more, and no copy that touches them can be started after that. Then it
waits for the copies that were: of those out of a block its fence would tell, of those into one nothing does. Only then
one chunk after the other, the last one first, is unregistered and loses its memory, without the lock. Who wants to grow
meanwhile waits for the one chunk that is in hand, and has all others again: the trim is over. Addresses that were given
back are backed and registered anew like any others.

[Note: Arena and fork]
A forked child has no part of the range. Its arena is empty and may be used anew; blocks from before the fork are
refused, and freeing them does nothing. The events that were its parent's are not destroyed there
(``fxoffload.runtime.forked``).

[Note: Block fences]
Freeing a block says nothing about copies that still read it. A freed range remembers the event of the last host-to-
device copy out of it; the next device-to-host copy into it waits for that event on its stream. Copies of one direction
come in order, as on one stream, so of several events the youngest stands for all.

[Note: Tensors of a block]
``tensor`` gives users a block's bytes as a tensor. They may keep it, and views and NumPy arrays of it, for as long as
they like. A block whose storage is alive is not written again, and a freed one is not taken again. The memory of a
released arena goes with the last of them. Copies to a device that users have started may outlive the storage, on any
stream, so the host waits for all devices once before the block is written. torch copies a tensor in one call. So a
block across several registrations is registered anew as one (2 GiB in huge pages: 0.1 s; H200, 2026-11-26).
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fxoffload._torch_private import StorageWeakRef, is_gone, storage_behind
from fxoffload.runtime.forked import generation, keep_if_forked
from fxoffload.runtime.host_memory import numa
from fxoffload.runtime.host_memory.address_range import HUGE_PAGE, HostRange
from fxoffload.runtime.host_memory.chunk_threads import ChunkThreads
from fxoffload.runtime.host_memory.free_list import Fence as Fence
from fxoffload.runtime.host_memory.free_list import FreeList, FreeRange, younger
from fxoffload.runtime.host_memory.ledger import Booking
from fxoffload.runtime.host_memory.pinners import CudaPinner as CudaPinner
from fxoffload.runtime.host_memory.pinners import HeapMemory as HeapMemory
from fxoffload.runtime.host_memory.pinners import Pinner as Pinner
from fxoffload.runtime.host_memory.pinners import touch, wait_for_devices

log = logging.getLogger(__name__)

_NOT_HERE = (
    "expected a block of this process' host memory, found one from before a fork or a release: a forked child cannot "
    "read what its parent has offloaded. Load it in the parent first"
)
# Blocks start at multiples of this, so that every dtype and every copy engine is aligned.
ALIGNMENT = 512
# One thread's turn: long enough that registrations are few, short enough that all threads end at the same time.
MAX_CHUNK_BYTES = 128 << 20
_PAGE = HUGE_PAGE  # chunk borders are multiples of it


@dataclass(slots=True)
class HostBlock:
    """A range of the arena: ``offset`` and ``nbytes`` in bytes; ``fence``: wait for it before writing; ``home``: tells
    the arena that it is a range of, as that was made or as a fork left it; ``made_in``: a ``forked.generation``;
    ``storage``: of the block's tensors, see [Note: Tensors of a block]."""

    offset: int
    nbytes: int
    fence: Fence | None
    home: object = field(default=None, compare=False, repr=False)
    made_in: int = field(default_factory=generation, compare=False, repr=False)
    storage: StorageWeakRef | None = field(default=None, compare=False, repr=False)


class HostArena:
    """See [Note: Host arena]. Thread-safe.

    Args:
        pinner: registers chunks with the device driver.
        capacity_bytes: addresses to reserve; no memory is used for them until the arena grows.
        exact: grow by pages, not by huge pages: as much memory as was asked for and no more.
        chunk_bytes: what one thread registers at a time, and so the largest piece; None for ``MAX_CHUNK_BYTES``.
        warn: say so where memory that was asked for cannot be had. Else ``refusal`` is all that tells.
        booking: None for one in the ledger that all processes share.

    Attributes:
        refusal: why the last ``allocate`` that gave None did.
    """

    def __init__(
        self,
        pinner: Pinner,
        capacity_bytes: int,
        *,
        exact: bool = False,
        chunk_bytes: int | None = None,
        warn: bool = True,
        booking: Booking | None = None,
    ) -> None:
        self._pinner = pinner
        self._capacity = _round_up(capacity_bytes, _PAGE)
        self._exact = exact
        self._chunk_bytes = chunk_bytes
        self._warn = warn
        self._booking = booking or Booking()
        self._registered: list[int] = []  # addresses, of each chunk; shared with the finalizer. 0: it is not
        self._dead: deque[HostBlock] = deque()
        self.num_growths = 0
        self.wait_ms = 0.0
        self.refusal = ""
        self._begin()
        _ARENAS.add(self)
        drop = weakref.finalize(self, _drop, pinner, self._registered, self._booking, os.getpid())
        drop.atexit = False  # the process takes its memory with it

    def _begin(self) -> None:
        """The state of an arena that has nothing."""
        self._range: HostRange | None = None
        self._borders: list[int] = [0]  # chunk borders; the last one is the number of bytes that are ready
        self._free = FreeList()
        self._cut: FreeRange | None = None  # what a trim has taken out of the free list and not given back yet
        self._is_cutting = False  # a chunk beyond the last border is in hand
        self._in_tensors: list[HostBlock] = []  # freed, but users have tensors of them
        self._in_use = 0
        self._highest = 0  # see ``highest_bytes``
        self._failed: BaseException | None = None
        self._warned_failed = False
        self._home = object()
        self._changed = threading.Condition(threading.RLock())
        self._opening = threading.Lock()
        self._threads = ChunkThreads(self._changed)

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

    @property
    def in_tensors_bytes(self) -> int:
        """Bytes in freed blocks that users still have tensors of."""
        with self._changed:
            self._collect()
            return sum(block.nbytes for block in self._in_tensors)

    @property
    def highest_bytes(self) -> int:
        """The end of the block that lay highest since the last ``mark``."""
        return self._highest

    def mark(self) -> None:
        """Count ``highest_bytes`` from here on, and from the blocks that are live."""
        with self._changed:
            self._collect()
            end = self._borders[-1] if self._cut is None else self._cut.start
            self._highest = end - self._free.tail_bytes(end)

    @property
    def has_failed(self) -> bool:
        """Whether the last growth ended with an error. Another ``reserve`` tries again."""
        return self._failed is not None

    @property
    def is_growing(self) -> bool:
        """Whether memory is being pinned."""
        return self._threads.is_running

    def owns(self, block: HostBlock) -> bool:
        """Whether ``block`` is a range of this arena, as it is now."""
        return block.home is self._home

    def has(self, block: HostBlock) -> bool:
        """Whether the bytes of ``block`` can be had here: not those from before a fork or a release."""
        return self._range is not None and (block.home is None or self.owns(block))

    def reserve(self, nbytes: int, limit_bytes: int) -> None:
        """Grow to at least ``nbytes`` in the background, at most to ``limit_bytes``. Returns at once."""
        with self._changed:
            self._grow_to(nbytes, limit_bytes, whole=False)

    def wait_until_grown(self, patience_s: float = 60.0) -> bool:
        """Return when no memory is being pinned: True; or False after ``patience_s`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_growing, patience_s)

    def allocate_ready(self, nbytes: int) -> HostBlock | None:
        """A block of ``nbytes`` bytes out of what is ready now; None where there is none."""
        with self._changed:
            self._collect()
            return self._take(block_bytes(nbytes))

    def allocate(self, nbytes: int, limit_bytes: int) -> HostBlock | None:
        """A block of ``nbytes`` bytes; None where more than ``limit_bytes`` would be in use or reserved.

        Blocks the caller while memory that fits the limit is still being pinned; the time is added to ``wait_ms``.
        """
        size = block_bytes(nbytes)
        with self._changed:
            self._collect()
            if self._in_use + size > _whole_pages(limit_bytes):
                self._refuse(_beyond(limit_bytes))
                return None
            block = self._take(size)
            began = time.perf_counter()
            while block is None:
                if self._is_trimming:
                    self._end_trim()  # what it had taken out is there again
                elif not self._grow_for(size, limit_bytes):
                    return None
                else:
                    self._changed.wait(timeout=60.0)
                self._collect()
                block = self._take(size)
                self.wait_ms += 1e3 * (time.perf_counter() - began)
                began = time.perf_counter()
            return block

    def free(self, block: HostBlock, fence: Fence | None) -> None:
        """Return a block, from any thread and from finalizers: takes no lock. ``fence``: see [Note: Block fences]."""
        block.fence = younger(block.fence, fence)
        self._dead.append(block)

    def pieces(self, block: HostBlock, nbytes: int) -> list[tuple[int, torch.Tensor]]:
        """(offset within the block, uint8 host tensor) for each chunk that the block's first ``nbytes`` touch."""
        held = self._range
        if held is None or not self.has(block):
            raise RuntimeError(_NOT_HERE)
        found: list[tuple[int, torch.Tensor]] = []
        start, end = block.offset, block.offset + nbytes
        while start < end:
            border = self._borders[bisect.bisect_right(self._borders, start)]
            stop = min(end, border)
            found.append((start - block.offset, held.bytes[start:stop]))
            start = stop
        return found

    def tensor(self, block: HostBlock, nbytes: int) -> torch.Tensor:
        """The block's first ``nbytes`` bytes, to be kept by users; see [Note: Tensors of a block]."""
        with self._changed:
            held = self._range
            if held is None or not self.has(block):
                raise RuntimeError(_NOT_HERE)
            storage = None if block.storage is None else storage_behind(block.storage)
            if storage is None:
                if self._pinner.pinned:
                    self._register_as_one(held, block.offset, block.offset + nbytes)
                found = held.tensor(block.offset, nbytes, for_children=not self._pinner.pinned)
                block.storage = StorageWeakRef(found.untyped_storage())
                return found
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)

    def may_write(self, block: HostBlock) -> bool:
        """Whether no tensor of the block is alive. Waits for copies out of the last one."""
        if block.storage is None:
            return True
        if not is_gone(block.storage):
            return False
        wait_for_devices()
        block.storage = None
        return True

    def _register_as_one(self, held: HostRange, start: int, end: int) -> None:
        """The driver waits for copies that use the memory before it lets it go."""
        first, last = bisect.bisect_right(self._borders, start) - 1, bisect.bisect_left(self._borders, end)
        if last - first < 2:
            return
        address, nbytes = held.address + self._borders[first], self._borders[last] - self._borders[first]
        before = [one for one in self._registered[first:last] if one]
        self._registered[first:last] = [address]
        self._borders[first + 1 : last] = []
        try:
            for one in before:
                self._pinner.unregister(one)
            self._pinner.register(address, nbytes)
        except RuntimeError as error:
            self._registered[first] = 0
            log.warning("%.2f GiB of host memory are no longer pinned, and copied slowly: %s", nbytes / 2**30, error)

    def release(self) -> int:
        """Give all memory back to the operating system. Returns the bytes given back.

        The caller has made sure that no copy is under way.

        Raises:
            RuntimeError: blocks are in use.
        """
        with self._changed:
            self._threads.stop()
            while self._is_trimming or self.is_growing:  # others go on while one is waited for
                self._end_trim()
                self._threads.stop()
            self._collect()
            if self._in_use:
                raise RuntimeError(
                    f"expected no offloaded values, found {self._in_use} bytes in use: run or drop the pending "
                    "backward passes (delete their losses) first"
                )
            given = self._borders[-1]
            if self._in_tensors:
                wait_for_devices()
                self._in_tensors = []
            _unregister_all(self._pinner, self._registered)
            self._registered.clear()
            self._highest = 0
            # Unmapped with the last view that somebody holds.
            self._range, self._borders, self._free, self._failed = None, [0], FreeList(), None
            self._threads.restart()
            self._home = object()
            self._booking.release()
            return given

    def trim(self, keep_bytes: int, wait_for_copies: Callable[[], None]) -> int:
        """Give back the free chunks at the end of the range that lie above ``keep_bytes``; see [Note: Trim]. Returns
        the bytes given back; nothing is while the arena grows, and no more once it has to.

        Args:
            keep_bytes: what stays, counted from the start of the range.
            wait_for_copies: returns when all copies that were started before are done.
        """
        with self._changed:
            self._collect()
            cut = self._cut_tail(keep_bytes)
        given = 0
        if cut is None:
            return given
        try:
            wait_for_copies()
            while nbytes := self._try_give_back_last(cut):
                given += nbytes
        finally:
            with self._changed:
                if self._cut is cut:
                    self._end_trim()
        return given

    # -- free list -----------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> HostBlock | None:
        found = self._free.take(size)
        if found is None:
            return None
        self._in_use += size
        self._highest = max(self._highest, found.end)
        return HostBlock(found.start, size, found.fence, self._home)

    def _collect(self) -> None:
        while self._dead:
            block = self._dead.popleft()
            if not self.owns(block):
                keep_if_forked(block.made_in, block)
                continue
            self._in_use -= block.nbytes
            if block.storage is not None:
                self._in_tensors.append(block)
            else:
                self._insert(block)
        if self._in_tensors:
            free = [block for block in self._in_tensors if self.may_write(block)]
            self._in_tensors = [block for block in self._in_tensors if block.storage is not None]
            for block in free:
                self._insert(block)

    def _insert(self, block: HostBlock) -> None:
        self._free.insert(FreeRange(block.offset, block.offset + block.nbytes, block.fence))

    # -- trim ----------------------------------------------------------------------------------------------------------

    @property
    def _is_trimming(self) -> bool:
        return self._cut is not None or self._is_cutting

    def _cut_tail(self, keep_bytes: int) -> FreeRange | None:
        """Take what ``trim`` may give back out of the free list; None where there is nothing, or no time for it."""
        if self._is_trimming or self.is_growing:
            return None
        ready = self._borders[-1]
        used = ready - self._free.tail_bytes(ready)
        at = bisect.bisect_left(self._borders, max(keep_bytes, used))
        if at >= len(self._borders) - 1:
            return None
        self._cut = self._free.cut(self._borders[at])
        return self._cut

    def _try_give_back_last(self, cut: FreeRange) -> int:
        try:
            return self._give_back_last(cut)
        except RuntimeError as error:
            log.warning("host memory that no step needs stays: %s", error)
            return 0

    def _give_back_last(self, cut: FreeRange) -> int:
        """Give the last chunk back. Returns its bytes; 0 where the trim that has taken ``cut`` out is over."""
        with self._changed:
            if self._cut is not cut:
                return 0
            end, start, held = self._borders.pop(), self._borders[-1], self._range
            assert held is not None
            self._threads.restart(start)
            cut.end = start
            if cut.start == start:
                self._cut = None
            self._is_cutting = True
        try:
            self._pinner.unregister(held.address + start)
        except BaseException:
            with self._changed:
                self._borders.append(end)
                self._threads.restart(end)
                self._free.insert(FreeRange(start, end, cut.fence))
                self._ends_cutting()
            raise
        held.give_back(start, end - start)
        with self._changed:
            self._registered.pop()
            self._booking.shrink_to(start)
            self._ends_cutting()
        return end - start

    def _ends_cutting(self) -> None:
        self._is_cutting = False
        self._changed.notify_all()

    def _end_trim(self) -> None:
        """What was not given back is free again; wait for what is in hand."""
        while self._is_trimming:
            cut, self._cut = self._cut, None
            if cut is not None:
                self._free.insert(cut)
            if self._is_cutting:
                self._changed.wait()

    # -- growth --------------------------------------------------------------------------------------------------------

    def _grow_for(self, size: int, limit_bytes: int) -> bool:
        """Have the threads grow until a block of ``size`` bytes fits. False, and why, where that cannot be."""
        ready = self._borders[-1]
        needed = ready + size - self._free.tail_bytes(ready)
        if self._failed is not None:
            self._refuse(str(self._failed))
        elif needed > min(_whole_pages(limit_bytes), self._capacity):
            self._refuse(_beyond(limit_bytes))
        elif not self._grow_to(needed, limit_bytes, whole=True):
            self._refuse(self._booking.refusal)
        else:
            return True
        return False

    def _grow_to(self, nbytes: int, limit_bytes: int, *, whole: bool) -> bool:
        """Have the threads grow to ``nbytes`` within the limit and what can be booked; ``whole``: or not at all."""
        self._end_trim()
        # The last chunk under a limit may end between two huge pages, but not between two pages.
        granule = mmap.PAGESIZE if self._exact else _PAGE
        wanted = min(_round_up(nbytes, granule), self._capacity, _whole_pages(limit_bytes))
        under_way = max(self._threads.target, self._borders[-1])
        if wanted <= under_way:
            return True
        if not whole:
            wanted = _whole_pages(self._booking.grow_within(wanted))
        elif not self._booking.grow_to(wanted):
            # Another process has booked the rest of the machine. A whole huge page more may be what is too much.
            wanted = _round_up(nbytes, mmap.PAGESIZE)
            if not self._booking.grow_to(wanted):
                return False
        if wanted > under_way:
            self._failed, self._warned_failed = None, False
            self._threads.grow_to(wanted, self, self._chunk_bytes or MAX_CHUNK_BYTES, _PAGE)
        return True

    def back(self, start: int, end: int) -> None:
        """Put memory behind a chunk and register it. Called by the threads."""
        address = self._open().address + start
        began = time.perf_counter()
        if self._pinner.pinned:
            touch(address, end - start)
        self._pinner.register(address, end - start)
        log.debug("pinned %d MiB at %.1f GB/s", end - start >> 20, (end - start) / 1e9 / (time.perf_counter() - began))

    def undo(self, start: int, end: int, *, is_backed: bool) -> None:
        """Take a chunk's memory away again. Called by the threads."""
        if self._range is None:
            return
        try:
            if is_backed:
                self._pinner.unregister(self._range.address + start)
        except Exception as error:
            log.debug("a chunk stays registered: %s", error)
            return
        self._range.give_back(start, end - start)

    def publish(self, start: int, end: int) -> None:
        """A chunk is ready, and all in front of it. Called by the threads."""
        assert self._range is not None
        self._registered.append(self._range.address + start)
        self._borders.append(end)
        self._free.insert(FreeRange(start, end, None))
        self.num_growths += 1
        self._booking.backed(end)

    def settle(self, error: BaseException | None) -> None:
        """The threads have ended. An error is told to the next allocate(), which keeps values on the device."""
        if error is not None:
            self._failed = error
        self._booking.shrink_to(self._borders[-1])

    def _open(self) -> HostRange:
        with self._opening:
            if self._range is None:
                opened = HostRange(self._capacity)
                if isinstance(self._pinner, CudaPinner):
                    numa.prefer_node_of(self._pinner.device, opened.address, self._capacity)
                self._range = opened
            return self._range

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        if self._failed is not None and self._warn and not self._warned_failed:
            self._warned_failed = True
            log.warning("could not get more pinned host memory (%s); values stay on the device", self._failed)

    def _abandon(self) -> None:
        """See [Note: Arena and fork]."""
        keep_if_forked(-1, (self._free, self._cut, self._dead.copy(), self._in_tensors))
        self._registered.clear()
        self._dead.clear()
        self._begin()


_ARENAS: weakref.WeakSet[HostArena] = weakref.WeakSet()


def _drop(pinner: Pinner, registered: list[int], booking: Booking, owner: int) -> None:
    """Take leave of the driver before the addresses go: it would not register new memory there."""
    if os.getpid() == owner:
        _unregister_all(pinner, registered)
    booking.release()


def _unregister_all(pinner: Pinner, registered: list[int]) -> None:
    """What the driver does not let go goes with the process."""
    for address in filter(None, registered):
        try:
            pinner.unregister(address)
        except RuntimeError as error:
            log.warning("host memory stays registered: %s", error)


def _after_fork_in_child() -> None:
    for arena in list(_ARENAS):
        arena._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def block_bytes(nbytes: int) -> int:
    """What a block of ``nbytes`` bytes takes of an arena."""
    return _round_up(max(nbytes, 1), ALIGNMENT)


def _whole_pages(nbytes: int) -> int:
    return nbytes // mmap.PAGESIZE * mmap.PAGESIZE


def _beyond(limit_bytes: int) -> str:
    return f"the limit is {limit_bytes / 2**30:.2f} GiB"


def address_space_bytes(limit_bytes: int) -> int:
    """Addresses to reserve for an arena that may hold ``limit_bytes``: room to spare costs nothing on 64 bits."""
    return limit_bytes if ctypes.sizeof(ctypes.c_void_p) < 8 else max(limit_bytes, 1 << 40)
