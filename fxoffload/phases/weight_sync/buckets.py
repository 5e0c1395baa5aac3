"""Packs tensors into buckets that are copied, gathered and handed out one after the other.

[Note: Memory of a bucket]
A few buffers are kept on the device, each as large as the largest bucket needs.

landings    Of buckets i + 1 and i + 2. Tensors that need no gathering are copied here, and gathers write here. There is
            one slot for each rank. This rank's slot is copied from the host, or from the stage; the gather fills the
            others in place. Two, for else nothing would be copied while the consumer's stream unpacks: 0.3 ms a bucket.
            Three where tensors are gathered and none is cast: else nothing would be copied during a gather.

stage       Of bucket i + 3: this rank's parts of gathered tensors that are cast first, as they are copied from the
            host.

With the whole tensors of bucket i, which are handed out, they are at most twice ``bucket_bytes``. Each of these has
memory of its own; see [Note: Whose a weight is]. A tensor that does not fit next to the buffers passes through several
buckets of its own.

A plan is made from sizes that are the same on all ranks, so that all ranks gather alike.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fxoffload.sizes import format_bytes

ALIGNMENT = 16  # bytes; kernels read 16 at once
_LANDINGS, _LANDINGS_OF_GATHERS = 2, 3
_SMALLER_FIRST = 3  # buckets
_LEAST_STAGE_SHARE = 0.05  # where little is gathered among much that is not


@dataclass(frozen=True)
class Load:
    """The needs of one tensor.

    Attributes:
        name: for messages.
        lane: tensors of one lane are gathered together; None for one that needs no gathering.
        ranks: over which it is gathered.
        elements: of the largest part that a rank holds.
        source_item: bytes of an element on the host.
        wire_item: bytes of an element while it is gathered.
        out_bytes: of the whole tensor that is handed out.
    """

    name: str
    lane: Hashable | None
    ranks: int
    elements: int
    source_item: int
    wire_item: int
    out_bytes: int

    @property
    def is_staged(self) -> bool:
        """Whether its elements are cast before they are gathered."""
        return self.lane is not None and self.wire_item != self.source_item


@dataclass(frozen=True)
class Piece:
    """The elements ``start:stop`` of every rank's part of a tensor.

    Attributes:
        index: of the tensor.
        staged: where its bytes begin in the stage; meaningless for pieces that are not staged.
        landed: where they begin in each rank's slot of its lane.
        last: whether the tensor is whole now.
    """

    index: int
    start: int
    stop: int
    staged: int
    landed: int
    last: bool


@dataclass(frozen=True)
class Lane:
    """The pieces of a bucket that are gathered by the same collectives."""

    key: Hashable | None
    ranks: int
    base: int
    slot_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Bucket:
    """Tensors that are handed out together."""

    lanes: tuple[Lane, ...]
    finished: tuple[Piece, ...]
    stage_bytes: int
    landing_bytes: int
    out_bytes: int


@dataclass(frozen=True)
class BucketPlan:
    """All buckets, the number of landings, and the sizes of the buffers.

    Attributes:
        limit_bytes: that was promised: two buckets and ``large_bytes`` of ``plan_buckets``.
    """

    buckets: tuple[Bucket, ...]
    landings: int
    stage_bytes: int
    landing_bytes: int
    limit_bytes: int


def plan_buckets(loads: Sequence[Load], bucket_bytes: int, large_bytes: int | None = None) -> BucketPlan:
    """See [Note: Memory of a bucket]. Tensors keep their order.

    Args:
        large_bytes: that the stream may hold in addition to its buckets; by default the largest tensor.

    Raises:
        ValueError: ``bucket_bytes`` is too small for one element.
    """
    packer = _Packer(loads, bucket_bytes)
    for index in range(len(loads)):
        packer.add(index)
    packer.close_bucket()
    found = packer.buckets
    return BucketPlan(
        buckets=tuple(found),
        landings=packer.landings,
        stage_bytes=max((b.stage_bytes for b in found), default=0),
        landing_bytes=max((b.landing_bytes for b in found), default=0),
        limit_bytes=2 * bucket_bytes + (large_bytes or max((load.out_bytes for load in loads), default=0)),
    )


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Packer:
    def __init__(self, loads: Sequence[Load], bucket_bytes: int) -> None:
        self._loads = loads
        self._bucket_bytes = bucket_bytes
        # Bytes of stage and landing for each byte that is handed out, over all tensors.
        out = max(1, sum(load.out_bytes for load in loads))
        staged = sum(_stage_bytes(load, load.elements) for load in loads)
        self._stage_share = max(staged / out, _LEAST_STAGE_SHARE) if staged else 0.0
        self._landing_share = sum(_landing_bytes(load, load.elements) for load in loads) / out
        is_gathered = any(load.lane is not None for load in loads)
        self.landings = _LANDINGS_OF_GATHERS if is_gathered and not staged else _LANDINGS
        self._shares = self._stage_share + self.landings * self._landing_share + 1.0
        self._max_out = int(2 * bucket_bytes / self._shares)
        self._max_stage = int(2 * bucket_bytes * self._stage_share / self._shares)
        self._max_landing = int(2 * bucket_bytes * self._landing_share / self._shares)
        self.buckets: list[Bucket] = []
        self._begin()

    def _begin(self) -> None:
        self._pieces: list[Piece] = []
        self._slots: dict[Hashable | None, int] = {}
        self._stage = self._landing = self._out = 0

    def add(self, index: int) -> None:
        load = self._loads[index]
        needed = (
            aligned(_stage_bytes(load, load.elements)),
            aligned(_landing_bytes(load, load.elements) // load.ranks) * load.ranks,
            aligned(load.out_bytes),
        )
        limits = (self._max_stage, self._max_landing, self._max_out)
        if not _fits(needed, limits):
            self._add_large(index)
            return
        fits = _fits((self._stage + needed[0], self._landing + needed[1], self._out + needed[2]), limits)
        # The consumer has nothing to do before the first bucket is there: an eighth, a quarter and a half come first.
        first = self._max_out >> max(_SMALLER_FIRST - len(self.buckets), 0)
        if not fits or (self._out and self._out + needed[2] > first):
            self.close_bucket()
        self._put(index, 0, load.elements)
        self._out += needed[2]

    def _add_large(self, index: int) -> None:
        load = self._loads[index]
        step = self._max_landing // load.ranks // ALIGNMENT * ALIGNMENT // _landed_item(load)
        if load.is_staged:
            step = min(step, self._max_stage // ALIGNMENT * ALIGNMENT // load.source_item)
        if step < 1:
            self._refuse(load)
        for start in range(0, load.elements, step):
            self.close_bucket()
            self._put(index, start, min(load.elements, start + step))
        self.close_bucket()

    def _refuse(self, load: Load) -> None:
        per_landing = max(ALIGNMENT, _landed_item(load)) * load.ranks / self._landing_share
        per_stage = max(ALIGNMENT, load.source_item) / self._stage_share if load.is_staged else 0.0
        least = math.ceil(max(per_landing, per_stage) * self._shares / 2) + 1
        raise ValueError(
            f"bucket_bytes is {format_bytes(self._bucket_bytes)}, but a bucket must hold one element of {load.name!r} "
            f"from each of {load.ranks} rank{'s' if load.ranks > 1 else ''}; give at least {format_bytes(least)}"
        )

    def _put(self, index: int, start: int, stop: int) -> None:
        load = self._loads[index]
        slot = self._slots.get(load.lane, 0)
        self._pieces.append(Piece(index, start, stop, self._stage, slot, stop == load.elements))
        self._stage += aligned(_stage_bytes(load, stop - start))
        landed = aligned((stop - start) * _landed_item(load))
        self._slots[load.lane] = slot + landed
        self._landing += landed * load.ranks

    def close_bucket(self) -> None:
        if not self._pieces:
            return
        lanes, base = [], 0
        for key, slot_bytes in self._slots.items():
            pieces = tuple(p for p in self._pieces if self._loads[p.index].lane == key)
            ranks = self._loads[pieces[0].index].ranks
            lanes.append(Lane(key, ranks, base, slot_bytes, pieces))
            base += slot_bytes * ranks
        finished = tuple(p for p in self._pieces if p.last)
        self.buckets.append(Bucket(tuple(lanes), finished, self._stage, base, self._out))
        self._begin()


def _fits(needed: Sequence[int], limits: Sequence[int]) -> bool:
    return all(n <= limit for n, limit in zip(needed, limits, strict=True))


def _landed_item(load: Load) -> int:
    return load.source_item if load.lane is None else load.wire_item


def _landing_bytes(load: Load, elements: int) -> int:
    return elements * load.ranks * _landed_item(load)


def _stage_bytes(load: Load, elements: int) -> int:
    return elements * load.source_item if load.is_staged else 0
