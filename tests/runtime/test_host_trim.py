"""Host memory that no step needs any more: how the arena gives it back, and when."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxoffload.runtime.copies.streams import HostCopies
from fxoffload.runtime.engine import CopyEngine
from fxoffload.runtime.host_memory import address_range as host_range
from fxoffload.runtime.host_memory import arena as host_arena
from fxoffload.runtime.host_memory import chunk_threads
from fxoffload.runtime.host_memory import trim as host_trim
from fxoffload.runtime.host_memory.arena import Fence, HostArena, HostBlock
from fxoffload.runtime.host_memory.ledger import Booking, Ledger
from fxoffload.runtime.host_memory.trim import STEADY_STEPS, HostTrim
from tests.runtime.arenas import LARGE, MIB, resident_share, take, until

CHUNK = 2 * MIB


@dataclass
class Driver:
    """A pinner that, as the driver does, registers no address twice and knows each address that it unregisters. The
    hooks are called with the number of the chunk."""

    on_register: Callable[[int], None] = lambda chunk: None
    on_unregister: Callable[[int], None] = lambda chunk: None
    pinned: bool = True
    base: int = 0
    registered: dict[int, int] = field(default_factory=dict)
    said: list[tuple[str, int]] = field(default_factory=list)

    def register(self, address: int, nbytes: int) -> None:
        self.base = self.base or address
        self._say("register", address)
        self.on_register(self._chunk(address))
        assert address not in self.registered
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self.on_unregister(self._chunk(address))
        self._say("unregister", address)
        del self.registered[address]

    def _chunk(self, address: int) -> int:
        return (address - self.base) // CHUNK

    def _say(self, what: str, address: int) -> None:
        self.said.append((what, self._chunk(address)))

    def given_back(self) -> list[int]:
        return [chunk for what, chunk in self.said if what == "unregister"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "MAX_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(chunk_threads, "max_threads", lambda: 1)
    monkeypatch.setattr(host_range, "_PIECE", CHUNK // 2)


def make(tmp_path: Path, nbytes: int) -> tuple[HostArena, Driver, Ledger]:
    """An arena with this many bytes, all free."""
    ledger, driver = Ledger(tmp_path), Driver()
    arena = HostArena(driver, LARGE, booking=Booking(ledger))
    arena.free(take(arena, nbytes), None)
    settled(arena)
    assert arena.reserved_bytes == nbytes
    return arena, driver, ledger


def settled(arena: HostArena) -> None:
    until(lambda: not arena.is_growing)


def nothing() -> None:
    """No copy is under way."""


def fill(arena: HostArena, block: HostBlock, seed: int) -> torch.Tensor:
    value = torch.randint(256, (block.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    for at, piece in arena.pieces(block, block.nbytes):
        piece.copy_(value[at : at + len(piece)])
    return value


def read(arena: HostArena, block: HostBlock) -> torch.Tensor:
    return torch.cat([piece for _, piece in arena.pieces(block, block.nbytes)])


class InThread:
    """Runs something on another thread."""

    def __init__(self, what: Callable[[], object]) -> None:
        self.found: object = None
        self._thread = threading.Thread(target=lambda: setattr(self, "found", what()), daemon=True)
        self._thread.start()

    def result(self) -> object:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.found

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()


# -- what goes ---------------------------------------------------------------------------------------------------------


def test_whole_chunks_above_what_is_kept_go(tmp_path: Path) -> None:
    arena, driver, ledger = make(tmp_path, 12 * MIB)
    block = take(arena, 3 * MIB)
    value = fill(arena, block, 1)
    assert arena.trim(5 * MIB, nothing) == 6 * MIB
    assert driver.given_back() == [5, 4, 3]
    assert sorted(driver.registered.values()) == [CHUNK] * 3
    assert arena.reserved_bytes == 6 * MIB == ledger.booked_bytes() == arena._booking.backed_bytes
    assert resident_share(arena, 0, 6 * MIB) == 1.0
    assert resident_share(arena, 6 * MIB, 12 * MIB) == 0.0
    assert torch.equal(read(arena, block), value)
    assert arena.in_use_bytes == 3 * MIB
    assert arena.trim(5 * MIB, nothing) == 0


@pytest.mark.parametrize(("offset", "left"), [(0, 4), (5, 6), (11, 12)])
def test_a_block_stops_it(tmp_path: Path, offset: int, left: int) -> None:
    arena, driver, _ = make(tmp_path, 12 * MIB)
    before, block = (take(arena, offset * MIB) if offset else None), take(arena, MIB)
    if before is not None:
        arena.free(before, None)
    assert block.offset == offset * MIB
    assert arena.trim(3 * MIB, nothing) == (12 - left) * MIB
    assert arena.reserved_bytes == left * MIB
    arena.free(block, None)
    assert arena.trim(0, nothing) == left * MIB
    assert (arena.reserved_bytes, driver.registered, arena._booking.nbytes) == (0, {}, 0)


def test_a_block_that_is_being_freed_counts_as_free(tmp_path: Path) -> None:
    arena, _, _ = make(tmp_path, 4 * MIB)
    arena.free(take(arena, 4 * MIB), Fence(1, "read"))
    assert arena.trim(0, nothing) == 4 * MIB


def test_it_waits_for_copies_when_nobody_can_start_one_any_more(tmp_path: Path) -> None:
    """Before it, a block might still be taken there; after it, memory is gone that a copy may still read."""
    arena, driver, _ = make(tmp_path, 8 * MIB)
    seen = []

    def copies() -> None:
        seen.append((arena.allocate_ready(3 * MIB), arena.allocate_ready(2 * MIB), driver.given_back()))

    assert arena.trim(2 * MIB, copies) == 6 * MIB
    ((large, small, given),) = seen
    assert large is None and small is not None and small.offset == 0
    assert given == []


def test_a_limit_lets_one_chunk_go_at_least(tmp_path: Path) -> None:
    """The rest can be taken meanwhile, and goes later."""
    arena, driver, ledger = make(tmp_path, 8 * MIB)
    assert arena.trim(2 * MIB, nothing, limit_s=0.0) == CHUNK
    assert driver.given_back() == [3]
    block = take(arena, 6 * MIB)
    assert (block.offset, arena.reserved_bytes) == (0, 6 * MIB)
    arena.free(block, None)
    assert arena.trim(2 * MIB, nothing, limit_s=60.0) == 4 * MIB
    assert arena.reserved_bytes == 2 * MIB == ledger.booked_bytes()


def test_the_wait_for_copies_does_not_count(tmp_path: Path) -> None:
    """It is over before the first chunk goes: the limit is for those after it."""
    arena, _, _ = make(tmp_path, 8 * MIB)
    assert arena.trim(2 * MIB, lambda: time.sleep(0.3), limit_s=0.2) == 6 * MIB


def test_an_error_of_the_device_leaves_all_as_it_was(tmp_path: Path) -> None:
    arena, driver, _ = make(tmp_path, 8 * MIB)

    def fails() -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        arena.trim(2 * MIB, fails)
    block = arena.allocate_ready(8 * MIB)
    assert block is not None and (arena.reserved_bytes, driver.given_back()) == (8 * MIB, [])


def test_a_chunk_that_stays_registered_is_used_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arena, driver, ledger = make(tmp_path, 10 * MIB)

    def fail(chunk: int) -> None:
        if chunk == 3:
            raise RuntimeError("on purpose")

    driver.on_unregister = fail
    assert arena.trim(2 * MIB, nothing) == 2 * MIB, "the last chunk went before one did not"
    assert "on purpose" in caplog.text
    assert arena.reserved_bytes == 8 * MIB == ledger.booked_bytes()
    driver.on_unregister = lambda chunk: None
    block = take(arena, 10 * MIB)
    value = fill(arena, block, 2)
    assert torch.equal(read(arena, block), value)
    arena.free(block, None)
    assert arena.release() == 10 * MIB
    assert driver.registered == {}


# -- afterwards --------------------------------------------------------------------------------------------------------


def test_it_grows_again(tmp_path: Path) -> None:
    """Registered anew, in order, with bytes that come back as they were written."""
    arena, driver, ledger = make(tmp_path, 12 * MIB)
    block = take(arena, 3 * MIB)
    value = fill(arena, block, 3)
    arena.trim(4 * MIB, nothing)
    driver.said.clear()
    others = [take(arena, size) for size in (4 * MIB, 7 * MIB)]
    settled(arena)
    values = [fill(arena, other, 4 + i) for i, other in enumerate(others)]
    assert [other.offset for other in others] == [3 * MIB, 7 * MIB]
    assert driver.said == [("register", chunk) for chunk in range(2, 7)]
    assert arena.reserved_bytes == 14 * MIB == ledger.booked_bytes() == arena._booking.backed_bytes
    assert all(torch.equal(read(arena, b), v) for b, v in zip((block, *others), (value, *values), strict=True))
    for other in (block, *others):
        arena.free(other, None)
    assert arena.trim(1, nothing) == 12 * MIB


def test_a_reservation_after_it(tmp_path: Path) -> None:
    arena, driver, _ = make(tmp_path, 8 * MIB)
    arena.trim(2 * MIB, nothing)
    arena.reserve(6 * MIB, LARGE)
    until(lambda: arena.reserved_bytes == 6 * MIB)
    assert len(driver.registered) == 3


def test_a_release_after_it(tmp_path: Path) -> None:
    arena, driver, ledger = make(tmp_path, 8 * MIB)
    arena.trim(3 * MIB, nothing)
    assert arena.release() == 4 * MIB
    assert (driver.registered, ledger.booked_bytes()) == ({}, 0)
    driver.base = 0
    assert take(arena, MIB).offset == 0


def test_an_arena_that_is_dropped_after_it_unregisters_the_rest(tmp_path: Path) -> None:
    arena, driver, ledger = make(tmp_path, 8 * MIB)
    arena.trim(3 * MIB, nothing)
    assert len(driver.registered) == 2
    del arena
    assert (driver.registered, ledger.booked_bytes()) == ({}, 0)


# -- while others go on ------------------------------------------------------------------------------------------------


class Held:
    """A trim of an arena of six chunks to one, on another thread, with one of them in hand."""

    def __init__(self, tmp_path: Path, chunk: int = 4) -> None:
        self._chunk = chunk
        self.arena, self.driver, self.ledger = make(tmp_path, 12 * MIB)
        self.gate, self.is_in_hand = threading.Event(), threading.Event()
        self.driver.on_unregister = self._wait
        self.trim = InThread(lambda: self.arena.trim(2 * MIB, nothing))
        assert self.is_in_hand.wait(20)

    def _wait(self, chunk: int) -> None:
        if chunk == self._chunk and not self.gate.is_set():
            self.is_in_hand.set()
            assert self.gate.wait(20)


def test_what_fits_below_it_does_not_wait(tmp_path: Path) -> None:
    held = Held(tmp_path)
    block = take(held.arena, 2 * MIB)
    value = fill(held.arena, block, 5)
    held.arena.free(take_ready(held.arena, block), None)
    assert held.trim.runs and held.arena.wait_ms < 1000
    block = take(held.arena, MIB)
    held.gate.set()
    assert held.trim.result() == 10 * MIB
    assert held.arena.reserved_bytes == 2 * MIB
    assert torch.equal(read(held.arena, block)[:MIB], value[:MIB])


def take_ready(arena: HostArena, block: HostBlock) -> HostBlock:
    """The same block, when there is no room for another one."""
    assert arena.allocate_ready(1) is None
    return block


@pytest.mark.parametrize("wanted", [7, 9, 14])
def test_who_grows_ends_it(tmp_path: Path, wanted: int) -> None:
    """He waits for the chunk in hand alone, and has those again that are not given back."""
    held = Held(tmp_path)
    block = InThread(lambda: take(held.arena, wanted * MIB))
    time.sleep(0.05)
    assert block.runs
    held.gate.set()
    assert held.trim.result() == 4 * MIB
    found = block.result()
    assert isinstance(found, HostBlock) and found.offset == 0
    settled(held.arena)
    grown = -(-max(wanted, 8) // 2) * 2 * MIB
    assert held.arena.reserved_bytes == grown == held.ledger.booked_bytes()
    assert sum(held.driver.registered.values()) == grown
    assert held.driver.given_back() == [5, 4]
    value = fill(held.arena, found, 6)
    assert torch.equal(read(held.arena, found), value)


def test_a_reservation_ends_it(tmp_path: Path) -> None:
    held = Held(tmp_path)
    reserving = InThread(lambda: held.arena.reserve(16 * MIB, LARGE))
    time.sleep(0.02)
    held.gate.set()
    assert held.trim.result() == 4 * MIB
    reserving.result()
    until(lambda: held.arena.reserved_bytes == 16 * MIB)
    assert sum(held.driver.registered.values()) == 16 * MIB


def test_a_release_ends_it(tmp_path: Path) -> None:
    held = Held(tmp_path)
    releasing = InThread(held.arena.release)
    time.sleep(0.02)
    assert releasing.runs
    held.gate.set()
    assert held.trim.result() == 4 * MIB
    assert releasing.result() == 8 * MIB
    assert (held.driver.registered, held.ledger.booked_bytes(), held.arena.reserved_bytes) == ({}, 0, 0)


@pytest.mark.parametrize("chunk", [4, 1])
def test_there_is_one_at_a_time(tmp_path: Path, chunk: int) -> None:
    """Also where only the chunk in hand is left of the first one."""
    held = Held(tmp_path, chunk)
    assert held.arena.trim(0, nothing) == 0
    held.gate.set()
    assert held.trim.result() == 10 * MIB


def test_none_while_it_grows(tmp_path: Path) -> None:
    arena, driver, _ = make(tmp_path, 8 * MIB)
    gate = threading.Event()
    driver.on_register = lambda chunk: None if gate.wait(20) else pytest.fail("nobody let it go on")
    engine = CopyEngine(torch.device("cpu"), HostCopies(), arena)
    assert engine.may_trim()
    arena.reserve(12 * MIB, LARGE)
    assert arena.trim(0, nothing) == 0
    assert not engine.may_trim()
    gate.set()
    until(lambda: arena.reserved_bytes == 12 * MIB)
    settled(arena)
    assert engine.may_trim()
    assert arena.trim(0, nothing) == 12 * MIB


def test_a_fork_in_the_middle_of_it(tmp_path: Path) -> None:
    held = Held(tmp_path)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        held.driver.base, held.driver.on_unregister = 0, lambda chunk: os._exit(9)
        answers.put((held.arena.reserved_bytes, take(held.arena, 3 * MIB).offset))

    process = context.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert answers.get() == (0, 0)
    held.gate.set()
    assert held.trim.result() == 10 * MIB
    assert sum(held.driver.registered.values()) == 2 * MIB


def test_many_threads(tmp_path: Path) -> None:
    """Blocks keep their values, whoever trims and grows meanwhile, and the driver is asked in pairs."""
    arena, driver, ledger = make(tmp_path, 16 * MIB)
    errors: list[BaseException] = []
    done = threading.Event()
    given = []

    def work(value: int) -> None:
        try:
            for i in range(60):
                block = take(arena, (1 + (value * 7 + i * 5) % 40) * 100_000)
                for _, piece in arena.pieces(block, block.nbytes):
                    piece.fill_(value)
                assert all(int(p.min()) == int(p.max()) == value for _, p in arena.pieces(block, block.nbytes))
                arena.free(block, None)
        except BaseException as error:
            errors.append(error)

    def trim() -> None:
        while not done.is_set():
            given.append(arena.trim(0, nothing))
            time.sleep(0.001)

    trimmer = InThread(trim)
    threads = [InThread(lambda value=value: work(value)) for value in range(4)]
    for thread in threads:
        until(lambda thread=thread: not thread.runs)
    done.set()
    trimmer.result()
    assert not errors, errors
    assert sum(given) > 0
    settled(arena)
    assert arena.in_use_bytes == 0
    assert sum(driver.registered.values()) == arena.reserved_bytes == ledger.booked_bytes()
    arena.trim(0, nothing)
    assert driver.registered == {}


# -- the mark ----------------------------------------------------------------------------------------------------------


def test_the_highest_block_since_the_mark(tmp_path: Path) -> None:
    arena, _, _ = make(tmp_path, 12 * MIB)
    assert arena.highest_bytes == 12 * MIB
    arena.mark()
    assert arena.highest_bytes == 0
    low, high = take(arena, MIB), take(arena, 6 * MIB)
    arena.free(high, None)
    arena.free(take(arena, MIB), None)
    assert arena.highest_bytes == 7 * MIB
    arena.mark()
    assert arena.highest_bytes == MIB, "what is live counts"
    arena.free(low, None)
    arena.mark()
    assert arena.highest_bytes == 0


# -- when it is done ---------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of now, in seconds."""
    now = [100.0]
    monkeypatch.setattr(host_trim, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


class Plan:
    """Something that steps follow."""


@dataclass
class Memory:
    """Steps need this many bytes, told by the watch. ``portion``: bytes that go at a time, at most."""

    needed: int = 0
    reserved: int = 1000
    portion: int = 1000
    is_capturing: bool = False
    kept: list[int] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)
    num_marks: int = 0
    fails: bool = False

    def mark_host_memory(self) -> None:
        self.num_marks += 1
        self.needed = 0

    def host_bytes_needed(self) -> int:
        return self.needed

    def host_bytes_reserved(self) -> int:
        return self.reserved

    def may_trim(self) -> bool:
        return not self.is_capturing

    def trim_host_memory(self, keep_bytes: int, limit_s: float) -> int:
        if self.fails:
            raise RuntimeError("on purpose")
        self.kept.append(keep_bytes)
        self.limits_s.append(limit_s)
        given = min(self.reserved - keep_bytes, self.portion)
        self.reserved -= given
        return given


class Steps:
    """Steps over one engine."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.trim = HostTrim(self.memory)
        self.varies = False
        self.others = 0

    def follow(self, plan: Plan, count: int, needed: int) -> None:
        for _ in range(count):
            self.memory.needed = max(self.memory.needed, needed)
            self.trim.followed(plan, lambda: not self.varies, lambda: self.others)


def test_once_when_a_plan_has_settled() -> None:
    steps, plan = Steps(), Plan()
    steps.follow(plan, STEADY_STEPS, 30)
    assert steps.memory.kept == []
    steps.follow(plan, 1, 20)
    assert steps.memory.kept == [30]
    steps.follow(plan, 20, 50)
    steps.trim.interrupted()
    steps.follow(plan, 20, 50)
    assert (steps.memory.kept, steps.memory.num_marks) == ([30], 1)


def test_a_portion_between_every_two_steps(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """For a quarter of the shortest step's time each. Said once, when all is done."""
    caplog.set_level(logging.INFO, "fxoffload")
    steps, plan = Steps(), Plan()
    steps.memory.reserved, steps.memory.portion = 8 << 30, 3 << 30
    for seconds in (0.0, 0.5, 0.4, 0.6, 0.5, 0.7, 0.7):
        assert not caplog.records
        clock[0] += seconds
        steps.follow(plan, 1, 1 << 30)
    assert steps.memory.kept == [1 << 30] * 3
    assert steps.memory.limits_s == pytest.approx([0.1, 0.1, 0.1])
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("gave 7.00 GiB of host memory back, which only the first steps needed, and kept 1.00 GiB")


def test_a_step_is_one_of_its_own_plan(clock: list[float]) -> None:
    """An actor's takes long, its critic's does not; the time for both counts. Interrupted steps do not count."""
    steps, actor, critic = Steps(), Plan(), Plan()
    for _ in range(STEADY_STEPS + 1):
        clock[0] += 0.3
        steps.follow(actor, 1, 30)
        clock[0] += 0.1
        steps.follow(critic, 1, 30)
    assert steps.memory.limits_s == pytest.approx([0.1])
    clock[0] += 0.01
    steps.trim.interrupted()
    steps.follow(Plan(), 0, 30)
    other = Plan()
    steps.memory.reserved = 1000
    for _ in range(STEADY_STEPS + 1):
        clock[0] += 2.0
        steps.follow(other, 1, 40)
    assert steps.memory.limits_s == pytest.approx([0.1, 0.5])


def test_memory_that_is_pinned_meanwhile_does_not_prolong_it() -> None:
    """A step that follows no plan pins again what went: that stays, and so does all that is pinned later."""
    steps, plan = Steps(), Plan()
    steps.memory.portion = 400
    for _ in range(20):
        steps.follow(plan, STEADY_STEPS + 2, 30)
        steps.trim.interrupted()
        steps.memory.reserved = 1000
    assert len(steps.memory.kept) == 3  # 970 bytes, one time


def test_what_is_left_goes_behind_other_steps_too() -> None:
    steps, plan, other = Steps(), Plan(), Plan()
    steps.memory.portion = 400
    steps.follow(plan, STEADY_STEPS + 1, 30)
    steps.trim.interrupted()
    steps.follow(other, 2, 90)
    assert steps.memory.kept == [30, 30, 30]
    assert steps.memory.limits_s[1] == 0.0, "nothing is known of its steps"


def test_nothing_is_left_when_all_plans_are_forgotten() -> None:
    steps, plan = Steps(), Plan()
    steps.memory.portion = 400
    steps.follow(plan, STEADY_STEPS + 1, 30)
    steps.trim.forget()
    steps.follow(plan, STEADY_STEPS, 30)
    assert len(steps.memory.kept) == 1


def test_the_step_in_front_of_the_mark_does_not_count() -> None:
    steps, plan = Steps(), Plan()
    steps.follow(plan, 1, 90)
    steps.follow(plan, STEADY_STEPS, 30)
    assert steps.memory.kept == [30]


def test_another_step_begins_it_again() -> None:
    steps, plan = Steps(), Plan()
    steps.follow(plan, STEADY_STEPS, 30)
    steps.memory.needed = 90
    steps.trim.interrupted()
    steps.follow(plan, STEADY_STEPS, 20)
    assert steps.memory.kept == []
    steps.follow(plan, 1, 20)
    assert steps.memory.kept == [20]


def test_a_new_plan_is_another_one() -> None:
    steps, plan = Steps(), Plan()
    steps.follow(plan, STEADY_STEPS + 1, 30)
    plan = Plan()  # the first one is gone, and its need too
    steps.trim.interrupted()
    steps.follow(plan, STEADY_STEPS + 1, 20)
    assert steps.memory.kept == [30, 20]


def test_two_models_that_take_turns() -> None:
    """Each is trimmed for once, and not below what the other needs."""
    steps, actor, critic = Steps(), Plan(), Plan()
    for _ in range(3 * STEADY_STEPS):
        steps.follow(actor, 1, 30)
        steps.follow(critic, 1, 50)
    assert steps.memory.kept == [50]


def test_two_models_one_after_the_other() -> None:
    steps, actor, critic = Steps(), Plan(), Plan()
    steps.follow(actor, 2 * STEADY_STEPS, 50)
    for _ in range(3):
        steps.trim.interrupted()
    steps.memory.reserved = 1000
    steps.follow(critic, 2 * STEADY_STEPS, 20)
    assert steps.memory.kept == [50, 50]
    steps.memory.reserved = 1000
    steps.follow(actor, 2 * STEADY_STEPS, 50)
    assert len(steps.memory.kept) == 2


def test_not_below_what_others_need() -> None:
    steps, plan = Steps(), Plan()
    steps.others = 70
    steps.follow(plan, 2 * STEADY_STEPS, 50)
    assert steps.memory.kept == [70]


def test_not_where_sizes_vary() -> None:
    steps, plan = Steps(), Plan()
    steps.varies = True
    steps.follow(plan, 3 * STEADY_STEPS, 30)
    assert steps.memory.kept == []


def test_not_while_a_graph_is_captured_but_behind_it() -> None:
    steps, plan = Steps(), Plan()
    steps.memory.is_capturing = True
    steps.follow(plan, 2 * STEADY_STEPS, 30)
    assert steps.memory.kept == []
    steps.memory.is_capturing = False
    steps.follow(plan, 1, 30)
    assert steps.memory.kept == [30]


def test_no_step_fails_for_it(caplog: pytest.LogCaptureFixture) -> None:
    steps, plan = Steps(), Plan()
    steps.memory.fails = True
    steps.follow(plan, 3 * STEADY_STEPS, 30)
    assert [r.getMessage() for r in caplog.records] == [
        "host memory that no step needs stays: RuntimeError: on purpose"
    ]
