"""Moves the bytes of holdings between a device and the host image.

[Note: Order of copies]
To the host: the copy stream waits for the caller's stream (when the transition begins), the storage is emptied after
the host has seen the copy finish: no stream can still read it then. To the device: memory is allocated on the caller's
stream and the copy stream waits for that stream before it writes; whoever reads waits for the copy (``fence``). All
copies of one direction run on one stream in order, so that a reader waits for the youngest only.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fxoffload.phases.host_image import HostImage
from fxoffload.phases.storages import Holding, Where
from fxoffload.runtime.streams import CopyStreams, CudaCopies, HostCopies, Wait


def is_done(event: Any) -> bool:
    """Whether a copy is finished."""
    return event is None or event.query()


class Mover:
    """See [Note: Order of copies].

    Args:
        image: the memory on the host.
        make_copies: the copy streams of a device; by default two CUDA streams, or immediate copies on a CPU.
    """

    def __init__(self, image: HostImage, make_copies: Callable[[torch.device], CopyStreams] | None = None) -> None:
        self._image = image
        self._make = make_copies or (lambda device: CudaCopies(device) if device.type == "cuda" else HostCopies())
        self._copies: dict[torch.device, CopyStreams] = {}
        self._serials = itertools.count(1)

    def copies(self, device: torch.device) -> CopyStreams:
        """The copy streams of a device."""
        if device not in self._copies:
            self._copies[device] = self._make(device)
        return self._copies[device]

    def before_leaving(self, holdings: Iterable[Holding]) -> None:
        """In the caller's thread: what its stream has queued so far is part of what is copied."""
        for device in {holding.device for holding in holdings}:
            copies = self.copies(device)
            copies.offload_waits_for_compute()
            if isinstance(copies, CudaCopies):  # a stream of weights may be reading what is on the device
                copies.offload_stream.wait_stream(copies.reload_stream)

    def leave(self, holdings: Sequence[Holding], freed: Callable[[Holding], None]) -> None:
        """Copies to the host; calls ``freed`` for each holding whose bytes have arrived there.

        Raises:
            HostMemoryError: there is no host memory.
        """
        pending: deque[tuple[Holding, Any]] = deque()
        try:
            for holding in holdings:
                pending.append((holding, self._start_leaving(holding)))
                while pending and is_done(pending[0][1]):
                    freed(pending.popleft()[0])
            while pending:
                event = pending[0][1]
                if event is not None:
                    event.synchronize()
                freed(pending.popleft()[0])
        except BaseException:
            for device in {holding.device for holding in holdings}:
                self.copies(device).synchronize()
            raise

    def arrive(self, holdings: Sequence[Holding]) -> None:
        """Allocates and starts the copies to the device, in the caller's thread and order.

        A failure empties what was allocated and is raised: everything is on the host as before.
        """
        started: list[Holding] = []
        try:
            for device in {holding.device for holding in holdings}:
                self.before_arriving(device)
            for holding in holdings:
                started.append(holding)
                self.start_arriving(holding)
        except BaseException:
            for holding in started:
                self.give_up(holding)
            raise

    def before_arriving(self, device: torch.device) -> None:
        """What the current stream has queued so far may still read the memory that is allocated next."""
        self.copies(device).reload_waits_for_compute()

    def start_arriving(self, holding: Holding) -> None:
        """Allocates on the current stream and starts the copy."""
        holding.storage.resize_(holding.nbytes)
        target = holding.bytes_on_device()
        copies = self.copies(holding.device)
        with copies.reloading():
            holding.event = copies.reload((target[at : at + host.numel()], host) for at, host in self._pieces(holding))
        holding.serial = next(self._serials)
        holding.where = Where.ARRIVING

    def give_up(self, holding: Holding) -> None:
        """It could not be started, or all of it: empties it again, when nothing is being copied to it any more."""
        self.copies(holding.device).synchronize()
        holding.storage.resize_(0)
        holding.event, holding.serial, holding.where = None, 0, Where.HOST

    def _start_leaving(self, holding: Holding) -> Any:
        if holding.block is None:
            holding.block = self._image.take(holding.nbytes)
        copies = self.copies(holding.device)
        with copies.offloading():
            if holding.event is not None:
                copies.offload_waits_for(holding.event, Wait.HOST_READ)
            source = holding.bytes_on_device()
            return copies.offload((host, source[at : at + host.numel()]) for at, host in self._pieces(holding))

    def _pieces(self, holding: Holding) -> Iterator[tuple[int, Tensor]]:
        assert holding.block is not None
        return self._image.pieces(holding.block, holding.nbytes)
