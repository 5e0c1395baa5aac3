"""The copy engine of one device: offload, release, prefetch, reload.

[Note: Lifetimes]
- The engine holds a copy's source by reference until the compute stream has waited on its copy event. Only then is the
  reference dropped, and the caching allocator may reuse the block on the compute stream. Holding the reference *is* the
  mechanism. Never ``record_stream`` (frees late, in the allocator's own time), never ``resize_`` (a user may still hold
  the tensor).

- A reload's target is allocated on the compute stream, and the reload stream waits for that stream before it writes.

- A value that was prefetched but is never read (an exception, a dropped graph) is given up the same way. The compute
  stream waits for the copy, then the reference is dropped.

- So a target is held before the copy into it is started, and any reference is dropped after the wait. An exception
  between two statements leaves one that is held for longer (see [Note: Asynchronous exceptions]). If it comes before a
  source is noted, no transfer was made either: nothing reads the copy on the host.

[Note: Watched inputs]
The caller may write to a graph input once the forward has returned. So the forward waits for the copies of inputs,
which stand in the queue after all copies of earlier calls. Where one graph's output is the next one's input, that would
drain the queue at every layer.

A *watched* input is not waited for. It is held like any other source, and may be taken back. When the backward reads
it, the engine asks autograd's version counter whether the program has written to it since the forward. If so the
backward raises, as autograd does for its own saved tensors. The watch is on the tensor that the caller handed in: of a
view that the graph saves, Inductor makes a tensor with a counter of its own. Only tensors that autograd made are
watched (``Watch.of``): a leaf may be a parameter, whose memory other code manages.

[Note: Long queues]
Where the head is the peak of a step, all that follows it fits, and the backward begins with reloads of gigabytes. FSDP2
sends a table of sizes to the device for each layer, which then waited for all of them. It waited 63 ms for 3.7 GiB in a
step of 405 ms (two H200s, 2026-11-27, ``h200-stock-fsdp``). So a long queue of reloads gives way ([Note: Giving way]).

[Note: Late hosts]
A host that is late finds the device idle, as one that reads from it does ([Note: Host pace]). Giving way costs it time:
20 us for each turn. Stock models under FSDP2 have such hosts. Transformers reads whether the batch is packed, which
waits for the device. A layer then takes the host 3 to 6 ms, and the device 6.4. Forwards in which all copies to the
host gave way took 149 ms, and 141 where none did. With a host that is paced they took 143 ms, and 139 to 144; two in
which copies gave way took 0.7 and 0.8 s (two H200s, ``archive/2026-11-29-2xh200-stock-fsdp-giving-way.json``). So
copies to the host do not give way in a process with FSDP2. Its own small copies go to the device. A program that reads
within its forward waits for ours there.

Both directions are bounded in bytes, never in counts: bytes under way to the host whose sources are still held, and
bytes on the device that were reloaded ahead of use.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fxoffload.counters import counters
from fxoffload.errors import ModifiedInputError
from fxoffload.reset import on_reset
from fxoffload.runtime.copies.streams import CopyStreams, CudaCopies, HostCopies, Wait
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock, locked
from fxoffload.runtime.forked import keep_for_good
from fxoffload.runtime.host_memory.arena import (
    ALIGNMENT,
    CudaPinner,
    Fence,
    HeapMemory,
    HostArena,
    HostBlock,
    address_space_bytes,
)
from fxoffload.runtime.host_memory.free_list import younger
from fxoffload.runtime.host_memory.limits import default_host_budget_bytes
from fxoffload.runtime.host_memory.trim import HostTrim
from fxoffload.runtime.profiler.allocator_history import cuda_history
from fxoffload.runtime.profiler.allocator_trace import cuda_memory
from fxoffload.runtime.profiler.first_arguments import others_watch
from fxoffload.runtime.profiler.stream_events import cuda_events
from fxoffload.runtime.save_order import SaveOrder
from fxoffload.runtime.switches import on_gpu
from fxoffload.runtime.tracker.step_tracker import StepTracker
from fxoffload.runtime.transactions import transaction
from fxoffload.runtime.transfer import Group, There, Transfer, View, Watch
from fxoffload.step.offload_candidate import RANGE_ALIGNMENT
from fxoffload.torch_private.fsdp2 import fsdp2_is_used

log = logging.getLogger(__name__)

# 20 ms of copies: one layer's reloads are mostly less, and are copied while another layer computes.
LONG_QUEUE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes. ``host``: None for the machine's default; the others: None for windows that follow the segments."""

    host: int | None
    in_flight: int | None
    prefetch: int | None


class _Ahead(NamedTuple):
    """A value that is on the device early. Its transfer may be gone: the copy must be waited for all the same."""

    transfer: weakref.ref[Transfer]
    there: There
    nbytes: int


@dataclass(slots=True)
class _InFlight:
    """A copy to the host whose source is still held. ``source`` is the reference of [Note: Lifetimes]."""

    transfer: weakref.ref[Transfer]
    source: Tensor
    event: object
    nbytes: int
    stream: object


class CopyEngine:
    """Moves storages between one device and its host arena. All methods may be called from any thread.

    ``on_drop``: a hook for tests, called with the source of a copy right before its reference is dropped.
    """

    def __init__(self, device: torch.device, streams: CopyStreams, arena: HostArena) -> None:
        self.device = device
        self.streams = streams
        self.arena = arena
        self.save_order = SaveOrder()
        on_gpu = device.type == "cuda"
        self.calls = StepTracker(
            self._sources,
            in_background=on_gpu,
            memory=cuda_memory(device) if on_gpu else None,
            history=cuda_history(device) if on_gpu else None,
            others=others_watch(device) if on_gpu else None,
            trim=HostTrim(self),
            events=cuda_events(device) if on_gpu else None,
        )
        self.on_drop: Callable[[Tensor], None] | None = None
        self._lock = ForkSafeRLock()
        self._begin()
        self._order = itertools.count(1)
        self._warned_full = False
        self._asked_bytes = 0  # of host memory, by the user

    def forget(self) -> None:
        """Drop the state of compiled code. Offloaded values stay until their backward, and so does host memory."""
        self.calls.forget()
        self._warned_full = False

    def _begin(self) -> None:
        """The state of an engine that has nothing under way."""
        self._torn = False
        self._in_flight: deque[_InFlight] = deque()
        self._in_flight_bytes = 0
        self._queue: deque[weakref.ref[Transfer]] = deque()
        # Whose backward is expected after the one that runs.
        self._predicted: tuple[weakref.ref[Group], ...] = ()
        # Serials that were handed out since the queue was made. Late ones still stand in it, and must not be reloaded a
        # second time.
        self._taken: set[int] = set()
        self._ahead: dict[int, _Ahead] = {}  # by serial; also of dead transfers
        self._ahead_bytes = 0
        self._reclaimed_bytes = 0
        self._landing: Sequence[Tensor] = ()  # targets of the reloads that are being started
        self._dead: deque[weakref.ref[Transfer]] = deque()  # that were in flight or ahead
        self._bury = self._dead.append  # in C: no exception comes in between

    def _mend(self) -> None:
        """Source of truth: each transfer's ``there`` says what the device holds; all other sources are in flight."""
        self.streams.go_back()
        for item in list(self._ahead.values()):
            transfer = item.transfer()
            if transfer is not None and transfer.there is not item.there:
                self._wait_for(item.there)
                del self._ahead[transfer.serial]
        if self._landing:
            with self.streams.reloading():
                end = self.streams.reload(())
            self.streams.compute_waits_for(end, Wait.TARGET_READY)
            self._landing = ()
        sources = {id(item.there.buffer) for item in self._ahead.values()}
        self._in_flight = deque(item for item in self._in_flight if id(item.source) not in sources)
        self._in_flight_bytes = sum(item.nbytes for item in self._in_flight)
        self._ahead_bytes = sum(item.nbytes for item in self._ahead.values() if not item.there.reclaimed)
        self._reclaimed_bytes = sum(item.nbytes for item in self._ahead.values() if item.there.reclaimed)

    def _abandon(self) -> None:
        """In a forked child: events of the parent are kept, and nothing is under way."""
        keep_for_good((self._in_flight, self._ahead, self._landing))
        self._begin()

    # -- device to host ------------------------------------------------------------------------------------------------

    @transaction
    def offload(
        self,
        storages: Sequence[Sequence[Tensor]],
        budgets: Budgets,
        *,
        reclaimable: bool,
        watches: Sequence[Watch | None] = (),
    ) -> list[Transfer | None]:
        """Start one copy per storage; None where the host is full. Tensors of one entry share a storage.

        ``reclaimable``: no code writes to the sources before the backward (see ``Transfer``). ``watches``: of each
        storage that the caller may write to (see [Note: Watched inputs]).
        """
        self._collect()
        self.streams.offload_waits_for_compute()
        stream = self.streams.compute_stream()
        gives_way = self.streams.host_waits() and not fsdp2_is_used()  # see [Note: Late hosts]
        ranges = [_byte_range(tensors) for tensors in storages]
        blocks = self._blocks([end - start for start, end in ranges], budgets)
        # A late host makes late copies: all of them wait at once.
        self._wait_for_reads([block for block in blocks if block is not None])
        started: list[Transfer | None] = []
        with self.streams.offloading():
            each = zip(storages, ranges, blocks, watches or [None] * len(storages), strict=True)
            for tensors, (start, end), block, watch in each:
                if block is None:
                    self._warn_full(end - start, budgets)
                    started.append(None)
                    continue
                source = torch.empty(0, dtype=torch.uint8, device=self.device)
                source.set_(tensors[0].untyped_storage(), start, (end - start,), (1,))
                block.span.written = event = self.streams.offload(self._pieces(block, source), gives_way=gives_way)
                views = [
                    View(t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset()) - start // t.element_size())
                    for t in tensors
                ]
                transfer = Transfer(end - start, block, views, reclaimable=reclaimable, watch=watch)
                ref = weakref.ref(transfer, self._bury)
                self._in_flight.append(_InFlight(ref, source, event, end - start, stream))
                self._in_flight_bytes += end - start
                started.append(transfer)
        nbytes = [t.nbytes for t in started if t is not None]
        counters.add("bytes_offloaded", sum(nbytes))
        counters.add("num_copies", len(nbytes))
        return started

    def _blocks(self, sizes: Sequence[int], budgets: Budgets) -> list[HostBlock | None]:
        """A block of host memory for each size in bytes; None where the host is full."""
        # The default budget is read from the machine, which takes longer than a step should spend on every copy.
        found: list[HostBlock | None] = [None] * len(sizes)
        if budgets.host is None:
            found = self.arena.allocate_all_ready(sizes)
        for i, nbytes in enumerate(sizes):
            found[i] = found[i] or self.arena.allocate(nbytes, self.host_budget_bytes(budgets))
        return found

    def _wait_for_reads(self, blocks: Sequence[HostBlock]) -> None:
        """Let copies into ``blocks`` wait for those out of them."""
        fences = [block.fence for block in blocks]
        youngest = functools.reduce(younger, fences, None)
        if youngest is not None:
            self.streams.offload_waits_for(youngest.event, Wait.HOST_READ)
            for block in blocks:
                block.fence = None

    def _pieces(self, block: HostBlock, on_device: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of a copy: (host, device) bytes of each chunk of host memory that the block lies in."""
        found = self.arena.pieces(block, on_device.numel())
        if len(found) == 1:  # mostly
            return [(found[0][1], on_device)]
        return [(host, on_device[at : at + host.numel()]) for at, host in found]

    @transaction
    def release(self, limit_bytes: int) -> None:
        """Drop sources, oldest copy first, until at most ``limit_bytes`` are held."""
        count, held = 0, self._in_flight_bytes
        while count < len(self._in_flight) and held > limit_bytes:
            held -= self._in_flight[count].nbytes
            count += 1
        if count:
            self._drop(list(itertools.islice(self._in_flight, count)))
            for _ in range(count):
                self._in_flight_bytes -= self._in_flight.popleft().nbytes

    def _drop(self, items: Sequence[_InFlight]) -> None:
        """Wait for the copies of sources, whose references are given up next."""
        # One stream makes these copies in order: waiting for the youngest of each compute stream covers the rest.
        youngest = {item.stream: item for item in items}
        for item in youngest.values():
            self.streams.compute_waits_for(item.event, Wait.SOURCE_DONE, item.stream)
        if self.on_drop is not None:
            for item in items:
                self.on_drop(item.source)

    @transaction
    def wait_offload(self, transfers: Sequence[Transfer]) -> None:
        """Let the compute stream wait for these copies to the host, but for those of watched inputs."""
        awaited = [t for t in transfers if t.watch is None]
        if awaited:
            self.streams.compute_waits_for(awaited[-1].block.span.written, Wait.SOURCE_DONE)

    # -- host to device ------------------------------------------------------------------------------------------------

    @transaction
    def request(self, group: Group, *, keeps_graph: bool, prefetch: bool, across_graphs: bool) -> None:
        """The backward of ``group`` begins: queue its transfers, then those that follow, as its plan says or
        the save order predicts."""
        self._collect()
        wanted = group.in_need_order()
        mine = set(wanted)
        # Before the surprise: a group that was passed over may still come right after this one.
        following = self.save_order.begin_backward(group, keeps_graph=keeps_graph)
        is_surprise = self._is_surprise(group)
        if group.following is not None:
            following = [g for ref in group.following if (g := ref()) is not None and len(g)]
        # A target belongs to the compute stream that it was allocated on.
        following = [g for g in following if g.stream == group.stream] if across_graphs else []
        for other in following:
            wanted.extend(other.in_need_order())
        self._predicted = tuple(map(weakref.ref, following)) if prefetch else ()
        self._reclaim_all(set(wanted) if group.takes_below else mine)
        expected = set(wanted)
        for item in list(self._ahead.values()):
            transfer = item.transfer()
            if transfer is None:
                continue
            # Values reloaded for another backward would leave no room for this one's.
            if transfer not in expected or (is_surprise and not item.there.reclaimed and transfer not in mine):
                self._wait_for(item.there)
                self._forget_ahead(transfer)
        self._queue = deque(weakref.ref(t) for t in wanted) if prefetch else deque()
        self._taken.clear()

    def _is_surprise(self, group: Group) -> bool:
        """Whether the backward of another group was predicted. Counts it. One that holds nothing is never predicted."""
        predicted = self._predicted[0]() if self._predicted else None
        if predicted is None or predicted is group or not len(group):
            return False
        passed = itertools.takewhile(lambda ref: ref() is not group, self._predicted)
        for ref in passed:
            if (other := ref()) is not None:
                other.was_passed_over = True
        counters.add("num_wrong_predictions")
        return True

    @transaction
    def prefetch(self, budget_bytes: int, *, reclaimed_share: int = 0, at_least_one: bool = True) -> None:
        """Start queued reloads while the bytes reloaded ahead stay within ``budget_bytes``.

        ``reclaimed_share``: how bytes that were reclaimed and wait to be read change the budget. A share of 1 adds
        them: a backward begins with such values, and nothing would be reloaded while the segments that read them run.
        A share of -1 takes them off, 0 ignores them. ``at_least_one``: one storage may be ahead, however large.
        """
        self._collect()
        budget_bytes += reclaimed_share * self._reclaimed_bytes
        due: list[Transfer] = []
        ahead = self._ahead_bytes
        while self._queue:
            transfer = self._queue[0]()
            if transfer is not None and self._is_to_come(transfer):
                if (ahead or not at_least_one) and ahead + transfer.nbytes > budget_bytes:
                    break
                ahead += transfer.nbytes
                due.append(transfer)
            self._queue.popleft()
        self._start_reloads(due)

    def _is_to_come(self, transfer: Transfer) -> bool:
        """Not on the device, and not handed out. A forked child cannot reload what its parent predicted for itself."""
        return transfer.there is None and transfer.serial not in self._taken and self.arena.has(transfer.block)

    @transaction
    def take(self, transfers: Sequence[Transfer]) -> list[Tensor]:
        """The bytes of each transfer on the device, readable by the compute stream from here on.

        Raises:
            ModifiedInputError: the program has written to a watched input since its forward.
        """
        late = [t for t in transfers if t.there is None]
        if late:
            counters.add("num_prefetch_misses", len(late))
            self._start_reloads(late)
        _check_watches(transfers)
        found = [(t, t.there) for t in transfers if t.there is not None]
        # The copies of one direction run in order: the youngest stands for all.
        reclaimed = [(t.serial, there.ready) for t, there in found if there.reclaimed]
        if reclaimed:
            # Their buffers are the sources, which the copies to the host may still be reading.
            self.streams.compute_waits_for(max(reclaimed, key=_first)[1], Wait.SOURCE_DONE)
        reloaded = [(_reload_order(t), there.ready) for t, there in found if not there.reclaimed]
        if reloaded:
            self.streams.compute_waits_for(max(reloaded, key=_first)[1], Wait.TARGET_READY)
        for transfer in transfers:
            self._forget_ahead(transfer)
        self._taken.update(transfer.serial for transfer in transfers)
        return [there.buffer for _, there in found]

    def _start_reloads(self, transfers: Sequence[Transfer]) -> None:
        missing = [t for t in transfers if not self._reclaim(t)]
        if not missing:
            return
        # Targets are allocated on the compute stream, before the reload stream waits for it.
        stream = self.streams.compute_stream()
        # Where one of them cannot be had, no transfer has a target, or it would pass for one that was reloaded.
        buffers = [torch.empty(t.nbytes, dtype=torch.uint8, device=self.device) for t in missing]
        self.streams.reload_waits_for_compute()
        self._landing = buffers
        gives_way = self.streams.host_waits() or _is_long_queue(sum(t.nbytes for t in missing))
        with self.streams.reloading():
            for transfer, buffer in zip(missing, buffers, strict=True):
                self._reload(transfer, buffer, stream, gives_way)
        self._landing = ()

    def _reload(self, transfer: Transfer, buffer: Tensor, stream: object, gives_way: bool) -> None:
        pieces = [(on_device, host) for host, on_device in self._pieces(transfer.block, buffer)]
        ready = self.streams.reload(pieces, gives_way=gives_way)
        transfer.block.span.fence = Fence(next(self._order), ready)
        self._note_ahead(transfer, There(buffer, ready, stream, False))
        self._ahead_bytes += transfer.nbytes
        counters.add("bytes_reloaded", transfer.nbytes)
        counters.add("num_copies")

    def _reclaim(self, transfer: Transfer) -> bool:
        """Take a source back that is still on the device: no reload, and no bytes beyond those it holds already."""
        if not transfer.reclaimable:
            return False
        for i in range(len(self._in_flight) - 1, -1, -1):
            if self._in_flight[i].transfer() is transfer:
                self._take_back(transfer, self._in_flight[i])
                del self._in_flight[i]
                return True
        return False

    def _reclaim_all(self, transfers: Collection[Transfer]) -> None:
        """Take back every source of these that is still held, before the backward's own release drops it."""
        kept: deque[_InFlight] = deque()
        for item in self._in_flight:
            transfer = item.transfer()
            if transfer is not None and transfer in transfers and transfer.reclaimable and transfer.there is None:
                self._take_back(transfer, item)
            else:
                kept.append(item)
        self._in_flight = kept

    def _take_back(self, transfer: Transfer, item: _InFlight) -> None:
        # Takes no bytes of the prefetch budget: its memory was held all the time.
        self._note_ahead(transfer, There(item.source, item.event, item.stream, True))
        self._in_flight_bytes -= item.nbytes
        self._reclaimed_bytes += transfer.nbytes
        counters.add("bytes_reclaimed", transfer.nbytes)

    def _note_ahead(self, transfer: Transfer, there: There) -> None:
        self._ahead[transfer.serial] = _Ahead(weakref.ref(transfer, self._bury), there, transfer.nbytes)
        transfer.there = there

    def _forget_ahead(self, transfer: Transfer) -> None:
        transfer.there = None
        self._drop_ahead(transfer.serial)

    def _drop_ahead(self, serial: int) -> None:
        item = self._ahead.pop(serial, None)
        if item is None:
            return
        if item.there.reclaimed:
            self._reclaimed_bytes -= item.nbytes
        else:
            self._ahead_bytes -= item.nbytes

    def _wait_for(self, there: There) -> None:
        """Call this before dropping the reference to a buffer that nothing reads."""
        self.streams.compute_waits_for(there.ready, Wait.TARGET_READY, there.stream)

    @transaction
    def _sources(self) -> Counter[int]:
        """How many sources are held of each storage."""
        return Counter(item.source.untyped_storage()._cdata for item in self._in_flight)

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Drop the memory of dead transfers: sources of copies that nothing will reload, and buffers that were
        reloaded for nothing."""
        count = len(self._dead)
        if not count:
            return
        kept: deque[_InFlight] = deque()
        abandoned: list[_InFlight] = []
        for item in self._in_flight:
            (abandoned if item.transfer() is None else kept).append(item)
        if abandoned:
            self._drop(abandoned)
            self._in_flight = kept
            self._in_flight_bytes -= sum(item.nbytes for item in abandoned)
        for serial, item in list(self._ahead.items()):
            if item.transfer() is None:
                self._wait_for(item.there)
                self._drop_ahead(serial)
        for _ in range(count):
            self._dead.popleft()

    def _warn_full(self, nbytes: int, budgets: Budgets) -> None:
        counters.add("bytes_kept_host_full", nbytes)
        if not self._warned_full:
            self._warned_full = True
            log.warning(
                "the host budget of %.2f GiB is used up: values stay on the device from here on (counted in "
                "stats().bytes_kept_host_full); raise host_budget or offload less",
                self.host_budget_bytes(budgets) / 2**30,
            )

    def host_budget_bytes(self, budgets: Budgets) -> int:
        """The user's budget; by default the process' share of the machine less the memory of other devices' arenas."""
        if budgets.host is not None:
            return budgets.host
        return default_host_budget_bytes() - sum(e.arena.reserved_bytes for e in engines() if e is not self)

    def reserve(self, nbytes: int, budgets: Budgets, *, stays: bool = False) -> None:
        """Pin host memory in the background, within the budget. ``stays``: it is not trimmed."""
        if stays:
            self._asked_bytes = max(self._asked_bytes, nbytes)
        self.arena.reserve(nbytes, self.host_budget_bytes(budgets))

    def pin(self, nbytes: int, budgets: Budgets) -> bool:
        """As ``reserve``, and returns when that is over: whether ``nbytes`` are there. Steps of other threads go on."""
        self.reserve(nbytes, budgets)
        return self.arena.wait_until_grown() and self.arena.reserved_bytes >= nbytes

    @transaction
    def drop_abandoned(self) -> None:
        """Drop the device memory of forwards without a backward: sources of copies, and buffers that were reloaded for
        nothing. The next copy does that too; other code may want the memory before."""
        self._collect()

    @transaction
    def host_bytes_in_use(self) -> int:
        """Bytes of live host blocks."""
        self._collect()
        return self.arena.in_use_bytes

    @transaction
    def release_host_memory(self) -> int:
        """Give the arena's memory back. Returns bytes. See ``HostArena.release``."""
        self.release(0)
        self._collect()
        self.streams.synchronize()
        given = self.arena.release()
        self._asked_bytes = 0
        return given

    @transaction
    def mark_host_memory(self) -> None:
        """See ``HostMemory``."""
        self._collect()
        self.arena.mark()

    def host_bytes_needed(self) -> int:
        """See ``HostMemory``."""
        return max(self.arena.highest_bytes, self._asked_bytes)

    def host_bytes_reserved(self) -> int:
        """See ``HostMemory``."""
        return self.arena.reserved_bytes

    def may_trim(self) -> bool:
        """See ``HostMemory``. Not while memory is being pinned, nor while a CUDA graph is captured: a wait for copies
        might break it."""
        if self.arena.is_growing:
            return False
        if self.device.type != "cuda":
            return True
        return not on_gpu(self.device, torch.cuda.is_current_stream_capturing)

    def trim_host_memory(self, keep_bytes: int, limit_s: float) -> int:
        """See ``HostMemory``."""
        given = self.arena.trim(max(keep_bytes, self._asked_bytes), self.streams.wait_for_copies, limit_s)
        if given:
            counters.add("bytes_host_trimmed", given)
        return given


def _is_long_queue(nbytes: int) -> bool:
    """Whether reloads that are queued at once have to let others pass. See [Note: Long queues]."""
    return nbytes > LONG_QUEUE_BYTES and fsdp2_is_used()


def _check_watches(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        if transfer.watch is not None and transfer.watch.is_broken():
            view = transfer.views[0]
            raise ModifiedInputError(
                f"expected the {view.dtype} input of shape {list(view.shape)} that a compiled forward saved to be "
                "unchanged until its backward, found it modified by an in-place operation. Eager PyTorch raises for "
                "such a value too. Make the operation out of place, or hand the compiled code a clone"
            )


def _reload_order(transfer: Transfer) -> int:
    fence = transfer.block.span.fence
    assert fence is not None
    return fence.order


def _first(pair: tuple[int, object]) -> int:
    return pair[0]


def _byte_range(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """First and one past the last byte of the shared storage that the tensors cover, the first rounded down."""
    first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous():  # mostly
        at = int(first.storage_offset()) * first.element_size()
        return at // RANGE_ALIGNMENT * RANGE_ALIGNMENT, at + first.nbytes
    starts, ends = [], []
    for t in tensors:
        size = t.element_size()
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else -1
        starts.append(t.storage_offset() * size)
        ends.append((t.storage_offset() + last + 1) * size)
    start = min(starts) // RANGE_ALIGNMENT * RANGE_ALIGNMENT
    return start, max(ends)


_ENGINES: dict[torch.device, CopyEngine] = {}
_ENGINES_LOCK = ForkSafeRLock()  # to make one


def engine_for(device: torch.device) -> CopyEngine:
    """The engine of ``device`` (with an index on a GPU); made on first use."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    engine = _ENGINES.get(device)
    return _make_engine(device) if engine is None else engine


@locked(lambda device: _ENGINES_LOCK)
def _make_engine(device: torch.device) -> CopyEngine:
    if device not in _ENGINES:
        space = address_space_bytes(default_host_budget_bytes())
        if device.type == "cuda":
            engine = CopyEngine(device, CudaCopies(device), HostArena(CudaPinner(device), space))
        else:
            engine = CopyEngine(device, HostCopies(), HostArena(HeapMemory(), space))
        _ENGINES[device] = engine
    return _ENGINES[device]


def engines() -> list[CopyEngine]:
    """All engines made so far."""
    return list(_ENGINES.values())


def _forget() -> None:
    for engine in engines():
        engine.forget()


on_reset(_forget)


def _after_fork_in_child() -> None:
    for engine in engines():
        engine._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)

assert ALIGNMENT % RANGE_ALIGNMENT == 0
