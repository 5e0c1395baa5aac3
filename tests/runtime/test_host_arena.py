from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxoffload.runtime.host_memory import arena as host_arena
from fxoffload.runtime.host_memory.arena import ALIGNMENT, Fence, HeapMemory, HostArena, HostBlock, address_space_bytes
from fxoffload.runtime.host_memory.free_list import younger
from tests.marks import examples

MIB = 1 << 20
LARGE = 64 * MIB


@dataclass
class Recorder:
    """A pinner that writes down its requests; it may be slow, wait for a gate, or fail from some call on."""

    pinned: bool = False
    delay_s: float = 0.0
    gate: threading.Event | None = None
    fail_from: int = 1000
    registered: list[tuple[int, int]] = field(default_factory=list)
    unregistered: list[int] = field(default_factory=list)

    def register(self, address: int, nbytes: int) -> None:
        time.sleep(self.delay_s)
        if self.gate is not None:
            assert self.gate.wait(30)
        if len(self.registered) >= self.fail_from:
            raise RuntimeError("no more memory to pin")
        self.registered.append((address, nbytes))

    def unregister(self, address: int) -> None:
        self.unregistered.append(address)


def take(arena: HostArena, nbytes: int, limit: int = LARGE) -> HostBlock:
    block = arena.allocate(nbytes, limit)
    assert block is not None
    vars(arena).setdefault("taken", []).append(block)  # in use until it is freed
    return block


@contextmanager
def grown(arena: HostArena, nbytes: int) -> Iterator[None]:
    """Wait until ``nbytes`` are ready."""
    arena.reserve(nbytes, LARGE)
    end = time.monotonic() + 10
    while arena.reserved_bytes < nbytes:
        assert time.monotonic() < end, f"{arena.reserved_bytes} B are ready, expected {nbytes}"
        time.sleep(0.001)
    yield


def resident_share(address: int, nbytes: int) -> float:
    """How much of some whole pages is backed by memory."""
    pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def fill(arena: HostArena, block: HostBlock, value: int) -> None:
    for _, piece in arena.pieces(block, block.nbytes):
        piece.fill_(value)


def test_blocks_are_exact_and_aligned() -> None:
    """Three blocks of 5 alignments and a byte: 18 alignments, not the 24 of powers of two."""
    arena = HostArena(HeapMemory(), LARGE)
    blocks = [take(arena, 5 * ALIGNMENT + 1) for _ in range(3)]
    assert [b.nbytes for b in blocks] == [6 * ALIGNMENT] * 3
    assert [b.offset for b in blocks] == [0, 6 * ALIGNMENT, 12 * ALIGNMENT]
    assert arena.in_use_bytes == 18 * ALIGNMENT
    (start,) = (piece for _, piece in arena.pieces(blocks[1], 5 * ALIGNMENT + 1))
    assert start.data_ptr() % ALIGNMENT == 0
    assert start.numel() == 5 * ALIGNMENT + 1


def test_the_smallest_block_holds_something() -> None:
    arena = HostArena(HeapMemory(), LARGE)
    first, second = take(arena, 0), take(arena, 1)
    assert (first.nbytes, second.offset) == (ALIGNMENT, ALIGNMENT)


def test_freed_neighbours_become_one_range() -> None:
    arena = HostArena(HeapMemory(), 2 * MIB)
    size = 2 * MIB // 4
    blocks = [take(arena, size) for _ in range(4)]
    assert arena.allocate(1, 2 * MIB) is None
    for i in (2, 0, 1):  # behind, in front, in between
        arena.free(blocks[i], None)
    assert take(arena, 3 * size).offset == 0
    assert arena.reserved_bytes == 2 * MIB


def test_a_range_that_is_free_is_used_before_the_arena_grows() -> None:
    arena = HostArena(HeapMemory(), LARGE)
    hole = take(arena, MIB)
    take(arena, MIB)
    arena.free(hole, None)
    assert take(arena, MIB // 2).offset == 0
    assert take(arena, MIB // 2).offset == MIB // 2
    assert arena.reserved_bytes == 2 * MIB


def test_a_block_may_begin_in_the_free_tail_and_end_in_new_memory() -> None:
    arena = HostArena(HeapMemory(), LARGE)
    take(arena, MIB)
    assert take(arena, 2 * MIB).offset == MIB
    assert arena.reserved_bytes == 4 * MIB


def test_of_two_fences_the_youngest_stays() -> None:
    arena = HostArena(HeapMemory(), 2 * MIB)
    size = 2 * MIB // 4
    blocks = [take(arena, size) for _ in range(4)]
    for block, order in zip(blocks, (3, 9, 5, None), strict=True):
        arena.free(block, Fence(order, f"event {order}") if order else None)
    whole = take(arena, 4 * size)
    assert whole.fence == Fence(9, "event 9")


def test_a_fence_that_nobody_waited_for_is_kept_on_the_block_and_on_the_rest() -> None:
    arena = HostArena(HeapMemory(), LARGE)
    arena.free(take(arena, 2 * MIB), Fence(7, "old"))
    first = take(arena, MIB)
    assert first.fence == Fence(7, "old")
    arena.free(first, None)  # freed again without having been written
    assert take(arena, MIB).fence == Fence(7, "old")
    assert take(arena, MIB).fence == Fence(7, "old")  # the other half


def test_fresh_memory_has_no_fence() -> None:
    arena = HostArena(HeapMemory(), LARGE)
    assert take(arena, MIB).fence is None


def test_a_block_across_two_chunks_comes_in_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "MAX_CHUNK_BYTES", 2 * MIB)
    pinner = Recorder()
    arena = HostArena(pinner, LARGE)
    with grown(arena, 6 * MIB):
        assert [n for _, n in pinner.registered] == [2 * MIB] * 3
    take(arena, MIB)
    block = take(arena, 4 * MIB)
    pieces = list(arena.pieces(block, 4 * MIB - 3))
    assert [at for at, _ in pieces] == [0, MIB, 3 * MIB]
    assert [p.numel() for _, p in pieces] == [MIB, 2 * MIB, MIB - 3]
    # They are one range of addresses, each inside one registration.
    base = pieces[0][1].data_ptr()
    for at, piece in pieces:
        assert piece.data_ptr() == base + at
        assert any(a <= piece.data_ptr() and piece.data_ptr() + piece.numel() <= a + n for a, n in pinner.registered)
    value = torch.randint(256, (4 * MIB - 3,), dtype=torch.uint8)
    for at, piece in pieces:
        piece.copy_(value[at : at + piece.numel()])
    assert torch.equal(torch.cat([p for _, p in arena.pieces(block, 4 * MIB - 3)]), value)


def test_none_where_the_limit_would_be_passed() -> None:
    arena = HostArena(HeapMemory(), LARGE)
    assert arena.allocate(4 * MIB + 1, 4 * MIB) is None
    assert arena.reserved_bytes == 0
    first = take(arena, 3 * MIB, 4 * MIB)
    assert arena.allocate(2 * MIB, 4 * MIB) is None
    assert take(arena, MIB, 4 * MIB).offset == 3 * MIB
    arena.free(first, None)
    assert arena.allocate(3 * MIB, 1) is None  # a limit bounds memory in use, even where more is there
    assert take(arena, 3 * MIB, 4 * MIB).offset == 0
    assert arena.reserved_bytes == 4 * MIB


def test_none_where_the_addresses_end() -> None:
    arena = HostArena(HeapMemory(), 2 * MIB)
    assert arena.allocate(2 * MIB + 1, LARGE) is None
    assert take(arena, 2 * MIB).offset == 0


@pytest.mark.parametrize("limit", [3 * MIB, 3 * MIB + 4096, 700_000])
def test_no_more_is_reserved_than_the_limit(limit: int) -> None:
    """Chunks are huge pages, limits need not be."""
    arena = HostArena(HeapMemory(), LARGE)
    blocks = [arena.allocate(limit // 2, limit)]
    arena.reserve(LARGE, limit)
    while blocks[-1] is not None:
        blocks.append(arena.allocate(ALIGNMENT, limit))
    assert limit - 4096 < arena.reserved_bytes <= limit
    assert arena.in_use_bytes == arena.reserved_bytes


def test_it_grows_in_the_background() -> None:
    gate = threading.Event()
    arena = HostArena(Recorder(gate=gate), LARGE)
    arena.reserve(2 * MIB, LARGE)
    assert arena.allocate_ready(MIB) is None
    assert arena.wait_ms == 0.0
    opening = threading.Timer(0.2, gate.set)
    opening.start()
    take(arena, MIB)
    opening.join()
    assert arena.wait_ms > 0
    assert arena.num_growths == 1
    waited = arena.wait_ms
    take(arena, MIB)
    assert (arena.wait_ms, arena.num_growths) == (waited, 1)


def test_it_never_shrinks_and_grows_once_for_equal_requests() -> None:
    pinner = Recorder()
    arena = HostArena(pinner, LARGE)
    for nbytes in (6 * MIB, MIB, 6 * MIB):
        with grown(arena, 6 * MIB):
            arena.reserve(nbytes, LARGE)
    assert sum(n for _, n in pinner.registered) == arena.reserved_bytes == 6 * MIB


def test_pinned_memory_is_faulted_in_before_it_is_registered() -> None:
    class Looker(Recorder):
        def register(self, address: int, nbytes: int) -> None:
            super().register(address, nbytes)
            seen.append(resident_share(address, nbytes))

    seen: list[float] = []
    take(HostArena(Looker(pinned=True), LARGE), MIB)
    take(HostArena(Looker(pinned=False), LARGE), MIB)
    assert seen == [1.0, 0.0]


def test_what_cannot_be_pinned_stays_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    arena = HostArena(Recorder(fail_from=1), LARGE)
    take(arena, 2 * MIB)
    assert arena.allocate(MIB, LARGE) is None
    assert arena.allocate(MIB, LARGE) is None
    assert arena.reserved_bytes == 2 * MIB
    messages = [r.getMessage() for r in caplog.records]
    assert messages == ["could not get more pinned host memory (no more memory to pin); values stay on the device"]


def test_another_reservation_tries_again() -> None:
    pinner = Recorder(fail_from=0)
    arena = HostArena(pinner, LARGE)
    assert arena.allocate(MIB, LARGE) is None
    pinner.fail_from = 1000
    with grown(arena, 2 * MIB):
        take(arena, MIB)


def test_release_raises_while_something_is_in_use() -> None:
    arena = HostArena(HeapMemory(), LARGE)
    block = take(arena, MIB)
    with pytest.raises(RuntimeError, match=f"found {MIB} bytes in use: run or drop the pending backward passes"):
        arena.release()
    assert arena.reserved_bytes == 2 * MIB
    arena.free(block, None)
    assert arena.release() == 2 * MIB


def test_release_gives_every_chunk_back_and_the_arena_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "MAX_CHUNK_BYTES", 2 * MIB)
    pinner = Recorder()
    arena = HostArena(pinner, LARGE)
    arena.free(take(arena, 6 * MIB), Fence(3, "old"))
    assert arena.release() == 6 * MIB
    assert sorted(pinner.unregistered) == sorted(a for a, _ in pinner.registered)
    assert (arena.reserved_bytes, arena.in_use_bytes) == (0, 0)
    assert arena.release() == 0
    block = take(arena, MIB)
    assert (block.offset, block.fence) == (0, None)
    fill(arena, block, 3)


def test_release_does_not_wait_for_the_rest_of_a_reservation() -> None:
    """More was asked for than was pinned when the memory was given back: the rest is not pinned any more."""
    arena = HostArena(Recorder(delay_s=0.05), LARGE)
    arena.reserve(4 * MIB, LARGE)
    arena.release()
    time.sleep(0.15)
    assert arena.reserved_bytes == 0


def test_a_view_that_somebody_holds_outlives_the_release() -> None:
    arena = HostArena(HeapMemory(), LARGE)
    block = take(arena, MIB)
    ((_, view),) = arena.pieces(block, MIB)
    fill(arena, block, 7)
    arena.free(block, None)
    assert arena.release() == 2 * MIB
    assert int(view.min()) == 7


def test_free_takes_no_lock() -> None:
    """A finalizer may run in the middle of anything, on any thread: also while the arena's lock is held."""
    arena = HostArena(HeapMemory(), LARGE)
    block = take(arena, MIB)
    with arena._lock:
        thread = threading.Thread(target=arena.free, args=(block, None), daemon=True)
        thread.start()
        thread.join(timeout=5)
        assert not thread.is_alive()
        assert arena._in_use == MIB  # only queued
    assert arena.in_use_bytes == 0


def test_many_threads() -> None:
    arena = HostArena(HeapMemory(), LARGE)
    errors: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for i in range(100):
                block = take(arena, 1000 + 700 * ((value + i) % 5))
                fill(arena, block, value)
                assert all(int(p.min()) == int(p.max()) == value for _, p in arena.pieces(block, block.nbytes))
                arena.free(block, None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert arena.in_use_bytes == 0


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_against_a_model_allocator(data: st.DataObject) -> None:
    """No two live blocks overlap, none lies outside, fences are at least as young as the youngest of the earlier
    blocks, and when all is freed the arena is one range again."""
    limit = data.draw(st.sampled_from([2 * MIB, 4 * MIB]))
    arena = HostArena(HeapMemory(), LARGE)
    live: dict[int, HostBlock] = {}
    fences: dict[int, int] = {}  # alignment unit -> youngest order freed with it since it was last waited for
    order = 0
    for step in range(data.draw(st.integers(1, 40))):
        if live and data.draw(st.booleans()):
            block = live.pop(data.draw(st.sampled_from(sorted(live))))
            fence = None
            if data.draw(st.booleans()):
                order += 1
                fence = Fence(order, order)
                fences.update(dict.fromkeys(units(block), order))
            arena.free(block, fence)
            continue
        nbytes = data.draw(st.integers(0, MIB))
        block = arena.allocate(nbytes, limit)
        if block is None:
            largest = largest_gap(list(live.values()), limit)
            assert largest < max(nbytes, 1), f"{largest} bytes in a row were free"
            continue
        assert block.offset % ALIGNMENT == block.nbytes % ALIGNMENT == 0
        assert nbytes <= block.nbytes < nbytes + ALIGNMENT + (nbytes == 0)
        assert block.offset + block.nbytes <= arena.reserved_bytes <= limit
        for other in live.values():
            assert block.offset + block.nbytes <= other.offset or other.offset + other.nbytes <= block.offset
        youngest = max((fences.pop(u, 0) for u in units(block)), default=0)
        assert (block.fence.order if block.fence else 0) >= youngest
        block.fence = None  # waited for
        live[step] = block
    assert arena.in_use_bytes == sum(b.nbytes for b in live.values())
    for block in live.values():
        arena.free(block, None)
    assert arena.in_use_bytes == 0
    ready = arena.reserved_bytes
    if ready:
        assert take(arena, ready).nbytes == ready
        assert arena.reserved_bytes == ready


def units(block: HostBlock) -> range:
    return range(block.offset // ALIGNMENT, (block.offset + block.nbytes) // ALIGNMENT)


def largest_gap(blocks: list[HostBlock], limit: int) -> int:
    edges = sorted((b.offset, b.offset + b.nbytes) for b in blocks)
    starts = [0, *(end for _, end in edges)]
    ends = [*(start for start, _ in edges), limit]
    return max(end - start for start, end in zip(starts, ends, strict=True))


def test_addresses() -> None:
    assert address_space_bytes(1 << 30) == 1 << 40
    assert address_space_bytes(1 << 41) == 1 << 41


def test_of_a_fence_and_none_the_fence_stays() -> None:
    old, new = Fence(1, "old"), Fence(2, "new")
    assert younger(None, None) is None
    assert younger(old, None) is old and younger(None, old) is old
    assert younger(old, new) is new and younger(new, old) is new


def test_bytes_from_before_a_release_cannot_be_had() -> None:
    arena = HostArena(Recorder(), LARGE)
    before = take(arena, MIB)
    assert arena.has(before)
    arena.free(before, None)
    arena.release()
    assert not arena.has(before)
    assert arena.has(take(arena, MIB)) and not arena.has(before)
