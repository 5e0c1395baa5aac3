"""Moves the bytes of holdings between a device and the host image.

[Note: Order of copies]
To the host: the copy stream waits for the caller's stream when the transition begins. The storage is emptied after the
host has seen the copy finish: no stream can still read it then.

To the device: memory is allocated on the caller's stream, and then the copy stream waits for that stream before it
writes. Readers wait for the copy (``fence``). The order matters, for other threads use the caller's stream too: work
that they queue between a wait and an allocation may still use the block that is allocated. All copies of one direction
come in order, as on one stream (see [Note: Giving way]), so that a reader waits for the youngest only.

[Note: Ahead]
The search for tensors that leave takes the host 10 to 30 ms, in which nothing would be copied. So an offload that a
caller waits for first copies the storages that were away before, into the blocks that they had. That is safe: a copy
changes nothing on the device, and the block of a storage on the device holds nothing. If a storage has another owner by
now, its copy was in vain. No code may write a leaving storage while the call runs; code that reads it meanwhile is
waited for before the storage is emptied.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fxoffload.phases.moving.host_image import HostImage
from fxoffload.phases.moving.room import Room
from fxoffload.phases.moving.storages import Holding, Where
from fxoffload.phases.moving.worker import YIELD_S
from fxoffload.runtime.copies.streams import CopyStreams, CudaCopies, HostCopies, Wait
from fxoffload.runtime.host_memory.arena import Fence

AT_ONCE, AT_ONCE_BYTES = 8, 256 << 20
# A third of the time that PCIe 5 takes for a byte; a link faster than 200 GB/s would be held up.
PACE_S_PER_BYTE = 1 / 200e9


class Ahead:
    """Copies to the host that were started before the search for leaving tensors; see [Note: Ahead].

    Args:
        started: holdings made for this, with the blocks that are written.
    """

    def __init__(self, started: Sequence[Holding] = ()) -> None:
        self._started = {holding.storage._cdata: holding for holding in started}

    def split(self, holdings: Iterable[Holding]) -> tuple[list[Holding], list[Holding]]:
        """Those whose bytes are on their way to the block that they have, and the others."""
        under_way: list[Holding] = []
        others: list[Holding] = []
        for holding in holdings:
            known = self._started.get(holding.storage._cdata)
            is_known = known is not None and known.block is holding.block and known.nbytes == holding.nbytes
            (under_way if is_known else others).append(holding)
        return under_way, others

    def holdings(self) -> list[Holding]:
        """Made for this."""
        return list(self._started.values())

    def devices(self) -> set[torch.device]:
        """Where the copies come from."""
        return {holding.device for holding in self._started.values()}

    def let_go(self) -> None:
        """The copies are finished: the storages need not be held any longer."""
        self._started.clear()


class Mover:
    """See [Note: Order of copies].

    Args:
        make_copies: the copy streams of a device; by default CUDA streams, or immediate copies on a CPU.
    """

    def __init__(self, image: HostImage, make_copies: Callable[[torch.device], CopyStreams] | None = None) -> None:
        self._image = image
        self._make = make_copies or (lambda device: CudaCopies(device) if device.type == "cuda" else HostCopies())
        self._copies: dict[torch.device, CopyStreams] = {}
        self._serials = itertools.count(1)
        self.room = Room()

    def copies(self, device: torch.device) -> CopyStreams:
        """The copy streams of a device."""
        if device not in self._copies:
            self._copies[device] = self._make(device)
        return self._copies[device]

    def before_leaving(self, holdings: Iterable[Holding]) -> None:
        """In the caller's thread: work that its stream has queued so far comes before the copies."""
        for device in {holding.device for holding in holdings}:
            copies = self.copies(device)
            copies.offload_waits_for_compute()
            if isinstance(copies, CudaCopies):  # a stream of weights may be reading tensors on the device
                copies.offload_stream.wait_stream(copies.reload_stream)

    def start_ahead(self, ahead: Ahead) -> None:
        """Starts to copy storages that will leave, very likely, into the blocks that they had. ``finish`` ends it."""
        for part in parts(ahead.holdings()):
            self._start_leaving(part, gives_way=False)

    def finish(self, ahead: Ahead) -> None:
        """Waits for copies that turned out useless, and lets their storages go."""
        for device in ahead.devices():
            self.copies(device).synchronize()
        ahead.let_go()

    def leave(
        self, holdings: Sequence[Holding], ahead: Ahead, freed: Callable[[list[Holding]], None], *, gives_way: bool
    ) -> None:
        """Copies to the host; calls ``freed`` for holdings, a few at a time, whose bytes have arrived there.

        Args:
            ahead: copies that are under way already.
            gives_way: whether others may need the link meanwhile.

        Raises:
            HostMemoryError: there is no host memory.
        """
        pending: deque[tuple[list[Holding], Any]] = deque()
        try:
            # After the copies, and after readers that began before the tensors went away (``before_leaving``).
            ends = {device: self._end_of_offloads(device) for device in ahead.devices()}
            under_way, rest = ahead.split(holdings)
            pending.extend((part, ends[part[0].device]) for part in parts(under_way))
            for part in parts(rest):
                pending.append((part, self._start_leaving(part, gives_way=gives_way)))
                # In the background not all at once: the thread that launches kernels needs the interpreter now.
                pace_s = PACE_S_PER_BYTE if gives_way else 0.0
                time.sleep(max(YIELD_S, pace_s * sum(held.nbytes for held in part)))
                while pending and (pending[0][1] is None or pending[0][1].query()):
                    freed(pending.popleft()[0])
            while pending:
                event = pending[0][1]
                if event is not None:
                    event.synchronize()
                freed(pending.popleft()[0])
            for end in ends.values():
                if end is not None:
                    end.synchronize()
            ahead.let_go()
        except BaseException:
            for device in {holding.device for holding in holdings}:
                self.copies(device).go_back()
                self.copies(device).synchronize()
            self.finish(ahead)
            raise

    def _end_of_offloads(self, device: torch.device) -> Any:
        copies = self.copies(device)
        with copies.offloading():
            return copies.offload(())

    def begin_arrivals(self) -> None:
        """A transition to the device begins: findings about the allocator's memory may be wrong by now."""
        self.room = Room()

    def arrive(self, holdings: Sequence[Holding]) -> None:
        """Allocates and starts the copies to the device, in the caller's thread and order.

        A failure empties the storages that were allocated and is raised: everything is on the host as before.
        """
        try:
            self.start_arriving(holdings, gives_way=False)
        except BaseException:
            for holding in holdings:
                self.give_up(holding)
            raise

    def start_arriving(self, holdings: Sequence[Holding], *, gives_way: bool = True) -> None:
        """Allocates on the current stream and starts the copies; one that there is no room for ends it.

        Args:
            gives_way: whether others may need the link meanwhile.

        Raises:
            torch.OutOfMemoryError: for that one, which has ``serial`` 0, like those that follow it.
        """
        for piece in self.room.pieces(holdings):
            for part in parts(piece):
                allocated: list[Holding] = []
                try:
                    for holding in part:
                        self.allocate(holding)
                        allocated.append(holding)
                finally:
                    if allocated:
                        self._fill(allocated, gives_way)

    def allocate(self, holding: Holding) -> None:
        """Memory for a storage, on the current stream."""
        holding.storage.resize_(holding.nbytes)

    def before_writing(self, device: torch.device) -> None:
        """Memory was allocated: work that the current stream has queued so far may still use it."""
        self.copies(device).reload_waits_for_compute()

    def give_up(self, holding: Holding) -> None:
        """It stays on the host: empties its storage, when nothing is being copied to it any more."""
        holding.where = Where.HOST
        self.clear(holding)

    def clear(self, holding: Holding) -> None:
        """As if its copy had not been started."""
        holding.serial = 0  # first: of a holding that was not started only the bytes on the host count
        self.copies(holding.device).synchronize()
        holding.storage.resize_(0)
        holding.event = None

    def go_back(self) -> None:
        """An exception came in between: see ``CopyStreams.go_back``."""
        for copies in list(self._copies.values()):
            copies.go_back()

    def synchronize(self) -> None:
        """Waits for all copies."""
        for copies in list(self._copies.values()):
            copies.synchronize()

    def _fill(self, part: list[Holding], gives_way: bool) -> None:
        try:
            self.before_writing(part[0].device)
            self._start_copies(part, gives_way)
        except BaseException:
            for holding in part:
                self.clear(holding)
            raise

    def _start_copies(self, part: list[Holding], gives_way: bool) -> None:
        copies = self.copies(part[0].device)
        with copies.reloading():
            pieces = [piece for holding in part for piece in self._pieces(holding)]
            event = copies.reload(pieces, gives_way=gives_way)
        serial = next(self._serials)
        fence = Fence(serial, event) if event is not None else None
        for holding in part:
            assert holding.block is not None
            holding.block.fence = fence
            holding.event = event
            holding.where = Where.ARRIVING
            holding.serial = serial  # last: it says that the copy was started

    def _start_leaving(self, part: list[Holding], *, gives_way: bool) -> Any:
        """Returns the event of the copies."""
        for holding in part:
            if holding.block is None:
                holding.block = self._image.take(holding.nbytes)
        copies = self.copies(part[0].device)
        with copies.offloading():
            fences = [holding.block.fence for holding in part if holding.block is not None]
            for fence in {id(fence): fence for fence in fences if fence is not None}.values():
                copies.offload_waits_for(fence.event, Wait.HOST_READ)
            pieces = [(host, device) for holding in part for device, host in self._pieces(holding)]
            return copies.offload(pieces, gives_way=gives_way)

    def _pieces(self, holding: Holding) -> list[tuple[Tensor, Tensor]]:
        """The parts of a storage on the device and on the host."""
        assert holding.block is not None
        on_device = holding.bytes_on_device()
        pieces = self._image.pieces(holding.block, holding.nbytes)
        if len(pieces) == 1:
            return [(on_device, pieces[0][1])]
        return [(on_device[at : at + host.numel()], host) for at, host in pieces]


def parts(holdings: Sequence[Holding]) -> Iterator[list[Holding]]:
    """Holdings that are copied with one event, on one device.

    Few, for memory is free, and a reader goes on, when all have arrived. Not one by one, for that takes the host four
    times as long.
    """
    part: list[Holding] = []
    nbytes = 0
    for holding in holdings:
        if part and (
            len(part) == AT_ONCE or nbytes + holding.nbytes > AT_ONCE_BYTES or holding.device != part[0].device
        ):
            yield part
            part, nbytes = [], 0
        part.append(holding)
        nbytes += holding.nbytes
    if part:
        yield part
