"""Brings one bucket of weights after the other to the device, the next ones while the present one is read.

[Note: Order of a weight stream]
The reload stream copies and casts, the process groups' streams gather, the consumer's stream unpacks. When bucket i is
asked for:

1. The consumer's stream waits for the landed parts of i, and puts the tensors together, each in memory of its own.
   Bucket i + 1 lands meanwhile.

2. The reload stream waits for that. Then the next bucket lands where i was: this rank's slots are copied from the host,
   or cast from the stage, and the gathers start. Tensors that are not gathered are copied from the host.

3. The stage is free as soon as it was cast: its parts of the bucket after that are copied during the gathers.

There is a stage only where tensors are cast: a copy that is queued after a cast waits with it for a landing. See
[Note: Memory of a bucket] for the buffers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fxoffload.phases.stand_still import StandStill
from fxoffload.phases.weight_sync.buckets import BucketPlan, Lane, Piece
from fxoffload.phases.weight_sync.cuts import TensorCut, boxes, is_even, part, region, side_by_side
from fxoffload.phases.weight_sync.units import Unit
from fxoffload.runtime.copies.streams import CopyStreams, Wait
from fxoffload.runtime.switches import without_grad
from fxoffload.sizes import format_bytes
from fxoffload.torch_private import process_groups

Copies = Iterator[tuple[Tensor, Tensor]]


class BucketLedger:
    """Counts the bytes that a stream allocated on the device, and holds it to its limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.peak_bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a tensor.

        Raises:
            AssertionError: more than the limit: a bug in fxoffload.
        """
        self.charge(math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device=device)

    def charge(self, nbytes: int) -> None:
        """Counts memory that is about to be allocated; raises as ``take`` does."""
        if self.held_bytes + nbytes > self.limit_bytes:
            raise AssertionError(
                f"a weight stream would hold {format_bytes(self.held_bytes + nbytes)} on the device, more than 2 "
                f"buckets and the largest tensor ({format_bytes(self.limit_bytes)}): a bug in fxoffload, report it"
            )
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def discharge(self, nbytes: int) -> None:
        """The stream no longer holds ``nbytes``."""
        self.held_bytes -= nbytes

    @contextlib.contextmanager
    def charged(self, nbytes: int) -> Iterator[None]:
        """Counts memory that is held in this block."""
        self.charge(nbytes)
        try:
            yield
        finally:
            self.discharge(nbytes)

    def give_back(self, *tensors: Tensor) -> None:
        """The stream holds these no longer."""
        self.discharge(sum(tensor.nbytes for tensor in tensors))


class BucketStream:
    """See [Note: Order of a weight stream].

    Args:
        read: (unit, start, stop, bytes of the target) to the copies that bring a part of a tensor there.
        still: is charged with the time that the consumer waits.
    """

    def __init__(
        self,
        plan: BucketPlan,
        units: Sequence[Unit],
        read: Callable[[Unit, int, int, Tensor], Copies],
        copies: CopyStreams,
        device: torch.device,
        ledger: BucketLedger,
        still: StandStill,
    ) -> None:
        self._plan, self._units, self._read, self._copies = plan, units, read, copies
        self._ledger, self._still = ledger, still
        self._landed: deque[tuple[list[Any], list[Any]]] = deque()  # works and events, by bucket
        self._is_advancing = False  # or was cut short
        self._stage_filled: Any = None
        self._stage = ledger.take((plan.stage_bytes,), torch.uint8, device)
        # Memory that the driver has to map takes 8 ms a GiB: allocate after the first copies all that they do not need.
        self._landings: list[Tensor] = []
        self._wholes: dict[int, Tensor] = {}  # by the index of a unit; until they were handed out

    @without_grad
    def advance(self, index: int) -> None:
        """Makes bucket ``index`` whole and starts the next ones. The buckets are asked for in order."""
        self._is_advancing = True
        if index == 0:
            for i in range(self._plan.landings):
                landing = self._ledger.take((self._plan.landing_bytes,), torch.uint8, self._stage.device)
                self._landings.append(landing)
                self._copies.reload_waits_for_compute()  # earlier users of the memory come first
                with self._still.copying():
                    if i == 0:
                        self._fill_stage(0)
                    self._land(i)
                    self._fill_stage(i + 1)
        self._wait()
        for lane in self._plan.buckets[index].lanes:
            for piece in lane.pieces:
                self._unpack(lane, piece, self._landing_of(index))
        self._copies.reload_waits_for_compute()
        with self._still.copying():
            self._land(index + self._plan.landings)
            self._fill_stage(index + self._plan.landings + 1)
        self._is_advancing = False

    def whole(self, piece: Piece) -> Tensor:
        """The tensor that a piece belongs to."""
        if piece.index not in self._wholes:
            unit = self._units[piece.index]
            self._wholes[piece.index] = self._ledger.take(unit.shape, unit.dtype, self._stage.device)
        return self._wholes[piece.index]

    def let_go(self, piece: Piece) -> None:
        """The tensor was handed out: it belongs to the consumer now."""
        self._ledger.give_back(self._wholes.pop(piece.index))

    def close(self) -> None:
        """Finishes copies and gathers that were started, and gives the memory back. The consumer's stream waits."""
        self._copies.go_back()
        try:
            if self._is_advancing:
                self._copies.synchronize()  # of a copy whose event was not noted
            self._landed.append(([], [self._stage_filled]))
            while self._landed:
                self._wait()
        except BaseException:
            self._copies.synchronize()  # of copies whose waits were not reached
            raise
        finally:
            self._ledger.give_back(self._stage, *self._landings, *self._wholes.values())
            del self._stage, self._landings, self._wholes

    def _wait(self) -> None:
        """For the next bucket that was begun."""
        works, events = self._landed.popleft() if self._landed else ([], [])
        with self._still.waiting():
            for work in works:
                work.wait()
            for event in events:
                if event is not None:
                    self._copies.compute_waits_for(event, Wait.TARGET_READY)

    def _fill_stage(self, index: int) -> None:
        """Fills it with this rank's parts of the tensors of a bucket that are cast and gathered."""
        if index >= len(self._plan.buckets):
            return
        pieces = [p for lane in self._plan.buckets[index].lanes for p in lane.pieces if self._is_staged(p)]
        with self._copies.reloading():
            self._stage_filled = self._copy(
                itertools.chain.from_iterable(self._from_source(p, self._stage[p.staged :]) for p in pieces)
            )

    def _land(self, index: int) -> None:
        if index >= len(self._plan.buckets):
            return
        lanes, landing = self._plan.buckets[index].lanes, self._landing_of(index)
        works: list[Any] = []
        events: list[Any] = []
        self._landed.append((works, events))
        with self._copies.reloading():
            for lane in lanes:
                if lane.key is not None:
                    events.append(self._copy(self._into_own_slot(lane, landing)))
                    works.append(self._gather(lane, landing))
            direct = [
                self._from_source(p, landing[lane.base + p.landed :])
                for lane in lanes
                if lane.key is None
                for p in lane.pieces
            ]
            events.append(self._copy(itertools.chain.from_iterable(direct)))

    def _copy(self, pieces: Copies) -> Any:
        """The event of copies; if one cannot be made, those before it are waited for."""
        try:
            return self._copies.reload(pieces, gives_way=False)
        except BaseException:
            self._copies.synchronize()
            raise

    def _from_source(self, piece: Piece, target: Tensor) -> Copies:
        unit = self._units[piece.index]
        stop = min(piece.stop, math.prod(unit.own_shape))
        nbytes = max(stop - piece.start, 0) * unit.source_dtype.itemsize
        return self._read(unit, piece.start, stop, target[:nbytes])

    def _landing_of(self, index: int) -> Tensor:
        return self._landings[index % self._plan.landings]

    def _is_staged(self, piece: Piece) -> bool:
        return self._units[piece.index].load.is_staged

    def _into_own_slot(self, lane: Lane, landing: Tensor) -> Copies:
        """From the host, or from the stage, where it is cast."""
        for piece in lane.pieces:
            unit = self._units[piece.index]
            own = landing[lane.base + _own_slot(unit.cuts) * lane.slot_bytes + piece.landed :]
            if not self._is_staged(piece):
                yield from self._from_source(piece, own)
                continue
            count = min(piece.stop, math.prod(unit.own_shape)) - piece.start
            if count > 0:
                source = self._stage[piece.staged :][: count * unit.source_dtype.itemsize].view(unit.source_dtype)
                yield own[: count * unit.wire_dtype.itemsize].view(unit.wire_dtype), source

    def _gather(self, lane: Lane, landing: Tensor) -> Any:
        """In place, the last cut first: each gather fills the slots that differ in one more coordinate."""
        cuts = self._units[lane.pieces[0].index].cuts
        work = None
        for i in reversed(range(len(cuts))):
            if work is not None:
                work.wait()
            part_bytes = lane.slot_bytes * math.prod(cut.size for cut in cuts[i + 1 :])
            base = lane.base + _own_slot(cuts[:i]) * cuts[i].size * part_bytes
            slots = landing[base : base + cuts[i].size * part_bytes]
            own = slots[cuts[i].rank * part_bytes :][:part_bytes]
            work = process_groups.all_gather(slots, own, cuts[i].group)
        return work

    def _unpack(self, lane: Lane, piece: Piece, landing: Tensor) -> None:
        unit, whole = self._units[piece.index], self.whole(piece)
        if piece.start == piece.stop:
            return
        load = unit.load
        slots = landing[lane.base : lane.base + lane.ranks * lane.slot_bytes].view(lane.ranks, lane.slot_bytes)
        nbytes = (piece.stop - piece.start) * unit.landed_dtype.itemsize
        values = slots[:, piece.landed : piece.landed + nbytes].view(unit.landed_dtype)
        if piece.start == 0 and piece.stop == load.elements and is_even(unit.shape, unit.cuts):
            target = side_by_side(whole, unit.cuts)
            target.copy_(values.view(target.shape))
            return
        for slot, coordinates in enumerate(itertools.product(*(range(cut.size) for cut in unit.cuts))):
            starts, sizes = region(unit.shape, unit.cuts, coordinates)
            own, at = part(whole, (starts, sizes)), 0
            for box in boxes(sizes, piece.start, min(piece.stop, math.prod(sizes))):
                target = part(own, box)
                target.copy_(values[slot, at : at + target.numel()].view(target.shape))
                at += target.numel()


def _own_slot(cuts: Sequence[TensorCut]) -> int:
    """Of this rank, among those of these cuts."""
    slot = 0
    for cut in cuts:
        slot = slot * cut.size + cut.rank
    return slot
