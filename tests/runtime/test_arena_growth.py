"""Growth by several threads: order, failure, and what a fork leaves."""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch

from fxoffload.runtime.host_memory import arena as host_arena
from fxoffload.runtime.host_memory import chunk_threads
from fxoffload.runtime.host_memory.address_range import HUGE_PAGE
from fxoffload.runtime.host_memory.arena import Fence, HostArena
from fxoffload.runtime.host_memory.chunk_threads import ChunkThreads
from fxoffload.runtime.host_memory.ledger import Booking, Ledger
from tests.runtime.arenas import LARGE, MIB, resident_share, take, until


@dataclass
class Chunks:
    """A pinner that runs ``on_register`` with the number of the chunk, counted from the arena's first byte."""

    on_register: Callable[[int], None] = lambda chunk: None
    pinned: bool = True
    base: int | None = None
    registered: dict[int, int] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)
    threads: set[str | int | None] = field(default_factory=set)

    def register(self, address: int, nbytes: int) -> None:
        self.threads.add(threading.get_ident())
        if self.base is None:
            self.base = address  # of one thread, before the others are let on
        chunk = (address - self.base) // (2 * MIB)
        self.seen.append(chunk)
        self.on_register(chunk)
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one huge page, and four threads whatever the machine has."""
    monkeypatch.setattr(host_arena, "MAX_CHUNK_BYTES", 2 * MIB)
    monkeypatch.setattr(chunk_threads, "max_threads", lambda: 4)


def make(tmp_path: Path, pinner: Chunks, **options: bool) -> HostArena:
    """An arena with its first chunk, so that the pinner knows where it begins; it has its own ledger."""
    arena = HostArena(pinner, LARGE, booking=Booking(Ledger(tmp_path)), **options)
    arena.free(take(arena, 2 * MIB), None)
    return arena


def test_what_is_asked_for_while_the_last_thread_ends_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alive, and so no other one is started."""
    monkeypatch.setattr(chunk_threads, "max_threads", lambda: 1)
    arena = make(tmp_path, Chunks())
    until(lambda: not arena.is_growing)
    end, asked = ChunkThreads._end, []

    def late(threads: ChunkThreads, owner: HostArena) -> object:
        if not asked:
            asked.append(arena.reserve(8 * MIB, LARGE))
        return end(threads, owner)

    monkeypatch.setattr(ChunkThreads, "_end", late)
    arena.reserve(4 * MIB, LARGE)
    until(lambda: arena.reserved_bytes == 8 * MIB)
    until(lambda: not arena.is_growing)


def test_four_threads_register_at_the_same_time(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)
    pinner = Chunks()
    arena = make(tmp_path, pinner)
    pinner.on_register = lambda chunk: barrier.wait(20) and None
    pinner.threads.clear()
    arena.reserve(18 * MIB, LARGE)
    until(lambda: arena.reserved_bytes == 18 * MIB)
    assert len(pinner.threads) == 4
    assert sorted(pinner.registered.values()) == [2 * MIB] * 9


def test_a_chunk_that_is_early_waits_for_those_in_front(tmp_path: Path) -> None:
    gates = {chunk: threading.Event() for chunk in range(1, 5)}
    pinner = Chunks(lambda chunk: assert_set(gates[chunk]) if chunk else None)
    arena = make(tmp_path, pinner)
    arena.reserve(10 * MIB, LARGE)
    until(lambda: len(pinner.seen) == 5)
    for chunk, ready in ((3, 2), (2, 2), (1, 8), (4, 10)):
        gates[chunk].set()
        until(lambda chunk=chunk: 2 * MIB * chunk in offsets(pinner))
        until(lambda ready=ready: arena.reserved_bytes == ready * MIB)
    block = take(arena, 10 * MIB)
    pieces = list(arena.pieces(block, 10 * MIB))
    assert [at for at, _ in pieces] == [2 * MIB * i for i in range(5)]
    assert {p.data_ptr(): p.numel() for _, p in pieces} == pinner.registered


def test_allocate_wakes_for_every_chunk(tmp_path: Path) -> None:
    """What fits into the first new chunk is had while the rest is still being pinned."""
    gate = threading.Event()
    pinner = Chunks(lambda chunk: assert_set(gate) if chunk > 1 else None)
    arena = make(tmp_path, pinner)
    arena.reserve(16 * MIB, LARGE)
    assert take(arena, 3 * MIB).offset == 0
    assert arena.reserved_bytes == 4 * MIB
    gate.set()
    assert take(arena, 13 * MIB).offset == 3 * MIB


@pytest.mark.parametrize("bad", [1, 2, 4])
def test_a_failure_keeps_the_chunks_before_it(tmp_path: Path, bad: int, caplog: pytest.LogCaptureFixture) -> None:
    """Those after it that were done already are unregistered, and have no memory."""
    later = threading.Event()

    def fail(chunk: int) -> None:
        if chunk == bad and len(pinner.seen) <= 8:
            until(lambda: len(pinner.registered) >= 4)  # the other three of the first four have come
            raise RuntimeError("no more memory to pin")
        later.set()

    pinner = Chunks()
    arena = make(tmp_path, pinner)
    pinner.on_register = fail
    assert arena.allocate(10 * MIB, LARGE) is None
    assert later.is_set()
    assert "no more memory to pin" in arena.refusal
    assert arena.has_failed
    assert arena.reserved_bytes == 2 * MIB * bad
    assert offsets(pinner) == [2 * MIB * i for i in range(bad)]
    assert arena._booking.nbytes == arena.reserved_bytes
    assert resident_share(arena, bad * 2 * MIB, 10 * MIB) == 0.0
    assert [r.getMessage() for r in caplog.records] == [
        "could not get more pinned host memory (no more memory to pin); values stay on the device"
    ]
    # Existing memory is used, and another reservation tries again.
    arena.free(take(arena, 2 * MIB * bad), None)
    pinner.on_register = lambda chunk: None
    arena.reserve(10 * MIB, LARGE)
    assert take(arena, 10 * MIB).offset == 0


def test_who_waits_until_it_has_grown_finds_all_of_it(tmp_path: Path) -> None:
    gate = threading.Event()
    pinner = Chunks()
    arena = make(tmp_path, pinner)
    assert arena.wait_until_grown(0.0)  # nothing is under way
    pinner.on_register = lambda chunk: gate.wait(20) and None
    arena.reserve(18 * MIB, LARGE)
    threading.Timer(0.1, gate.set).start()
    assert arena.wait_until_grown()
    assert gate.is_set() and not arena.is_growing
    assert arena.reserved_bytes == 18 * MIB


def test_who_waits_for_a_growth_does_not_wait_for_ever(tmp_path: Path) -> None:
    gate = threading.Event()
    pinner = Chunks()
    arena = make(tmp_path, pinner)
    pinner.on_register = lambda chunk: gate.wait(20) and None
    arena.reserve(18 * MIB, LARGE)
    assert not arena.wait_until_grown(0.05)
    gate.set()
    assert arena.wait_until_grown()


def test_a_thread_that_cannot_begin_ends_the_growth(tmp_path: Path) -> None:
    arena = make(tmp_path, Chunks())
    with mock.patch.object(chunk_threads, "begin_thread", side_effect=RuntimeError("no context")):
        arena.reserve(18 * MIB, LARGE)
        assert arena.wait_until_grown(20)
    assert arena.has_failed
    assert arena.reserved_bytes == 2 * MIB
    arena.reserve(18 * MIB, LARGE)
    assert arena.wait_until_grown(20)
    assert arena.reserved_bytes == 18 * MIB


def test_a_release_ends_the_growth(tmp_path: Path) -> None:
    pinner = Chunks(lambda chunk: time.sleep(0.02))
    arena = make(tmp_path, pinner)
    arena.reserve(LARGE, LARGE)
    given = arena.release()
    assert 2 * MIB <= given < LARGE
    assert pinner.registered == {}
    assert arena._booking.nbytes == 0
    time.sleep(0.1)
    assert (arena.reserved_bytes, pinner.registered) == (0, {})
    pinner.base = None
    assert take(arena, 3 * MIB).offset == 0


def test_exact_arenas_end_where_the_reservation_ends(tmp_path: Path) -> None:
    pinner = Chunks()
    arena = make(tmp_path, pinner, exact=True)
    wanted = 5 * MIB + 12_345
    arena.reserve(wanted, LARGE)
    until(lambda: arena.reserved_bytes >= wanted)
    assert arena.reserved_bytes == -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
    take(arena, wanted)
    take(arena, 6 * MIB)
    assert arena.reserved_bytes == -(-(wanted + 6 * MIB) // mmap.PAGESIZE) * mmap.PAGESIZE + extra(wanted)
    assert all(border % (2 * MIB) == 0 for border in arena._borders if border not in ends(arena, wanted))


def extra(wanted: int) -> int:
    """Blocks are whole alignments, so that the sum of two may take one page more."""
    aligned = -(-wanted // host_arena.ALIGNMENT) * host_arena.ALIGNMENT + 6 * MIB
    return (-(-aligned // mmap.PAGESIZE) - -(-(wanted + 6 * MIB) // mmap.PAGESIZE)) * mmap.PAGESIZE


def ends(arena: HostArena, wanted: int) -> set[int]:
    return {-(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE, arena.reserved_bytes}


def test_the_range_starts_at_a_huge_page_and_gets_them(tmp_path: Path) -> None:
    arena = make(tmp_path, Chunks())
    take(arena, 10 * MIB)
    assert arena._range is not None
    assert arena._range.address % HUGE_PAGE == 0
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists() or "[never]" in mode.read_text():
        pytest.skip("this machine has no transparent huge pages")
    # One of five at least: a machine that is full may be short of the others.
    assert huge_bytes(arena._range.address, 10 * MIB) >= HUGE_PAGE


def test_an_arena_that_is_dropped_unregisters_and_gives_its_booking_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    pinner = Chunks()
    arena = HostArena(pinner, LARGE, booking=Booking(ledger))
    arena.free(take(arena, 6 * MIB), Fence(1, "event"))
    until(lambda: not any(t.name == "fxoffload-pin" for t in threading.enumerate()))
    assert len(pinner.registered) == 3
    assert ledger.booked_bytes() == 6 * MIB
    del arena
    assert pinner.registered == {}
    assert ledger.booked_bytes() == 0


def test_what_is_booked_by_others_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    booking = Booking(Ledger(tmp_path))
    monkeypatch.setattr(booking, "grow_to", lambda nbytes: False)
    monkeypatch.setattr(booking, "grow_within", lambda nbytes: 3 * MIB + 1)
    booking.refusal = "others have it"
    arena = HostArena(Chunks(), LARGE, booking=booking)
    assert arena.allocate(MIB, LARGE) is None
    assert arena.refusal == "others have it"
    arena.reserve(10 * MIB, LARGE)
    until(lambda: arena.reserved_bytes == 3 * MIB)
    assert take(arena, 3 * MIB).offset == 0


def test_a_forked_child_has_no_part_of_it(tmp_path: Path) -> None:
    """It may be dropped there, used anew, and its old blocks neither read nor freed by mistake."""
    pinner = Chunks()
    arena = make(tmp_path, pinner)
    block = take(arena, 8 * MIB)
    for _, piece in arena.pieces(block, block.nbytes):
        piece.fill_(7)
    del piece  # the only views are those that the child drops
    assert arena._range is not None
    address = arena._range.address
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        answers.put(is_mapped(address, 8 * MIB))
        try:
            list(arena.pieces(block, 1))
        except RuntimeError as error:
            answers.put(str(error))
        arena.free(block, None)
        answers.put((arena.in_use_bytes, arena.reserved_bytes))
        # The child's own memory may come to lie in the hole, and a view that dies must not unmap it.
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        size = ctypes.c_size_t(8 * MIB)
        mine = libc.mmap(ctypes.c_void_p(address), size, protection, private, -1, ctypes.c_long(0))
        views.clear()
        gc.collect()
        answers.put((mine == address, is_mapped(address, 8 * MIB)))
        ctypes.memset(mine, 1, 8 * MIB)
        pinner.base = None
        answers.put(take(arena, MIB).offset)

    views = [piece for _, piece in arena.pieces(block, block.nbytes)]
    assert is_mapped(address, 8 * MIB)
    process = context.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert answers.get() is False
    assert "expected a block of this process' host memory" in answers.get()
    assert answers.get() == (0, 0)
    assert answers.get() == (True, True)
    assert answers.get() == 0
    assert len(views) == 4
    assert all(bool((p == 7).all()) for _, p in arena.pieces(block, block.nbytes))
    assert arena.in_use_bytes == 8 * MIB


def test_a_fork_in_the_middle_of_a_growth(tmp_path: Path) -> None:
    """The child has neither the threads nor the locks that they held."""
    gate = threading.Event()
    pinner = Chunks(lambda chunk: assert_set(gate) if chunk else None)
    arena = make(tmp_path, pinner)
    arena.reserve(8 * MIB, LARGE)
    until(lambda: len(pinner.seen) == 4)
    with arena._lock:
        pid = os.fork()
        if pid == 0:
            pinner.on_register, pinner.base = (lambda chunk: None), None
            os._exit(0 if take(arena, MIB).offset == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.set()
    assert take(arena, 8 * MIB).offset == 0


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(64, 1, 16), (8, 1, 8), (16, 4, 4), (2, 8, 1)])
def test_one_thread_for_each_core_of_this_process(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, expected: int
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(chunk_threads.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert chunk_threads.max_threads() == expected


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(20)


def offsets(pinner: Chunks) -> list[int]:
    assert pinner.base is not None
    return sorted(address - pinner.base for address in list(pinner.registered))


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether any mapping of this process touches the range."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start < address + nbytes and address < end:
            return True
    return False


def huge_bytes(address: int, nbytes: int) -> int:
    """Bytes in huge pages of the mappings that lie in a range of addresses."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start < address + nbytes and address < end
        elif inside and first == "AnonHugePages:":
            found += int(rest.split()[0]) << 10
    return found


def test_bytes_survive_a_round_trip_over_many_chunks(tmp_path: Path) -> None:
    arena = make(tmp_path, Chunks())
    values = [torch.randint(256, (size,), dtype=torch.uint8) for size in (5 * MIB + 3, 1, 7 * MIB, 2 * MIB)]
    blocks = [take(arena, len(value)) for value in values]
    for value, block in zip(values, blocks, strict=True):
        for at, piece in arena.pieces(block, len(value)):
            piece.copy_(value[at : at + len(piece)])
    for value, block in zip(values, blocks, strict=True):
        assert torch.equal(torch.cat([piece for _, piece in arena.pieces(block, len(value))]), value)
