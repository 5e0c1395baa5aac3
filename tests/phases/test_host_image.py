from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from fxoffload.phases.moving.host_image import HostImage, HostMemoryError
from fxoffload.runtime.host_memory import arena as host_arena
from fxoffload.runtime.host_memory import chunk_threads
from fxoffload.runtime.host_memory import limits as host_limits
from fxoffload.runtime.host_memory.arena import HeapMemory, HostBlock
from fxoffload.runtime.host_memory.cgroups import ControlGroup
from fxoffload.runtime.host_memory.ledger import Ledger

MIB = 1 << 20
PAGE = 4096


@dataclass
class Driver:
    """A pinner that pins ``room`` chunks and refuses what comes then."""

    room: int = 1000
    delay_s: float = 0.0
    pinned: bool = True
    registered: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def register(self, address: int, nbytes: int) -> None:
        time.sleep(self.delay_s)
        with self.lock:
            if len(self.registered) >= self.room:
                self.refused += 1
                raise RuntimeError("cudaHostRegister of some bytes failed: out of memory")
            self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "MAX_CHUNK_BYTES", 2 * MIB)
    monkeypatch.setattr(chunk_threads, "max_threads", lambda: 4)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[ControlGroup]:
    """What bounds the ledger: a machine of 100 MiB, of which nothing is used."""
    found = [ControlGroup("", 100 * MIB, 0)]
    monkeypatch.setattr(host_limits, "memory_limits", lambda: ("/", found))
    return found


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., HostImage]:
    """An image with a ledger of its own and a limit of 64 MiB."""

    def build(pinner: object = None, limit: int = 64 * MIB, *, total: int | None = None, pin: bool = True) -> HostImage:
        ledger, pinner = Ledger(tmp_path / "ledger"), pinner or Driver()
        image = HostImage(pinner, lambda: limit, total_limit_bytes=total, pin=pin, ledger=ledger)  # type: ignore[arg-type]
        take, taken = image.take, []

        def take_for_good(nbytes: int) -> HostBlock:
            """In use until it is freed."""
            taken.append(take(nbytes))
            return taken[-1]

        image.take = take_for_good  # type: ignore[method-assign]
        return image

    return build


def write(image: HostImage, block: HostBlock, value: torch.Tensor) -> None:
    for at, piece in image.pieces(block, len(value)):
        piece.copy_(value[at : at + len(piece)])


def read(image: HostImage, block: HostBlock, nbytes: int) -> torch.Tensor:
    pieces = list(image.pieces(block, nbytes))
    assert [at for at, _ in pieces] == [sum(len(p) for _, p in pieces[:i]) for i in range(len(pieces))]
    return torch.cat([piece for _, piece in pieces])


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_it_is_as_large_as_what_it_holds(make: Callable[..., HostImage]) -> None:
    """200 blocks of odd sizes: 512 bytes a block and a page in all are what may be added."""
    sizes = [1 + 7919 * i % 60_000 for i in range(200)]
    image = make()
    image.reserve(sum(sizes))
    blocks = [image.take(size) for size in sizes]
    assert image.in_use_bytes == sum(-(-size // 512) * 512 for size in sizes)
    assert image.in_use_bytes <= image.reserved_bytes < image.in_use_bytes + PAGE
    assert image.reserved_bytes <= 1.02 * sum(sizes)
    assert (image.pinned_bytes, image.pageable_bytes) == (image.reserved_bytes, 0)
    for block in blocks:
        image.free(block)
    assert image.in_use_bytes == 0


def test_a_reservation_alone_ends_at_its_last_page(make: Callable[..., HostImage]) -> None:
    driver = Driver()
    image = make(driver)
    image.reserve(7 * MIB + 1)
    until(lambda: image.reserved_bytes >= 7 * MIB + 1)
    assert image.reserved_bytes == 7 * MIB + PAGE == sum(driver.registered.values())


def test_blocks_across_chunks_hold_their_bytes(make: Callable[..., HostImage]) -> None:
    driver = Driver()
    image = make(driver)
    values = [random_bytes(size, seed) for seed, size in enumerate((3 * MIB + 11, 513, 9 * MIB, MIB))]
    blocks = [image.take(len(value)) for value in values]
    for block, value in zip(blocks, values, strict=True):
        write(image, block, value)
    for block, value in zip(blocks, values, strict=True):
        assert torch.equal(read(image, block, len(value)), value)
        for _, piece in image.pieces(block, len(value)):  # no copy may touch two registrations
            first, last = piece.data_ptr(), piece.data_ptr() + len(piece)
            assert any(a <= first and last <= a + n for a, n in driver.registered.items())
    assert len(list(image.pieces(blocks[2], 9 * MIB))) >= 5


def test_reserve_returns_at_once_and_take_waits_for_its_own_bytes_only(make: Callable[..., HostImage]) -> None:
    image = make(Driver(delay_s=0.2))
    began = time.perf_counter()
    image.reserve(32 * MIB)  # 16 chunks, four at a time: 0.8 s
    assert time.perf_counter() - began < 0.1
    image.take(2 * MIB)
    assert image.reserved_bytes < 32 * MIB
    assert 0.1 < time.perf_counter() - began < 0.7
    until(lambda: image.reserved_bytes == 32 * MIB)
    began = time.perf_counter()
    image.take(30 * MIB)
    assert time.perf_counter() - began < 0.1


def test_beyond_the_limit_blocks_are_pageable_with_one_warning(
    make: Callable[..., HostImage], caplog: pytest.LogCaptureFixture
) -> None:
    image = make(limit=4 * MIB)
    image.reserve(12 * MIB)
    value = random_bytes(3 * MIB)
    blocks = [image.take(3 * MIB) for _ in range(4)]
    assert (image.pinned_bytes, image.pageable_bytes) == (4 * MIB, 9 * MIB)
    for block in blocks:
        write(image, block, value)
    assert all(torch.equal(read(image, block, 3 * MIB), value) for block in blocks)
    (message,) = warnings_in(caplog)
    assert message.startswith("0.00 GiB of host memory could not be pinned (the limit is 0.00 GiB)")
    assert "1.2 GB/s to the host and 5 to 7 GB/s back" in message
    assert image.take(MIB).nbytes == MIB  # the rest below the limit is used
    assert image.pageable_bytes == 9 * MIB
    for block in blocks:
        image.free(block)
    assert image.in_use_bytes == MIB


@pytest.mark.parametrize("room", [0, 3])
def test_what_the_driver_refuses_is_pageable(
    make: Callable[..., HostImage], room: int, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(room)
    image = make(driver)
    image.reserve(12 * MIB)
    values = [random_bytes(MIB + 5, seed) for seed in range(11)]
    blocks = [image.take(len(value)) for value in values]
    for block, value in zip(blocks, values, strict=True):
        write(image, block, value)
    assert all(torch.equal(read(image, b, len(v)), v) for b, v in zip(blocks, values, strict=True))
    assert image.pinned_bytes == sum(driver.registered.values()) <= 2 * MIB * room
    assert image.pageable_bytes + image.pinned_bytes == image.reserved_bytes >= image.in_use_bytes
    (message,) = warnings_in(caplog)
    assert "cudaHostRegister of some bytes failed" in message
    refused = driver.refused
    assert refused > 0
    for _ in range(3):  # the next cycles do not ask the driver again
        image.reserve(12 * MIB)
        image.take(1)
    assert driver.refused == refused
    for block in blocks:
        image.free(block)


def test_after_a_release_the_driver_is_asked_again(make: Callable[..., HostImage]) -> None:
    driver = Driver(0)
    image = make(driver)
    block = image.take(MIB)
    assert image.pageable_bytes == MIB
    image.free(block)
    assert image.release() == MIB
    driver.room = 1000
    image.reserve(MIB)
    until(lambda: image.pinned_bytes == MIB)
    image.take(MIB)
    assert image.pageable_bytes == 0


def test_more_than_the_machine_has(make: Callable[..., HostImage], machine: list[ControlGroup]) -> None:
    """80 of the 100 MiB may be pinned and 95 be taken in all."""
    image = make(limit=1 << 40)
    image.take(80 * MIB)
    image.take(15 * MIB)
    with pytest.raises(
        HostMemoryError, match=r"expected 0\.00 GiB of host memory .* found none \(.* are booked"
    ) as caught:
        image.take(MIB)
    assert isinstance(caught.value, MemoryError)
    assert "Offload fewer groups" in str(caught.value)
    assert (image.pinned_bytes, image.pageable_bytes, image.in_use_bytes) == (80 * MIB, 15 * MIB, 95 * MIB)


def test_a_machine_in_use_leaves_less(make: Callable[..., HostImage], machine: list[ControlGroup]) -> None:
    machine[0] = ControlGroup("", 100 * MIB, 90 * MIB)
    image = make(limit=1 << 40)
    image.take(5 * MIB)
    machine[0] = ControlGroup("", 100 * MIB, 95 * MIB)
    with pytest.raises(HostMemoryError, match=r"of the machine, 0\.09 GiB are in use"):
        image.take(MIB)


@pytest.mark.parametrize("limit", [0, 4 * MIB, 10 * MIB, 64 * MIB])
@pytest.mark.parametrize("room", [0, 1, 1000])
def test_pinned_and_pageable_together_stay_within_the_total(
    make: Callable[..., HostImage], limit: int, room: int
) -> None:
    """Whatever is pinned of it: 10 MiB in all, to the byte, and an error for the next one."""
    image = make(Driver(room), limit=limit, total=10 * MIB)
    image.reserve(64 * MIB)
    blocks = [image.take(MIB) for _ in range(10)]
    assert image.reserved_bytes == 10 * MIB
    with pytest.raises(HostMemoryError, match=r"the limit is 0\.01 GiB.* pinned and .* pageable, of which .* in use"):
        image.take(1)
    assert image.reserved_bytes == 10 * MIB
    image.free(blocks.pop())
    blocks.append(image.take(MIB))
    for block in blocks:
        image.free(block)
    assert image.release() == 10 * MIB
    image.take(8 * MIB)
    assert image.reserved_bytes <= 10 * MIB


def test_a_total_counts_what_is_being_pinned(make: Callable[..., HostImage]) -> None:
    """Another thread asks for pageable memory while the rest is on its way."""
    image = make(Driver(delay_s=0.2), limit=8 * MIB, total=10 * MIB)
    image.reserve(8 * MIB)
    assert image._rest.allocate(3 * MIB, 1 << 40) is None
    assert "of pinned and pageable memory together" in image._rest.refusal
    assert image._rest.allocate(2 * MIB, 1 << 40) is not None
    until(lambda: image.reserved_bytes == 10 * MIB)


def test_a_total_holds_for_many_threads(make: Callable[..., HostImage]) -> None:
    image = make(Driver(3), limit=8 * MIB, total=12 * MIB)
    most: list[int] = []
    refused: list[HostMemoryError] = []

    def work() -> None:
        for _ in range(20):
            image.reserve(12 * MIB)
            try:
                image.take(300_000)
            except HostMemoryError as error:
                refused.append(error)
            most.append(image.reserved_bytes)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert max(most) <= 12 * MIB and refused
    assert image.in_use_bytes > 11 * MIB


def test_without_pinning_the_total_holds_too(make: Callable[..., HostImage]) -> None:
    image = make(HeapMemory(), total=5 * MIB, pin=False)
    image.reserve(64 * MIB)
    image.take(5 * MIB)
    with pytest.raises(HostMemoryError, match="pinned and pageable memory together"):
        image.take(1)


@pytest.mark.parametrize("pinner", [Driver(), HeapMemory()])
def test_without_pinning_everything_is_pageable_and_nobody_is_warned(
    make: Callable[..., HostImage], pinner: object, caplog: pytest.LogCaptureFixture
) -> None:
    image = make(pinner, limit=8 * MIB, pin=False)
    image.reserve(3 * MIB)
    value = random_bytes(3 * MIB)
    block = image.take(len(value))
    write(image, block, value)
    assert torch.equal(read(image, block, len(value)), value)
    assert (image.pinned_bytes, image.pageable_bytes) == (0, 3 * MIB)
    assert not isinstance(pinner, Driver) or not pinner.registered
    with pytest.raises(HostMemoryError, match=r"the limit is 0\.01 GiB"):
        image.take(6 * MIB)
    assert warnings_in(caplog) == []


def test_release_is_refused_while_blocks_are_in_use(make: Callable[..., HostImage]) -> None:
    image = make(limit=4 * MIB)
    pinned, pageable = image.take(4 * MIB), image.take(2 * MIB)
    value = random_bytes(4 * MIB)
    write(image, pinned, value)
    image.free(pageable)
    with pytest.raises(RuntimeError, match=r"expected nothing in the host image, found .*onload them first"):
        image.release()
    assert image.reserved_bytes == 6 * MIB
    assert torch.equal(read(image, pinned, 4 * MIB), value)
    image.free(pinned)
    assert image.release() == 6 * MIB
    assert (image.reserved_bytes, image.in_use_bytes, image.release()) == (0, 0, 0)


def test_an_image_is_used_again_after_a_release(make: Callable[..., HostImage]) -> None:
    driver = Driver()
    image = make(driver)
    for cycle in range(3):
        image.reserve(5 * MIB)
        block, value = image.take(5 * MIB), random_bytes(5 * MIB, cycle)
        write(image, block, value)
        assert torch.equal(read(image, block, 5 * MIB), value)
        image.free(block)
        assert image.release() == 5 * MIB
        assert driver.registered == {}
        with pytest.raises(RuntimeError, match="expected a block of this process' host memory"):
            read(image, block, 1)


def test_the_same_memory_serves_every_cycle(make: Callable[..., HostImage]) -> None:
    image = make()
    sizes = [MIB + 512 * i for i in range(20)]
    for cycle in range(20):
        image.reserve(sum(sizes))
        blocks = [image.take(size) for size in (sizes if cycle % 2 else sizes[::-1])]
        assert image.reserved_bytes == -(-sum(sizes) // PAGE) * PAGE
        for block in blocks[cycle % 3 :] + blocks[: cycle % 3]:
            image.free(block)


def test_takes_from_many_threads(make: Callable[..., HostImage]) -> None:
    image = make(limit=40 * MIB)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(15):
                size = 200_000 + 70_001 * ((number + round_) % 7)
                blocks = [image.take(size) for _ in range(3)]
                for i, block in enumerate(blocks):
                    write(image, block, torch.full((size,), number * 3 + i, dtype=torch.uint8))
                for i, block in enumerate(blocks):
                    assert bool((read(image, block, size) == number * 3 + i).all())
                    image.free(block)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert image.in_use_bytes == 0
    assert image.reserved_bytes <= 8 * 3 * 700_000


def test_a_forked_worker_neither_maps_the_image_nor_harms_it(make: Callable[..., HostImage]) -> None:
    image = make(limit=8 * MIB)
    value = random_bytes(6 * MIB)
    pinned, pageable = image.take(len(value)), image.take(len(value))
    for block in (pinned, pageable):
        write(image, block, value)
    assert image.pageable_bytes == 6 * MIB
    starts = [next(iter(image.pieces(block, 1)))[1].data_ptr() for block in (pinned, pageable)]
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        answers.put([is_mapped(start, 6 * MIB) for start in starts])
        try:
            read(image, pinned, 1)
        except RuntimeError as error:
            answers.put(str(error))
        image.free(pinned)
        answers.put((image.in_use_bytes, image.reserved_bytes))

    assert [is_mapped(start, 6 * MIB) for start in starts] == [True, True]
    process = context.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert answers.get() == [False, False]
    assert "a forked child cannot read what its parent has offloaded" in answers.get()
    assert answers.get() == (0, 0)
    for block in (pinned, pageable):
        assert torch.equal(read(image, block, len(value)), value)


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether any mapping of this process touches the range."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start < address + nbytes and address < end:
            return True
    return False


# -- tensors of blocks -------------------------------------------------------------------------------------------------


def test_a_tensor_of_a_block_is_the_block_and_one_registration(make: Callable[..., HostImage]) -> None:
    driver = Driver()
    image = make(driver)
    image.reserve(8 * MIB)
    blocks = [image.take(nbytes) for nbytes in (MIB, 4 * MIB, 3 * MIB)]
    values = [torch.full((block.nbytes,), i + 1, dtype=torch.uint8) for i, block in enumerate(blocks)]
    for block, value in zip(blocks, values, strict=True):
        write(image, block, value)
    assert sorted(driver.registered.values()) == [2 * MIB] * 4
    found = image.tensor(blocks[1], 4 * MIB)
    assert torch.equal(found, values[1]) and found.untyped_storage().nbytes() == 4 * MIB
    assert sorted(driver.registered.values()) == [2 * MIB, 6 * MIB], "one copy may touch one registration only"
    found[3 * MIB :] = 9
    assert read(image, blocks[1], 4 * MIB)[-1] == 9
    assert image.tensor(blocks[1], 4 * MIB).untyped_storage()._cdata == found.untyped_storage()._cdata
    assert torch.equal(read(image, blocks[0], MIB), values[0]) and torch.equal(
        read(image, blocks[2], 3 * MIB), values[2]
    )
    for block in blocks:
        image.free(block)
    del found
    assert image.release() == 8 * MIB
    assert driver.registered == {}


def test_a_block_that_somebody_has_a_tensor_of_is_not_taken_again(make: Callable[..., HostImage]) -> None:
    image = make()
    block = image.take(2 * MIB)
    found = image.tensor(block, 2 * MIB).fill_(5)
    part = found[MIB:].numpy()
    del found
    assert not image.may_write(block)
    image.free(block)
    assert image.in_use_bytes == 0
    other = image.take(2 * MIB)
    write(image, other, torch.zeros(2 * MIB, dtype=torch.uint8))
    assert (part == 5).all() and other.offset != block.offset
    del part
    assert image.take(2 * MIB).offset == block.offset


def test_a_tensor_outlives_the_image(make: Callable[..., HostImage]) -> None:
    image = make()
    blocks = [image.take(2 * MIB), image.take(2 * MIB)]
    tensors = [image.tensor(block, 2 * MIB).fill_(i) for i, block in enumerate(blocks)]
    for block in blocks:
        image.free(block)
    assert image.release() == 4 * MIB
    again = image.take(2 * MIB)
    write(image, again, torch.full((2 * MIB,), 7, dtype=torch.uint8))
    del image, tensors[0]
    assert tensors[0].eq(1).all()


def test_memory_that_cannot_be_registered_anew_is_used_unpinned(
    make: Callable[..., HostImage], caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    image = make(driver)
    image.reserve(4 * MIB)
    block = image.take(4 * MIB)
    write(image, block, torch.full((4 * MIB,), 3, dtype=torch.uint8))
    driver.room = 0
    assert image.tensor(block, 4 * MIB).eq(3).all()
    assert len(caplog.messages) == 1 and "no longer pinned" in caplog.messages[0]
    image.free(block)
    assert image.release() == 4 * MIB
