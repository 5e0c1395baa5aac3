"""What room is made for at a time."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxoffload.phases import room
from fxoffload.phases.arrivals import SLICE, Arrivals
from fxoffload.phases.room import FIRST_ROOM_BYTES, ROOM_BYTES, make_room, stretches

MIB = 1 << 20


@pytest.fixture(autouse=True)
def default_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        monkeypatch.delenv(name, raising=False)


def holdings(*mib: float, device: str = "cuda:0", group: str = "params") -> Any:
    return [SimpleNamespace(nbytes=int(size * MIB), device=torch.device(device), group=group) for size in mib]


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
    """What leaves alone must not leave a piece behind that others lie in."""
    assert sizes(stretches([*holdings(4, 4), *holdings(4, 4, 4, group="optimizer")])) == [8, 12]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the allocator, which has 64 MiB idle, is asked for."""
    found: list[int] = []
    monkeypatch.setattr(room, "_idle_bytes", lambda device: 64 * MIB)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch, "empty", lambda nbytes, **_: found.append(nbytes))
    return found


def test_what_is_idle_is_used_first(asked: list[int]) -> None:
    assert make_room(holdings(30, 30)) == 0
    assert asked == []
    assert make_room(holdings(30, 30, 30, 0.5)) == 26 * MIB, "small storages have a pool of their own"
    assert asked == [26 * MIB]


def test_behind_other_work_room_is_made_for_what_follows_too(asked: list[int]) -> None:
    room.make_room_behind(holdings(30, 30), holdings(30, 30, 30, 30))
    assert asked == [], "there is room for the next ones"
    room.make_room_behind(holdings(30, 30, 30), holdings(30, 30, 30, 30))
    assert asked == [56 * MIB]


def test_pages_that_are_mapped_one_by_one_are_asked_for_one_by_one(
    monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    room.make_room_behind([*holdings(30, 40), *holdings(5, device="cpu")], holdings(30, 40, 50))
    assert asked == [30 * MIB, 40 * MIB]


@pytest.mark.parametrize(
    ("name", "value"),
    [("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"), ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")],
)
def test_nothing_is_asked_for_that_could_not_be_split(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    monkeypatch.setenv(name, value)
    assert make_room(holdings(100, 100)) == 0
    assert asked == []


def test_want_of_memory_is_not_said_here(monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "empty", refuse)
    assert make_room(holdings(100)) == 0


def test_nothing_is_asked_for_on_a_cpu(asked: list[int]) -> None:
    assert make_room(holdings(100, 100, device="cpu")) == 0
    assert asked == []


def test_what_comes_next_is_of_one_device_and_at_least_a_slice() -> None:
    arrivals = Arrivals(SimpleNamespace())  # type: ignore[arg-type]
    arrivals._queue = deque([*holdings(*[100] * 12), *holdings(*[1] * 20, device="cuda:1")])
    assert len(arrivals.upcoming_bytes(1000 * MIB)) == 10
    assert len(arrivals.upcoming_bytes(300 * MIB)) == SLICE
    assert len(arrivals.upcoming_bytes(10_000 * MIB)) == 12
    arrivals._queue = deque([*holdings(*[100] * 10), *holdings(*[1] * 20, group="optimizer")])
    assert len(arrivals.upcoming_bytes(10_000 * MIB)) == 10
