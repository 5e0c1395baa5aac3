"""Where the bytes of a weight are read: the host image, or the device where they are there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.moving.host_reads import within
from fxoffload.phases.moving.storages import Holding, Where
from fxoffload.phases.stand_still import StandStill
from fxoffload.phases.weight_sync.cuts import boxes, part
from fxoffload.phases.weight_sync.units import Unit


class Stored(Protocol):
    """The part of a ``PhaseManager`` that is used here."""

    def holding_of(self, tensor: Tensor) -> Holding | None: ...
    def host_pieces(self, holding: Holding) -> list[tuple[int, Tensor]]: ...
    def host_copy(self, tensor: Tensor) -> Tensor: ...
    def drain(self) -> None: ...


class WeightSource:
    """Tells which copies bring a part of a tensor into a buffer.

    It is asked at each bucket: parameters may return to the device, or leave it, while the stream goes on.

    Args:
        still: is charged with the time that the calling thread waits.
    """

    def __init__(self, manager: Stored, still: StandStill) -> None:
        self._manager = manager
        self._still = still

    def copies(self, unit: Unit, start: int, stop: int, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(target, source) of the elements ``start:stop`` of this rank's part, in its dtype.

        Args:
            target: bytes; the elements lie in it one after the other.
        """
        if start >= stop:
            return
        holding = self._holding_of(unit)
        if holding is None:
            # A part may be shorter than the tensor it lies in (FSDP1's padding).
            typed = target.view(unit.local.dtype)
            local = unit.local.detach()
            at = 0
            for box in boxes(unit.local.shape, start, stop):
                piece = part(local, box)
                yield typed[at : at + piece.numel()].view(piece.shape), piece
                at += piece.numel()
            return
        with untouched():
            item, offset = unit.local.element_size(), int(unit.local.storage_offset())
            as_it_lies = unit.local.is_contiguous() and not (unit.local.is_conj() or unit.local.is_neg())
        if as_it_lies:
            first = (offset + start) * item
            for at, host in within(self._manager.host_pieces(holding), first, first + target.numel()):
                yield target[at : at + host.numel()], host
        else:
            # Put in order by the CPU: slow, and rare.
            with self._still.on_host():
                values = self._manager.host_copy(unit.local).resolve_conj().resolve_neg()
                values = values.reshape(-1)[start:stop].contiguous()
            yield target, values.view(torch.uint8)

    def _holding_of(self, unit: Unit) -> Holding | None:
        for tensor in (unit.local, *unit.aliases):
            holding = self._manager.holding_of(tensor)
            # Its bytes on the device vanish when they have left, and those on the host are not complete before.
            if holding is not None and holding.where is Where.LEAVING:
                with self._still.on_host():
                    self._manager.drain()
                holding = self._manager.holding_of(tensor)
            if holding is not None:
                return holding
        return None
