"""Forked children destroy no event of their parent: torch's CUDA events would abort them."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxoffload import gc_pause
from fxoffload.gc_pause import gc_paused
from fxoffload.runtime import engine as engines
from fxoffload.runtime.copies.streams import HostCopies
from fxoffload.runtime.engine import Budgets, CopyEngine
from fxoffload.runtime.host_memory.arena import Fence, HeapMemory, HostArena
from fxoffload.runtime.host_memory.free_list import Span
from fxoffload.runtime.transfer import Group
from tests.runtime.arenas import LARGE, MIB, take

ABORTED = 99
BUDGETS = Budgets(LARGE, 0, 0)


class Event:
    """Ends a forked child that destroys it."""

    def __init__(self) -> None:
        self.me: object = None
        self._made_in = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self._made_in:
            os._exit(ABORTED)


def in_child(work: Callable[[], Any]) -> int:
    """The exit code of a child that does it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def arena() -> HostArena:
    found = HostArena(HeapMemory(), LARGE)
    found.free(take(found, 2 * MIB), None)
    return found


def test_the_event_of_these_tests_ends_a_child() -> None:
    events = [Event()]
    assert in_child(events.clear) == ABORTED


def test_those_of_an_arena(arena: HostArena) -> None:
    """Of ranges that are free or being given back, and of blocks that are dead, or die in the child."""
    first, second, third = (take(arena, MIB // 2) for _ in range(3))
    arena.free(first, Fence(1, Event()))
    assert arena.in_use_bytes == MIB  # its fence lies on a free range now
    arena.free(second, Fence(2, Event()))
    arena._cut = Span(0, 1, Fence(3, Event()))
    del first, second
    left = [third]
    del third

    def use() -> None:
        arena.free(left.pop(), Fence(4, None))
        assert take(arena, MIB).offset == 0
        assert arena.in_use_bytes == MIB

    left[0].fence = Fence(5, Event())
    assert in_child(use) == 0
    arena._cut = None


def test_those_of_an_arena_are_let_go_where_nobody_forked(arena: HostArena) -> None:
    event = Event()
    seen = weakref.ref(event)
    block = take(arena, MIB)
    arena.free(block, Fence(1, event))
    assert arena.in_use_bytes == 0
    arena.release()
    block.fence = None
    del event
    assert seen() is None


class Events(HostCopies):
    """The event of a copy is one that ends a child, unless the child has made it."""

    def offload(self, pieces: Iterable[tuple[Tensor, Tensor]], *, gives_way: bool = True) -> object:
        super().offload(pieces)
        return Event()

    reload = offload


def test_those_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the host and back, of transfers from before the fork: in flight, ahead, and neither."""
    engine = CopyEngine(torch.device("cpu"), Events(), HostArena(HeapMemory(), LARGE))
    monkeypatch.setitem(engines._ENGINES, engine.device, engine)

    def save(count: int) -> Group:
        group = Group()
        for transfer in engine.offload([[torch.ones(4)] for _ in range(count)], BUDGETS, reclaimable=False):
            assert transfer is not None
            group.add(0, transfer)
        return group

    groups = [save(3)]
    engine.release(0)
    engine.request(groups[0], keeps_graph=False, prefetch=True, across_graphs=True)
    engine.prefetch(40)
    groups.append(save(1))
    states = [t.there is not None for group in groups for t in group.in_need_order()]
    assert (states, len(engine._in_flight)) == ([True, True, False, False], 1)

    def use() -> None:
        groups.clear()
        engine.drop_abandoned()
        assert engine.host_bytes_in_use() == 0
        own = save(1)
        assert engine.host_bytes_in_use() == 512
        del own
        assert engine.host_bytes_in_use() == 0

    assert in_child(use) == 0
    groups.clear()
    assert engine.host_bytes_in_use() == 0


def test_those_of_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_pause, "_leaves_garbage", True)
    with gc_paused():  # the parent finds none of it
        lost = Event()
        lost.me = lost
        del lost
        assert in_child(gc.collect) == 0


def test_nothing_is_collected_around_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the collector could run in the child before it is told what to leave alone."""
    seen: list[tuple[str, bool]] = []

    class Pauses(type(gc_pause._pauses)):
        def begin(self, pause: gc_paused) -> None:
            super().begin(pause)
            seen.append(("begin", gc.isenabled()))

        def end(self, pause: gc_paused) -> None:
            super().end(pause)
            seen.append(("end", gc.isenabled()))

    monkeypatch.setattr(gc_pause, "_pauses", Pauses())
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        assert in_child(lambda: None if gc.isenabled() else sys.exit(1)) == 0
        assert seen == [("begin", False), ("end", True)]
    finally:
        (gc.enable if was_enabled else gc.disable)()
