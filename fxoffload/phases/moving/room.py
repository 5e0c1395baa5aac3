"""Has the allocator get memory from the driver in pieces that are larger than storages.

[Note: Room]
Memory that was returned to the driver has to be allocated anew. ``cudaMalloc`` takes 0.4 ms a call and 1 ms a GiB. With
one call for each of 700 storages of 18 MB, the link of two H200s waits for the host: 13.2 GB came in 320 ms. They came
in 255 ms, as fast as plain copies, where the allocator first asks for a GiB, which it then splits.

Expandable segments are mapped in pages of 20 MiB, whatever the call. That takes 8 ms a GiB, and 17 ms where two
processes on one machine do it at the same time, for the driver takes them in turn. Large pieces gain less there, and
nothing in the background, as no other process gets memory meanwhile (two H200s, 2026-11-22, a script). ``benchmarks run
pinning``, variants ``room`` and ``give_back``, measures the like.

Users can have larger pages (``large_segment_size_mb``). With 64 MiB, memory that returned to two H200s at once reached
0.98 of the link instead of 0.79. It is a setting of the whole process, which is theirs to make: segments that exist
keep their pages. ``empty`` lets other threads have the interpreter, ``resize_`` does not.

Other allocations may meanwhile come to lie in a piece. They then keep all of it from the driver when the storages
leave. So pieces are of one group, and in the background they are small.

[Note: Idle memory]
Idle memory is memory that the allocator has of the driver without a use for it. It is used first, but not all of it can
be. Fragments between used blocks are too small, other streams and CUDA graphs keep their own, and the statistics do not
tell. So it is tried: of storages that idle memory should be enough for, one is allocated, then two, then four, and so
on. If the allocator asked the driver all the same (``num_device_alloc``), the memory that is idle then does not count
during the rest of the transition. As much as was had so far is then allocated without a look: a look takes the host as
long as some allocations. Only the moment of our own allocations is watched: other code may make the allocator ask too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from fxoffload.phases.moving.device_memory import gpus_of, has_expandable_segments, splits_large_blocks
from fxoffload.phases.moving.storages import Holding

# The first pieces are small, so that copies begin soon; with expandable segments the last, so that they end soon.
FIRST_ROOM_BYTES = 128 << 20
ROOM_BYTES = 1 << 30
# In the background.
ROOM_BEHIND_BYTES = 256 << 20
# Sizes up to this have a pool of their own in the allocator; sizes are multiples of ``_GRANULE``.
_SMALL = 1 << 20
_GRANULE = 512


class Room:
    """Has the allocator get memory for storages, on the current stream, with few calls of the driver.

    Never raises for want of memory: the storages' own allocation does. Made for one transition: its findings about idle
    memory are true for a while; see [Note: Idle memory].
    """

    def __init__(self) -> None:
        self._expandable = has_expandable_segments()
        self._useless: dict[torch.device, int] = {}  # idle, but not to be had
        self._proved: dict[torch.device, int] = {}  # idle, and to be had: most bytes at a time
        self._believed: dict[torch.device, int] = {}  # may be allocated before the next look at the allocator

    def pieces(self, holdings: Sequence[Holding]) -> Iterator[list[Holding]]:
        """The holdings bit by bit. There is room for a bit, which is to be allocated before the next is asked for."""
        for stretch in stretches(holdings):
            if self._can_ask(stretch[0].device):
                yield from self._pieces_of(stretch)
            else:
                yield stretch

    def lacks(self, upcoming: Sequence[Holding]) -> bool:
        """Whether ``make_behind`` has something to do before these are started."""
        gpus = gpus_of(upcoming)
        if self._expandable or not gpus or not self._can_ask(gpus[0]):
            return self._expandable and bool(gpus)
        needed = _bytes_on(gpus[0], upcoming)
        return needed > self._believed.get(gpus[0], 0) and needed > self._usable(gpus[0])[0]

    def make_behind(self, upcoming: Sequence[Holding], beyond: Sequence[Holding]) -> None:
        """Room for the next storages, in the background.

        Args:
            upcoming: that are to have room, and ``lacks`` says that they have not.
            beyond: the storages to make room for at once: ``upcoming`` and those that come after them.
        """
        gpus = gpus_of(upcoming)
        if self._expandable:
            with contextlib.suppress(torch.OutOfMemoryError):
                _ = [torch.empty(h.nbytes, dtype=torch.uint8, device=h.device) for h in upcoming if h.device in gpus]
        elif gpus:
            self._ask_for(gpus[0], _bytes_on(gpus[0], beyond) - self._usable(gpus[0])[0])

    def _can_ask(self, device: torch.device) -> bool:
        return device.type == "cuda" and splits_large_blocks()

    def _pieces_of(self, stretch: list[Holding]) -> Iterator[list[Holding]]:
        device = stretch[0].device
        while stretch:
            needed, believed = _bytes_on(device, stretch), self._believed.get(device, 0)
            if needed <= believed:
                self._believed[device] = believed - needed
                yield stretch
                return
            usable, calls = self._usable(device)
            piece = stretch
            if usable < needed:
                self._ask_for(device, needed - usable)
                self._believed[device] = 0
                calls = _idle(device)[1]
            else:
                piece = _first_of(stretch, self._proved.get(device, 0))
            yield piece
            idle, calls_after = _idle(device)
            if calls_after > calls:
                self._useless[device], self._proved[device], self._believed[device] = idle, 0, 0
            elif usable >= needed:
                proved = min(2 * max(self._proved.get(device, 0), _bytes_on(device, piece)), ROOM_BYTES)
                self._proved[device] = proved
                self._believed[device] = min(proved, max(idle - self._useless.get(device, 0), 0))
            stretch = stretch[len(piece) :]

    def _usable(self, device: torch.device) -> tuple[int, int]:
        """Bytes that are idle and, as far as is known, to be had, and the calls of the driver so far."""
        idle, calls = _idle(device)
        return max(idle - self._useless.get(device, 0), 0), calls

    def _ask_for(self, device: torch.device, nbytes: int) -> None:
        if nbytes <= 0:
            return
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._believed[device] = nbytes


def stretches(holdings: Sequence[Holding]) -> Iterator[list[Holding]]:
    """The stretches that room is made for at a time: of one group, on one device."""
    stretch: list[Holding] = []
    nbytes, most = 0, FIRST_ROOM_BYTES
    for holding in holdings:
        if stretch and (nbytes + holding.nbytes > most or not go_together(stretch[0], holding)):
            yield stretch
            stretch, nbytes = [], 0
            most = min(2 * most, FIRST_ROOM_BYTES if has_expandable_segments() else ROOM_BYTES)
        stretch.append(holding)
        nbytes += holding.nbytes
    if stretch:
        yield stretch


def go_together(one: Holding, other: Holding) -> bool:
    """Whether they may lie in one piece of the driver's memory: they leave together."""
    return one.device == other.device and one.group == other.group


def _first_of(stretch: list[Holding], nbytes: int) -> list[Holding]:
    """The first ones, of ``nbytes`` in all, or one that is larger."""
    total = 0
    for i, holding in enumerate(stretch):
        size = _large_bytes(holding)
        if total and size and total + size > nbytes:
            return stretch[:i]
        total += size
    return stretch


def _bytes_on(device: torch.device, holdings: Iterable[Holding]) -> int:
    return sum(_large_bytes(holding) for holding in holdings if holding.device == device)


def _large_bytes(holding: Holding) -> int:
    return -(-holding.nbytes // _GRANULE) * _GRANULE if holding.nbytes > _SMALL else 0


def _idle(device: torch.device) -> tuple[int, int]:
    """Bytes for large blocks that the allocator holds without a use, and how often it has asked the driver."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    reserved, active = (stats[kind]["large_pool"]["current"] for kind in ("reserved_bytes", "active_bytes"))
    return reserved - active, stats["num_device_alloc"]
