"""Has the allocator get memory from the driver in pieces that are larger than storages.

[Note: Room]
Memory that was given back to the driver has to be had again. ``cudaMalloc`` takes 0.4 ms a call and 1 ms a GiB, so that
with one call for each of 700 storages of 18 MB the link of two H200s waits for the host: 13.2 GB came in 320 ms, and in
255 ms, as fast as plain copies, where the allocator first asks for a GiB, which it then splits. Expandable segments are
mapped in pages of 20 MiB, whatever the call, which takes 8 ms a GiB, and 17 ms where two processes on one machine do it
at the same time, for the driver takes them in turn: there, large pieces gain less, and behind other work nothing, as
nobody else gets memory meanwhile (two H200s, 2026-11-22, a script; ``benchmarks run pinning``, variants ``room`` and
``give_back``, measures the like). ``empty`` lets other threads have the interpreter, ``resize_`` does not.

What somebody allocates meanwhile may come to lie in a piece, and then keeps all of it from the driver when the storages
leave again. So pieces are of one group, and behind other work they are small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from fxoffload.phases.device_memory import has_expandable_segments, splits_large_blocks
from fxoffload.phases.storages import Holding

# The first pieces are small, so that copies begin soon; with expandable segments the last, so that they end soon.
FIRST_ROOM_BYTES = 128 << 20
ROOM_BYTES = 1 << 30
# Behind other work.
ROOM_BEHIND_BYTES = 256 << 20
# What is not larger has a pool of its own in the allocator; sizes are multiples of ``_GRANULE``.
_SMALL = 1 << 20
_GRANULE = 512


def make_room(holdings: Sequence[Holding]) -> int:
    """Lets the allocator have memory for storages on one device, on the current stream, with one call of the driver.

    Never raises for want of memory: the storages' own allocation says so. Returns the bytes asked for: 0 where it has
    enough already.
    """
    return _ask_for(holdings, holdings)


def make_room_behind(upcoming: Sequence[Holding], beyond: Sequence[Holding]) -> None:
    """``make_room`` for the next storages, behind other work.

    Args:
        upcoming: that are to have room.
        beyond: where there is none for them, what to make room for at once: they and what comes after them.
    """
    if not has_expandable_segments():
        _ask_for(upcoming, beyond)
        return
    with contextlib.suppress(torch.OutOfMemoryError):
        _ = [torch.empty(h.nbytes, dtype=torch.uint8, device=h.device) for h in upcoming if h.device.type == "cuda"]


def stretches(holdings: Sequence[Holding]) -> Iterator[list[Holding]]:
    """What room is made for at a time: of one group, on one device."""
    stretch: list[Holding] = []
    nbytes, most = 0, FIRST_ROOM_BYTES
    last = FIRST_ROOM_BYTES if has_expandable_segments() else ROOM_BYTES
    for holding in holdings:
        if stretch and (nbytes + holding.nbytes > most or not go_together(stretch[0], holding)):
            yield stretch
            stretch, nbytes, most = [], 0, min(2 * most, last)
        stretch.append(holding)
        nbytes += holding.nbytes
    if stretch:
        yield stretch


def go_together(one: Holding, other: Holding) -> bool:
    """Whether they may lie in one piece of the driver's memory: they leave together."""
    return one.device == other.device and one.group == other.group


def _ask_for(needed: Sequence[Holding], wanted: Sequence[Holding]) -> int:
    device = next((h.device for h in needed if h.device.type == "cuda"), None)
    if device is None or not splits_large_blocks():
        return 0
    idle = _idle_bytes(device)
    if idle >= _bytes_on(device, needed):
        return 0
    missing = _bytes_on(device, wanted) - idle
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(missing, dtype=torch.uint8, device=device)
        return missing
    return 0


def _bytes_on(device: torch.device, holdings: Iterable[Holding]) -> int:
    return sum(-(-h.nbytes // _GRANULE) * _GRANULE for h in holdings if h.nbytes > _SMALL and h.device == device)


def _idle_bytes(device: torch.device) -> int:
    """What the allocator has of the driver and nobody uses, for large blocks.

    Also what other streams and CUDA graphs have, which the next request cannot get: then each storage asks for itself.
    """
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    reserved, active = (stats[kind]["large_pool"]["current"] for kind in ("reserved_bytes", "active_bytes"))
    return reserved - active
