"""In what order copies come that go to two streams in turn, on streams that only keep lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxoffload.runtime.copies import giving_way
from fxoffload.runtime.copies.giving_way import GivingWay

BURST = 16


class Event:
    def record(self, stream: Stream) -> None:
        self.behind = (stream, len(stream.queued))


class Stream:
    current: Stream | None = None

    def __init__(self, device: object = None) -> None:
        self.queued: list[Any] = []

    def wait_event(self, event: Event) -> None:
        self.queued.append(event)


def before(stream: Stream, count: int | None = None) -> list[str]:
    """The entries that are done when the first ``count`` of a stream are."""
    found: list[str] = []
    for entry in stream.queued[:count]:
        found += before(*entry.behind) if isinstance(entry, Event) else [entry]
    return found


class Vector:
    """``numel`` bytes, called by their offsets; a copy of them is put on the current stream."""

    def __init__(self, name: str, start: int, stop: int) -> None:
        self.name, self.start, self.stop = name, start, stop

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def dim(self) -> int:
        return 1

    def element_size(self) -> int:
        return 1

    def split(self, size: int) -> list[Vector]:
        return [Vector(self.name, at, min(at + size, self.stop)) for at in range(self.start, self.stop, size)]

    def copy_(self, source: Vector, non_blocking: bool) -> None:
        assert non_blocking
        assert (source.start, source.stop) == (self.start, self.stop)
        assert Stream.current is not None
        Stream.current.queued.append(f"{self.name}[{self.start}:{self.stop}]")


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> GivingWay:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Stream, "current", stream))
    monkeypatch.setattr(giving_way, "BURST_BYTES", BURST)
    found: Any = GivingWay(torch.device("cuda"))
    Stream.current = found.stream
    return found


def copy(way: Any, *sizes: int, gives_way: bool = True) -> None:
    names = [f"{chr(ord('a') + i)}" for i in range(len(sizes))]
    way.copy([(Vector(n, 0, k), Vector(n, 0, k)) for n, k in zip(names, sizes, strict=True)], gives_way=gives_way)


@pytest.mark.parametrize("sizes", [(5,), (16,), (17,), (32,), (33,), (50, 3, 16, 16), (4, 4, 4, 4, 4), (100,)])
def test_what_is_behind_a_copy_is_behind_all_of_it(way: Any, sizes: tuple[int, ...]) -> None:
    way.stream.queued.append("before")
    copy(way, *sizes)
    assert Stream.current is way.stream
    for stream in way.both:
        for at, entry in enumerate(stream.queued):
            if isinstance(entry, str) and entry != "before":
                assert "before" in before(stream, at)
    done = before(way.stream)
    for i, size in enumerate(sizes):
        parts = sorted(range(0, size, BURST))
        assert [f"{chr(ord('a') + i)}[{at}:{min(at + BURST, size)}]" in done for at in parts] == [True] * len(parts)


def test_no_stream_has_more_than_a_burst_before_it_waits(way: Any) -> None:
    for sizes in ((50, 3, 16, 16), (7, 7), (7, 7), (1,) * 40):
        copy(way, *sizes)
    assert all(stream.queued for stream in way.both)
    for stream in way.both:
        in_a_row = 0
        for entry in stream.queued:
            if isinstance(entry, Event):
                in_a_row = 0
                continue
            start, stop = entry[2:-1].split(":")
            in_a_row += int(stop) - int(start)
            assert in_a_row <= BURST


def test_whoever_has_the_link_for_itself_uses_one_stream(way: Any) -> None:
    copy(way, 100, 50, gives_way=False)
    assert way.stream.queued == ["a[0:100]", "b[0:50]"]
    assert way.both[1].queued == []


def test_a_copy_that_cannot_be_made_leaves_its_stream_behind_what_was_begun(way: Any) -> None:
    bad = Vector("bad", 0, 3)
    with pytest.raises(AssertionError):
        way.copy([(Vector("a", 0, 32), Vector("a", 0, 32)), (Vector("b", 0, 2), bad)], gives_way=True)
    assert Stream.current is way.stream
    assert {"a[0:16]", "a[16:32]"} <= set(before(way.stream))


def test_turns_are_no_more_than_bursts(way: Any) -> None:
    """A turn takes the host as long as three copies."""
    copy(way, 4, 4, 4, 4)
    assert not any(isinstance(entry, Event) for entry in way.stream.queued)
    copy(way, 4, 4, 4, 4)
    copy(way, 4, 4, 4, 4)
    turns = sum(isinstance(entry, Event) for stream in way.both for entry in stream.queued)
    assert turns == 2, "there and back once: 16 bytes before, 16 on the other stream, 16 behind"
