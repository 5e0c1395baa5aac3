"""Host memory for offloaded values: exact-size blocks from one growing, pinned range of addresses.

[Note: Host arena]
The arena reserves addresses once, without memory, and backs them from the bottom up, one chunk at a time: fault the
pages in, then register them with CUDA. A block may lie across two chunks, so nothing is lost at chunk ends. A copy
across a chunk border is split in two, because one copy may not touch two registrations.

Rejected: PyTorch's caching host allocator, which rounds every block up to a power of two (up to twice the memory), and
fixed slabs, which lose their ends. Background threads do the pinning while the model compiles (see
[Note: Chunk threads] in ``fxoffload.runtime.host_memory.chunk_threads``). A step waits only for memory that is not
ready yet, and never later, unless memory was trimmed. The arena books the memory that it has or is about to have, so
that other processes do not count on it (``fxoffload.runtime.host_memory.ledger``).

[Note: Trim]
``trim`` gives chunks at the end of the range back while steps go on. It takes all of them out of the free list at once,
so no new block lies in them, and no new copy touches them. Then it waits for copies that were started before. A block's
fence would tell of those out of it, but nothing tells of those into it. Only then it unregisters the chunks and gives
their memory back, one at a time, the last one first, without the lock. If the arena has to grow meanwhile, the trim is
over: the grower waits for the one chunk that is in hand, and has all others back. Addresses that were given back are
backed and registered anew like any others.

[Note: Arena and fork]
A forked child has no part of the range. Its arena is empty and may be used anew. Blocks from before the fork are
refused, and freeing them does nothing. The events that were its parent's are not destroyed there
(``fxoffload.runtime.forked``): the arena holds them, those of the copies into its blocks too.

[Note: Who owns a block]
References own a block: one without references returns by itself, and ``free`` returns one early. So none is lost where
an exception comes between ``allocate`` and the code that was to have the block. The leases are the record of blocks in
use; all the rest is free, and can be found from that ([Note: Asynchronous exceptions]).

[Note: Block fences]
Freeing a block says nothing about copies that still read it. A freed range remembers the event of the last copy out of
it to the device. The next copy into it from the device waits for that event on its stream. Copies of one direction come
in order, as on one stream, so of several events the youngest stands for all.

[Note: Tensors of a block]
``tensor`` gives users a block's bytes as a tensor. They may keep it, and views and NumPy arrays of it, for as long as
they like. A block whose storage is alive is not written again, and a freed one is not taken again. The memory of a
released arena goes with the last of them. Copies to a device that users have started may outlive the storage, on any
stream. So the host waits for all devices once before the block is written. PyTorch copies a tensor in one call. So a
block across several registrations is registered anew as one (2 GiB in huge pages: 0.1 s; H200, 2026-11-26).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fxoffload.progress import working
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock, locked
from fxoffload.runtime.forked import keep_for_good
from fxoffload.runtime.host_memory import numa
from fxoffload.runtime.host_memory.address_range import HUGE_PAGE, HostRange
from fxoffload.runtime.host_memory.chunk_threads import ChunkThreads
from fxoffload.runtime.host_memory.free_list import Fence as Fence
from fxoffload.runtime.host_memory.free_list import FreeList, Span, younger
from fxoffload.runtime.host_memory.ledger import Booking
from fxoffload.runtime.host_memory.pinners import CudaPinner as CudaPinner
from fxoffload.runtime.host_memory.pinners import HeapMemory as HeapMemory
from fxoffload.runtime.host_memory.pinners import Pinner as Pinner
from fxoffload.runtime.host_memory.pinners import touch, wait_for_devices
from fxoffload.runtime.transactions import Changes, transaction
from fxoffload.runtime.weak_bag import WeakBag
from fxoffload.torch_private.storages import StorageWeakRef, is_gone, storage_behind

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


_Found = TypeVar("_Found")


class HostBlock:
    """A range of the arena; see [Note: Who owns a block].

    Attributes:
        span: where it lies.
        home: identifies its arena, as that was made or as a fork left it.
    """

    __slots__ = ("__weakref__", "home", "span")

    def __init__(self, span: Span, home: object) -> None:
        self.span = span
        self.home = home

    @property
    def offset(self) -> int:
        """In bytes."""
        return self.span.start

    @property
    def nbytes(self) -> int:
        """In bytes."""
        return self.span.end - self.span.start

    @property
    def fence(self) -> Fence | None:
        """Wait for it before writing."""
        return self.span.fence

    @fence.setter
    def fence(self, fence: Fence | None) -> None:
        self.span.fence = fence


class _Lease(weakref.ref[HostBlock]):
    """A block that is taken, and the range that comes back when it is gone."""

    __slots__ = ("span",)
    span: Span


class _Busy:
    """In place of a result: something has to change first."""


_BUSY = _Busy()
_PATIENCE_S = 1.0  # after which a waiter looks anyway, whether or not it was told of a change


class HostArena:
    """See [Note: Host arena]. Thread-safe.

    Args:
        pinner: registers chunks with the device driver.
        capacity_bytes: addresses to reserve; no memory is used for them until the arena grows.
        exact: grow by pages, not by huge pages: as much memory as was asked for and no more.
        chunk_bytes: bytes that one thread registers at a time, and so the largest piece; None for ``MAX_CHUNK_BYTES``.
        warn: log a warning where memory that was asked for cannot be had. Else only ``refusal`` tells.
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
        self._registered: list[int] = []  # addresses, in order; shared with the finalizer
        self.num_growths = 0
        self.wait_ms = 0.0
        self.refusal = ""
        self._begin()
        _ARENAS.add(self)
        drop = weakref.finalize(self, _drop, pinner, self._registered, self._booking, os.getpid())
        drop.atexit = False  # the process takes its memory with it

    def _begin(self) -> None:
        """The state of an arena that has nothing."""
        self._lock = ForkSafeRLock()
        self._torn = False
        self._changes = Changes()
        self._threads = ChunkThreads(self._changes)
        self._leases: dict[int, _Lease] = {}  # by their start: the source of truth of blocks in use
        self._dead: deque[_Lease] = deque()  # may have returned
        self._bury = self._dead.append  # in C: no exception comes in between
        self._in_use = 0
        self._given_up: HostRange | None = None  # of a release that is under way: the driver still knows it.
        self._cutting: tuple[int, int, int] | None = None  # The chunk that a trim has in hand: thread, start, end.
        self._trimmer = 0  # the thread that has begun the latest trim
        self._joining: tuple[HostRange, int, int] | None = None  # chunks that become one registration: start, end
        self._warned_failed = False
        self._opening = ForkSafeRLock()
        self._forget_memory()

    def _forget_memory(self) -> None:
        """No chunk is ready."""
        self._borders: list[int] = [0]  # chunk borders; the last one is the number of bytes that are ready
        self._free = FreeList()
        self._cut: Span | None = None  # the chunks that a trim has taken out of the free list and not given back yet
        self._in_tensors: dict[int, Span] = {}  # by their start: freed, but users have tensors of them
        self._highest = 0  # see ``highest_bytes``
        self._failed: BaseException | None = None
        self._home = object()
        self._threads.restart()
        self._range: HostRange | None = None  # last: until then ``_mend`` does it again

    @transaction
    def transact(self, work: Callable[[], _Found]) -> _Found:
        """Calls ``work`` in a transaction of the arena. Called by the threads."""
        return work()

    def _mend(self) -> None:
        """The leases list blocks in use, the borders ready memory. A trim or a release that has begun is ended."""
        if self._joining is not None:
            self._end_joining(*self._joining)
        if self._given_up is not None:
            self._end_release(self._given_up)
        if self._cutting is not None and self._cutting[0] == threading.get_ident():
            self._end_cutting_for_good(*self._cutting[1:])
        self._threads.mend(self._borders[-1])
        self._find_free()

    def _find_free(self) -> None:
        """Of fences the youngest stands for all; which range it lay on is not known any more."""
        youngest = self._free.youngest
        spans = (self._cut, *(getattr(lease, "span", None) for lease in self._dead))
        for span in spans:
            youngest = younger(youngest, None if span is None else span.fence)
        found, at = FreeList(youngest), 0
        taken = [lease.span for lease in self._leases.values()]
        self._in_use = sum(span.end - span.start for span in taken)
        for span in taken:
            self._in_tensors.pop(span.start, None)
        taken = sorted((*taken, *self._in_tensors.values()), key=lambda span: span.start)
        end = self._borders[-1] if self._cut is None else self._cut.start
        for start, stop in (*((span.start, span.end) for span in taken), (end, end)):
            if at < start:
                found.insert(Span(at, start, youngest))
            at = stop
        self._free = found

    @property
    def reserved_bytes(self) -> int:
        """Bytes of host memory that are backed (and pinned, on a GPU machine)."""
        return self._borders[-1]

    @property
    def in_use_bytes(self) -> int:
        """Bytes in live blocks."""
        return self._count_in_use()

    @transaction
    def _count_in_use(self) -> int:
        self._collect()
        return self._in_use

    @property
    def in_tensors_bytes(self) -> int:
        """Bytes in freed blocks that users still have tensors of."""
        return self._count_in_tensors()

    @transaction
    def _count_in_tensors(self) -> int:
        self._collect()
        return sum(span.end - span.start for span in self._in_tensors.values())

    @property
    def highest_bytes(self) -> int:
        """The end of the block that lay highest since the last ``mark``."""
        return self._highest

    @transaction
    def mark(self) -> None:
        """Count ``highest_bytes`` from here on, and from the blocks that are live."""
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
        return self._range is not None and self.owns(block)

    def reserve(self, nbytes: int, limit_bytes: int) -> None:
        """Grow to at least ``nbytes`` in the background, at most to ``limit_bytes``. Returns at once."""
        self._until_not_busy(lambda: self._reserve(nbytes, limit_bytes))

    @transaction
    def _reserve(self, nbytes: int, limit_bytes: int) -> bool | _Busy:
        return self._grow_to(nbytes, limit_bytes, whole=False) if self._end_trim() else _BUSY

    def wait_until_grown(self, patience_s: float = 60.0) -> bool:
        """Return when no memory is being pinned: True; or False after ``patience_s`` seconds."""
        if not self.is_growing:
            return True
        with working("pinning host memory"):
            return self._wait_until_grown(time.monotonic() + patience_s)

    def _wait_until_grown(self, end: float) -> bool:
        while True:
            changed = self._changes.next
            if not self.is_growing:
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            changed.wait(min(left, _PATIENCE_S))

    def _until_not_busy(self, attempt: Callable[[], _Found | _Busy]) -> _Found:
        """Repeat ``attempt`` until it is not busy. It waits without the lock."""
        while True:
            changed = self._changes.next
            found = attempt()
            if not isinstance(found, _Busy):
                return found
            changed.wait(_PATIENCE_S)

    def allocate_ready(self, nbytes: int) -> HostBlock | None:
        """A block of ``nbytes`` bytes out of memory that is ready now; None where there is none."""
        return self.allocate_all_ready((nbytes,))[0]

    @transaction
    def allocate_all_ready(self, sizes: Sequence[int]) -> list[HostBlock | None]:
        """The same for each of ``sizes``, in bytes."""
        self._collect()
        return [self._take(block_bytes(nbytes)) for nbytes in sizes]

    def allocate(self, nbytes: int, limit_bytes: int) -> HostBlock | None:
        """A block of ``nbytes`` bytes; None where more than ``limit_bytes`` would be in use or reserved.

        Blocks the caller while memory that fits the limit is still being pinned; the time is added to ``wait_ms``.
        """
        size = block_bytes(nbytes)
        changed = self._changes.next
        found = self._allocate(size, limit_bytes)
        if not isinstance(found, _Busy):
            return found
        with working("pinning host memory"):
            while isinstance(found, _Busy):
                began = time.perf_counter()
                changed.wait(_PATIENCE_S)
                self.wait_ms += 1e3 * (time.perf_counter() - began)
                changed = self._changes.next
                found = self._allocate(size, limit_bytes)
        return found

    @transaction
    def _allocate(self, size: int, limit_bytes: int) -> HostBlock | _Busy | None:
        self._collect()
        if self._in_use + size > _whole_pages(limit_bytes):
            self._refuse(_beyond(limit_bytes))
            return None
        block = self._take(size)
        if block is None and self._is_trimming:
            if not self._end_trim():
                return _BUSY
            block = self._take(size)  # the chunks that the trim had taken out are back
        if block is None and self._grow_for(size, limit_bytes):
            return _BUSY
        return block

    def free(self, block: HostBlock, fence: Fence | None) -> None:
        """Return a block, from any thread and from finalizers: takes no lock. ``fence``: see [Note: Block fences]."""
        if not self.owns(block):
            return
        block.fence = younger(block.fence, fence)
        lease = self._leases.get(block.offset)
        if lease is not None and lease() is block:
            self._bury(lease)

    def pieces(self, block: HostBlock, nbytes: int) -> list[tuple[int, torch.Tensor]]:
        """(offset within the block, uint8 host tensor) for each chunk that the block's first ``nbytes`` touch."""
        held = self._range
        if held is None or not self.has(block):
            raise RuntimeError(_NOT_HERE)
        first = start = block.span.start
        end = start + nbytes
        found: list[tuple[int, torch.Tensor]] = []
        while start < end:
            # Looked up anew each time: borders may go meanwhile.
            stop = min(end, self._borders[bisect.bisect_right(self._borders, start)])
            found.append((start - first, held.bytes[start:stop]))
            start = stop
        return found

    @transaction
    def tensor(self, block: HostBlock, nbytes: int) -> torch.Tensor:
        """The block's first ``nbytes`` bytes, to be kept by users; see [Note: Tensors of a block]."""
        held = self._range
        if held is None or not self.has(block):
            raise RuntimeError(_NOT_HERE)
        span = block.span
        storage = None if span.storage is None else storage_behind(span.storage)
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        if self._pinner.pinned:
            self._register_as_one(held, block.offset, block.offset + nbytes)
        found = held.tensor(block.offset, nbytes, for_children=not self._pinner.pinned)
        span.storage = StorageWeakRef(found.untyped_storage())
        return found

    def may_write(self, block: HostBlock) -> bool:
        """Whether no tensor of the block is alive. Waits for copies out of the last one."""
        return _may_write(block.span)

    def _register_as_one(self, held: HostRange, start: int, end: int) -> None:
        first, last = bisect.bisect_right(self._borders, start) - 1, bisect.bisect_left(self._borders, end)
        if last - first > 1:
            self._joining = held, self._borders[first], self._borders[last]
            self._end_joining(*self._joining)

    def _end_joining(self, held: HostRange, start: int, end: int) -> None:
        """The driver waits for copies that use the memory before it lets it go."""
        address, nbytes = held.address + start, end - start
        for one in [one for one in self._registered if address <= one < address + nbytes]:
            with contextlib.suppress(RuntimeError):  # it was let go before an exception came
                self._pinner.unregister(one)
            self._registered.remove(one)
        first, last = bisect.bisect_left(self._borders, start), bisect.bisect_left(self._borders, end)
        del self._borders[first + 1 : last]
        try:
            self._pinner.register(address, nbytes)
            bisect.insort(self._registered, address)
        except RuntimeError as error:
            log.warning(
                "%.2f GiB of host memory are no longer pinned, and copied slowly: %s", nbytes / 2**30, str(error)
            )
        self._joining = None

    def release(self) -> int:
        """Give all memory back to the operating system. Returns the bytes given back.

        The caller has made sure that no copy is under way.

        Raises:
            RuntimeError: blocks are in use.
        """
        return self._until_not_busy(self._release)

    @transaction
    def _release(self) -> int | _Busy:
        self._threads.stop()
        if not self._end_trim() or self.is_growing:
            return _BUSY
        self._collect()
        if self._in_use:
            raise RuntimeError(
                f"expected no offloaded values, found {self._in_use} bytes in use: run or drop the pending "
                "backward passes (delete their losses) first"
            )
        if self._in_tensors:
            wait_for_devices()
        given, held = self._borders[-1], self._range
        if held is None:
            self._forget_memory()
        else:
            self._given_up = held
            self._end_release(held)
        return given

    def _end_release(self, held: HostRange) -> None:
        if self._range is held:
            self._forget_memory()
        _unregister_all(self._pinner, self._registered)
        self._booking.release()
        self._given_up = None  # unmapped with the last view of it

    def trim(self, keep_bytes: int, wait_for_copies: Callable[[], None], limit_s: float = math.inf) -> int:
        """Give back the free chunks at the end of the range that lie above ``keep_bytes``; see [Note: Trim]. Returns
        the bytes given back; nothing is while the arena grows, and no more once it has to.

        Args:
            keep_bytes: bytes that stay, counted from the start of the range.
            wait_for_copies: returns when all copies that were started before are done.
            limit_s: seconds for which further chunks go, once the first one went.
        """
        try:
            cut = self._cut_tail(keep_bytes)
            given = 0
            if cut is not None:
                wait_for_copies()
                given = self._try_give_back_last(cut)
                end_s = time.perf_counter() + limit_s
                while given and time.perf_counter() < end_s and (nbytes := self._try_give_back_last(cut)):
                    given += nbytes
                self._leave_trim()
            return given
        except BaseException:
            self._leave_trim()
            raise

    @transaction
    def _leave_trim(self) -> None:
        """The thread that trims does so no more. Another one may have ended it."""
        if self._cutting is not None and self._cutting[0] == threading.get_ident():
            self._end_cutting_for_good(*self._cutting[1:])
        if self._trimmer == threading.get_ident():
            self._end_trim()
            self._trimmer = 0

    # -- free list -----------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> HostBlock | None:
        found = self._free.take(size)
        if found is None:
            return None
        block = HostBlock(found, self._home)
        lease = _Lease(block, self._bury)
        lease.span = found
        self._leases[found.start] = lease
        self._in_use += size
        self._highest = max(self._highest, found.end)
        return block

    def _collect(self) -> None:
        dead = self._dead
        while dead:
            lease = dead[0]
            span = getattr(lease, "span", None)  # none where an exception came before it was taken
            if span is not None and self._leases.get(span.start) is lease:
                if span.storage is not None:
                    self._in_tensors[span.start] = span
                del self._leases[span.start]  # now it is free, or in tensors
                self._in_use -= span.end - span.start
                if span.storage is None:
                    self._free.insert(Span(span.start, span.end, span.fence))
            dead.popleft()
        for span in [span for span in self._in_tensors.values() if _may_write(span)]:
            del self._in_tensors[span.start]
            self._free.insert(Span(span.start, span.end, span.fence))

    # -- trim ----------------------------------------------------------------------------------------------------------

    @property
    def _is_trimming(self) -> bool:
        return self._cut is not None or self._cutting is not None

    @transaction
    def _cut_tail(self, keep_bytes: int) -> Span | None:
        """Take the memory that ``trim`` may give back out of the free list; None where there is none, or no time."""
        self._collect()
        if self._is_trimming or self.is_growing:
            return None
        ready = self._borders[-1]
        used = ready - self._free.tail_bytes(ready)
        at = bisect.bisect_left(self._borders, max(keep_bytes, used))
        if at >= len(self._borders) - 1:
            return None
        self._trimmer = threading.get_ident()
        self._cut = self._free.cut(self._borders[at])
        return self._cut

    def _try_give_back_last(self, cut: Span) -> int:
        try:
            return self._give_back_last(cut)
        except RuntimeError as error:
            log.warning("host memory that no step needs stays: %s", str(error))
            return 0

    def _give_back_last(self, cut: Span) -> int:
        """Give the last chunk back. Returns its bytes; 0 where the trim that has taken ``cut`` out is over."""
        chunk = self._begin_cutting(cut)
        if chunk is None:
            return 0
        held, start, end = chunk
        try:
            self._pinner.unregister(held.address + start)
        except RuntimeError:
            self._keep_chunk(start, end, cut.fence)
            raise
        self._end_cutting(start, end)
        return end - start

    @transaction
    def _begin_cutting(self, cut: Span) -> tuple[HostRange, int, int] | None:
        held = self._range
        if self._cut is not cut or held is None:
            return None
        end, start = self._borders[-1], self._borders[-2]
        self._cutting = threading.get_ident(), start, end
        self._borders.pop()
        self._threads.restart(start)
        cut.end = start
        if cut.start == start:
            self._cut = None
        return held, start, end

    @transaction
    def _keep_chunk(self, start: int, end: int, fence: Fence | None) -> None:
        """The driver has not let go of it."""
        self._borders.append(end)
        self._threads.restart(end)
        self._cutting = None
        self._free.insert(Span(start, end, fence))
        self._changes.notify()

    def _end_cutting_for_good(self, start: int, end: int) -> None:
        """The thread that had the chunk in hand was interrupted, before or after the driver let go of it."""
        if self._borders[-1] == end:
            self._borders.pop()
        if self._cut is not None:
            self._cut.end = min(self._cut.end, start)
            if self._cut.start == self._cut.end:
                self._cut = None
        self._threads.restart(start)
        assert self._range is not None
        with contextlib.suppress(RuntimeError):
            self._pinner.unregister(self._range.address + start)
        self._end_cutting(start, end)

    @transaction
    def _end_cutting(self, start: int, end: int) -> None:
        assert self._range is not None
        self._range.give_back(start, end - start)
        if self._registered and self._registered[-1] == self._range.address + start:
            self._registered.pop()
        self._booking.shrink_to(start)
        self._cutting = None
        self._changes.notify()

    def _end_trim(self) -> bool:
        """Put chunks that were not given back into the free list. Returns whether the trim is over: no chunk is in
        another thread's hand."""
        cut, self._cut = self._cut, None
        if cut is not None:
            self._free.insert(cut)
        return self._cutting is None

    # -- growth --------------------------------------------------------------------------------------------------------

    def _grow_for(self, size: int, limit_bytes: int) -> bool:
        """Have the threads grow until a block of ``size`` bytes fits. False, and why, where that cannot be."""
        ready = self._borders[-1]
        needed = ready + size - self._free.tail_bytes(ready)
        if self._failed is not None:
            self._refuse(str(self._failed) or type(self._failed).__name__)
        elif needed > min(_whole_pages(limit_bytes), self._capacity):
            self._refuse(_beyond(limit_bytes))
        elif not self._grow_to(needed, limit_bytes, whole=True):
            self._refuse(self._booking.refusal)
        else:
            return True
        return False

    def _grow_to(self, nbytes: int, limit_bytes: int, *, whole: bool) -> bool:
        """Have the threads grow to ``nbytes`` within the limit and the room for bookings; ``whole``: or not at all. No
        trim is under way."""
        # The last chunk under a limit may end between two huge pages, but not between two pages.
        granule = mmap.PAGESIZE if self._exact else _PAGE
        wanted = min(_round_up(nbytes, granule), self._capacity, _whole_pages(limit_bytes))
        under_way = max(self._threads.target, self._borders[-1])
        if wanted <= under_way:
            return True
        if not whole:
            wanted = _whole_pages(self._booking.grow_within(wanted))
        elif not self._booking.grow_to(wanted):
            # Another process has booked the rest of the machine. A whole huge page more may be too much.
            wanted = _round_up(nbytes, mmap.PAGESIZE)
            if not self._booking.grow_to(wanted):
                return False
        if wanted > under_way:
            self._failed, self._warned_failed = None, False
            self._threads.grow_to(wanted, self, self._chunk_bytes or MAX_CHUNK_BYTES, _PAGE)
        return True

    def back(self, start: int, end: int) -> None:
        """Back a chunk with memory and register it. Called by the threads."""
        address = self._open().address + start
        began = time.perf_counter()
        if self._pinner.pinned:
            touch(address, end - start)
        self._pinner.register(address, end - start)
        log.debug("pinned %d MiB at %.1f GB/s", end - start >> 20, (end - start) / 1e9 / (time.perf_counter() - began))

    def undo(self, start: int, end: int, *, is_backed: bool) -> None:
        """Take the memory of a chunk back. Called by the threads."""
        if self._range is None:
            return
        try:
            if is_backed:
                self._pinner.unregister(self._range.address + start)
        except Exception as error:
            log.debug("a chunk stays registered: %s", str(error))
            return
        self._range.give_back(start, end - start)

    def publish(self, start: int, end: int) -> None:
        """A chunk is ready, and all in front of it. Called by the threads, once more where it was interrupted."""
        assert self._range is not None
        address = self._range.address + start
        if not self._registered or self._registered[-1] != address:
            self._registered.append(address)
        if self._borders[-1] != end:
            self._borders.append(end)
            self._free.insert(Span(start, end, None))
            self.num_growths += 1
        self._booking.backed(end)

    def settle(self, error: BaseException | None) -> None:
        """The threads have ended. An error is told to the next allocate(), which keeps values on the device."""
        if error is not None:
            self._failed = error
        self._booking.shrink_to(self._borders[-1])

    @locked(lambda self: self._opening)
    def _open(self) -> HostRange:
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
        keep_for_good((self._free, self._cut, self._leases, self._dead, self._in_tensors))
        self._registered.clear()
        self._begin()


def _may_write(span: Span) -> bool:
    if span.storage is None:
        return True
    if not is_gone(span.storage):
        return False
    wait_for_devices()
    span.storage = None
    return True


_ARENAS: WeakBag[HostArena] = WeakBag()


def _drop(pinner: Pinner, registered: list[int], booking: Booking, owner: int) -> None:
    """Take leave of the driver before the addresses go: it would not register new memory there."""
    if os.getpid() == owner:
        _unregister_all(pinner, registered)
    booking.release()


def _unregister_all(pinner: Pinner, registered: list[int]) -> None:
    """Registrations that the driver keeps go with the process."""
    while registered:
        try:
            pinner.unregister(registered[-1])
        except RuntimeError as error:
            log.warning("host memory stays registered: %s", str(error))
        registered.pop()


def _after_fork_in_child() -> None:
    for arena in _ARENAS:
        arena._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def block_bytes(nbytes: int) -> int:
    """The bytes of an arena that a block of ``nbytes`` bytes takes."""
    return _round_up(max(nbytes, 1), ALIGNMENT)


def _whole_pages(nbytes: int) -> int:
    return nbytes // mmap.PAGESIZE * mmap.PAGESIZE


def _beyond(limit_bytes: int) -> str:
    return f"the limit is {limit_bytes / 2**30:.2f} GiB"


def address_space_bytes(limit_bytes: int) -> int:
    """Addresses to reserve for an arena that may hold ``limit_bytes``: room to spare costs nothing on 64 bits."""
    return limit_bytes if ctypes.sizeof(ctypes.c_void_p) < 8 else max(limit_bytes, 1 << 40)
