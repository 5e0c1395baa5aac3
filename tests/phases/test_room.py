"""What room is made for at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxoffload.phases.moving.arrivals import SLICE, Arrivals
from fxoffload.phases.moving.room import FIRST_ROOM_BYTES, ROOM_BYTES, Room, stretches
from fxoffload.phases.moving.storages import Holding

MIB = 1 << 20


@pytest.fixture(autouse=True)
def default_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        monkeypatch.delenv(name, raising=False)


def holdings(*mib: float, device: str = "cuda:0", group: str = "params") -> Any:
    storage, place, owner = torch.UntypedStorage(0), torch.device(device), SimpleNamespace()
    return [Holding(storage, int(size * MIB), place, group, "", owner) for size in mib]  # type: ignore[arg-type]


def sizes(found: Any) -> list[int]:
    return [sum(h.nbytes for h in stretch) // MIB for stretch in found]


def test_pieces_grow_from_small_ones() -> None:
    found = list(stretches(holdings(*[32] * 200)))
    assert sizes(found)[:4] == [128, 256, 512, 1024]
    assert max(sizes(found)) == ROOM_BYTES // MIB
    assert sum(map(len, found)) == 200


def test_pages_that_are_mapped_one_by_one_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert set(sizes(stretches(holdings(*[32] * 200)))) == {FIRST_ROOM_BYTES // MIB}


def test_a_storage_that_is_larger_has_its_own() -> None:
    assert sizes(stretches(holdings(4, 3000, 4))) == [4, 3000, 4]


def test_a_piece_is_of_one_device() -> None:
    found = list(stretches([*holdings(4, 4), *holdings(4, device="cuda:1"), *holdings(4)]))
    assert [{h.device.index for h in stretch} for stretch in found] == [{0}, {1}, {0}]


def test_a_piece_is_of_one_group() -> None:
    """A group that leaves alone must not leave a piece of memory that others lie in."""
    assert sizes(stretches([*holdings(4, 4), *holdings(4, 4, 4, group="optimizer")])) == [8, 12]


class Allocator:
    """Of one device: free blocks, which are not merged, and a driver with so much memory.

    Args:
        free: bytes of blocks that anybody can have.
        foreign: bytes of one that only another stream can have.
    """

    def __init__(self, free: list[int], foreign: int = 0, driver: int = 1 << 50) -> None:
        self.free, self.foreign, self.driver = free, foreign, driver
        self.asked: list[int] = []  # of the driver
        self.looks = 0

    def stats(self, device: torch.device) -> dict[str, Any]:
        self.looks += 1
        idle = sum(self.free) + self.foreign
        return {
            "reserved_bytes": {"large_pool": {"current": idle + 5 * MIB}},
            "active_bytes": {"large_pool": {"current": 5 * MIB}},
            "num_device_alloc": len(self.asked),
        }

    def take(self, nbytes: int) -> None:
        """As ``resize_``, for good."""
        if not any(block >= nbytes for block in self.free):
            if nbytes > self.driver:
                raise torch.OutOfMemoryError("no")
            self.asked.append(nbytes)
            self.driver -= nbytes
            self.free.append(nbytes)
        best = min(block for block in self.free if block >= nbytes)
        self.free.remove(best)
        if best > nbytes:
            self.free.append(best - nbytes)

    def touch(self, nbytes: int, **_: Any) -> None:
        """As ``empty`` whose result is dropped."""
        before = list(self.free)
        self.take(nbytes)
        self.free = before if sum(before) > sum(self.free) else [*before, nbytes]

    def serve(self, room: Room, found: Any) -> list[int]:
        """Allocates holdings as a mover does. Returns how many at a time."""
        sizes = []
        for piece in room.pieces(found):
            sizes.append(len(piece))
            for holding in piece:
                self.take(holding.nbytes)
        return sizes


@pytest.fixture
def make_allocator(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Allocator]:
    def make(*free_mib: int, **options: int) -> Allocator:
        allocator = Allocator([mib * MIB for mib in free_mib], **options)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", allocator.stats)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch, "empty", allocator.touch)
        return allocator

    return make


Make = Callable[..., Allocator]


def test_what_is_idle_is_used_first(make_allocator: Make) -> None:
    allocator = make_allocator(64)
    allocator.serve(Room(), holdings(30, 30))
    assert allocator.asked == []
    allocator = make_allocator(16, 16, 16, 16)
    allocator.serve(Room(), holdings(*[16] * 7))
    assert allocator.asked == [48 * MIB]
    allocator = make_allocator()
    allocator.serve(Room(), holdings(30, 30, 30))
    assert allocator.asked == [90 * MIB]


def test_small_storages_have_a_pool_of_their_own(make_allocator: Make) -> None:
    allocator = make_allocator()
    list(Room().pieces(holdings(30, 30, 0.5)))
    assert allocator.asked == [60 * MIB]
    allocator = make_allocator(1000)
    assert list(map(len, Room().pieces(holdings(*[0.5, 16] * 4)))) == [3, 4, 1], "to see them come out says nothing"


@pytest.mark.parametrize("num_usable", range(12))
def test_what_is_idle_and_cannot_be_had_is_found_out(num_usable: int, make_allocator: Make) -> None:
    """Fragments, other streams' blocks: 16 MiB each have to be asked for until that is known."""
    allocator = make_allocator(*[16] * num_usable, *[15] * 20, foreign=200 * MIB)
    allocator.serve(Room(), holdings(*[16] * 64))
    assert len(allocator.asked) <= num_usable + 5, "the rest of 128, 256 and 512 MiB, and what is behind that"
    assert sum(allocator.asked) <= (64 - num_usable) * 16 * MIB, "and nothing is asked for twice"


def test_no_more_is_believed_of_than_is_idle(make_allocator: Make) -> None:
    allocator, room = make_allocator(*[16] * 10), Room()
    allocator.serve(room, holdings(*[16] * 8))
    assert allocator.asked == []
    allocator.serve(room, holdings(*[16] * 4))
    assert allocator.asked == [32 * MIB], "not one by one"


def test_what_was_found_out_is_remembered(make_allocator: Make) -> None:
    allocator, room = make_allocator(foreign=4000 * MIB), Room()
    allocator.serve(room, holdings(16, 16, 16))
    assert allocator.asked == [16 * MIB, 32 * MIB]
    allocator.serve(room, holdings(16, 16, 16))
    assert allocator.asked == [16 * MIB, 32 * MIB, 48 * MIB]


def test_what_others_ask_for_meanwhile_proves_nothing(make_allocator: Make) -> None:
    allocator, room = make_allocator(1000), Room()
    allocator.serve(room, holdings(16, 16))
    allocator.asked += [500 * MIB]
    allocator.serve(room, holdings(16, 16, 16, 16))
    assert allocator.asked == [500 * MIB]


def test_what_turned_out_well_is_not_looked_at_again(make_allocator: Make) -> None:
    allocator, room = make_allocator(20_000), Room()
    assert allocator.serve(room, holdings(*[16] * 8)) == [1, 2, 4, 1]
    for _ in range(127):
        assert not room.lacks(holdings(*[16] * 8))
        allocator.serve(room, holdings(*[16] * 8))
    assert allocator.asked == []
    assert allocator.looks < 128, "less than one a slice"


def test_behind_other_work_room_is_made_for_what_follows_too(make_allocator: Make) -> None:
    allocator, room = make_allocator(64), Room()
    assert not room.lacks(holdings(30, 30)), "there is room for the next ones"
    assert room.lacks(holdings(30, 30, 30))
    room.make_behind(holdings(30, 30, 30), holdings(*[30] * 12))
    assert allocator.asked == [296 * MIB]
    looks = allocator.looks
    for _ in range(3):
        assert not room.lacks(holdings(30, 30, 30))
        allocator.serve(room, holdings(30, 30, 30))
    assert allocator.asked == [296 * MIB]
    assert allocator.looks == looks, "it is known that there is room"


def test_pages_that_are_mapped_one_by_one_are_asked_for_one_by_one(
    monkeypatch: pytest.MonkeyPatch, make_allocator: Make
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    allocator, room = make_allocator(), Room()
    upcoming = [*holdings(30, 40), *holdings(5, device="cpu")]
    assert room.lacks(upcoming)
    room.make_behind(upcoming, holdings(30, 40, 50))
    assert allocator.asked == [30 * MIB, 40 * MIB]


@pytest.mark.parametrize(
    ("name", "value"),
    [("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"), ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")],
)
def test_nothing_is_asked_for_that_could_not_be_split(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, make_allocator: Make
) -> None:
    monkeypatch.setenv(name, value)
    allocator, room = make_allocator(), Room()
    assert list(map(len, room.pieces(holdings(100, 28)))) == [2]
    assert not room.lacks(holdings(100, 28))
    assert allocator.asked == [] and not allocator.looks


def test_want_of_memory_is_not_said_here(make_allocator: Make) -> None:
    make_allocator(driver=50 * MIB)
    assert list(map(len, Room().pieces(holdings(100, 28)))) == [2]
    Room().make_behind(holdings(100), holdings(100, 28))


def test_nothing_is_asked_for_on_a_cpu(make_allocator: Make) -> None:
    allocator, room = make_allocator(), Room()
    assert list(map(len, room.pieces(holdings(100, 28, device="cpu")))) == [2]
    assert not room.lacks(holdings(100, device="cpu"))
    assert allocator.asked == [] and not allocator.looks


def test_what_comes_next_is_of_one_device_and_at_least_a_slice() -> None:
    arrivals = Arrivals(SimpleNamespace())  # type: ignore[arg-type]
    arrivals.add([*holdings(*[100] * 12), *holdings(*[1] * 20, device="cuda:1")])
    assert len(arrivals.upcoming_bytes(1000 * MIB)) == 10
    assert len(arrivals.upcoming_bytes(300 * MIB)) == SLICE
    assert len(arrivals.upcoming_bytes(10_000 * MIB)) == 12
    arrivals.cancel(arrivals.upcoming(100))
    arrivals.add([*holdings(*[100] * 10), *holdings(*[1] * 20, group="optimizer")])
    assert len(arrivals.upcoming_bytes(10_000 * MIB)) == 10
