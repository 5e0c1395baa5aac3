"""The host image on a GPU: how fast it is pinned, that copies out of it are right, and that workers may be forked."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fxoffload.phases.moving.host_image import HostImage
from fxoffload.runtime.host_memory.address_range import HostRange
from fxoffload.runtime.host_memory.arena import CudaPinner, HostBlock
from fxoffload.runtime.host_memory.limits import default_host_budget_bytes

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def image() -> Iterator[HostImage]:
    torch.zeros(1, device="cuda")  # the context is not timed
    made = HostImage(CudaPinner(torch.device("cuda", torch.cuda.current_device())), default_host_budget_bytes)
    yield made
    torch.cuda.synchronize()
    made.release()


def offload(image: HostImage, value: Tensor) -> HostBlock:
    """Put the bytes of ``value`` into the image; the copies are queued."""
    block = image.take(value.nbytes)
    flat = value.view(torch.uint8).flatten()
    for at, piece in image.pieces(block, value.nbytes):
        piece.copy_(flat[at : at + len(piece)], non_blocking=True)
    return block


def onload(image: HostImage, block: HostBlock, like: Tensor) -> Tensor:
    value = torch.empty_like(like)
    flat = value.view(torch.uint8).flatten()
    for at, piece in image.pieces(block, value.nbytes):
        flat[at : at + len(piece)].copy_(piece, non_blocking=True)
    return value


def test_memory_may_be_registered_and_given_back_twice() -> None:
    """Where an exception came in between; and no later kernel is blamed for what the driver refuses."""
    ones = torch.ones(4, device="cuda")
    pinner, held = CudaPinner(torch.device("cuda", torch.cuda.current_device())), HostRange(4 * MIB)
    for nbytes in (2 * MIB, 4 * MIB):
        pinner.register(held.address, nbytes)
        assert held.bytes[:nbytes].is_pinned() and int(ones.sum()) == 4
    for _ in range(2):
        pinner.unregister(held.address)
        assert not held.bytes.is_pinned() and int(ones.sum()) == 4
    with pytest.raises(RuntimeError, match="cudaHostRegister of 4096 bytes failed"):
        pinner.register(1 << 46, 4096)
    assert int(ones.sum()) == 4


def test_four_gib_are_pinned_at_10_gb_per_second(image: HostImage) -> None:
    """The best of three: a virtual machine may get its own memory at the first touch only."""
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        image.reserve(4 * GIB)
        block = image.take(4 * GIB)
        rates.append(4 * GIB / 1e9 / (time.perf_counter() - began))
        assert (image.pinned_bytes, image.pageable_bytes) == (4 * GIB, 0)
        assert all(piece.is_pinned() for _, piece in image.pieces(block, 4 * GIB))
        image.free(block)
        assert image.release() == 4 * GIB
    print(f"pinned 4 GiB at {', '.join(f'{rate:.1f}' for rate in rates)} GB/s")
    assert max(rates) >= 10


def test_copies_both_ways_are_right_and_at_the_link_s_rate(image: HostImage) -> None:
    values = [torch.randn(n, device="cuda") for n in (100_003, 97 << 20, 150 << 20, 1)]
    image.reserve(sum(-(-v.nbytes // 512) * 512 for v in values))
    blocks = [offload(image, value) for value in values]
    torch.cuda.synchronize()
    assert len(list(image.pieces(blocks[2], values[2].nbytes))) > 4
    for value, block in zip(values, blocks, strict=True):
        assert torch.equal(onload(image, block, value), value)
    assert image.reserved_bytes <= 1.02 * sum(value.nbytes for value in values)
    for block in blocks:
        image.free(block)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    block = offload(image, values[2])
    end.record()
    end.synchronize()
    rate = values[2].nbytes / 1e6 / start.elapsed_time(end)
    image.free(block)
    assert rate >= 10, f"{rate:.1f} GB/s: pageable copies run at about 1.2"


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        # Enough memory that it would come to lie where the image is not mapped.
        return torch.full((1 << 20,), float(index))


def test_data_loader_workers_are_forked_between_offload_and_onload(image: HostImage) -> None:
    values = [torch.randn(32 << 20, device="cuda") for _ in range(4)]
    kept = [value.clone() for value in values]
    blocks = [offload(image, value) for value in values]  # the copies may still be under way
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    seen = [float(row[0]) for batch in loader for row in batch]
    assert seen == [float(i) for i in range(64)]
    for value, block in zip(values, blocks, strict=True):
        value.zero_()
        value.copy_(onload(image, block, value))
    assert all(torch.equal(value, before) for value, before in zip(values, kept, strict=True))
    again = [offload(image, value) for value in values]  # while the workers live
    torch.cuda.synchronize()
    assert len(list(loader)) == 16
    assert all(torch.equal(onload(image, b, v), v) for b, v in zip(again, kept, strict=True))
    for block in blocks + again:
        image.free(block)


def test_what_the_driver_will_not_register_is_pageable_and_right(
    image: HostImage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver refuses a range of which a part is registered already."""
    real = CudaPinner.register

    def overlapping(self: CudaPinner, address: int, nbytes: int) -> None:
        real(self, address + MIB, MIB)
        try:
            real(self, address, nbytes)
        finally:
            self.unregister(address + MIB)

    monkeypatch.setattr(CudaPinner, "register", overlapping)
    value = torch.randn(20 << 20, device="cuda")
    block = offload(image, value)
    assert (image.pinned_bytes, image.pageable_bytes) == (0, value.nbytes)
    assert torch.equal(onload(image, block, value), value)
    assert [r.getMessage() for r in caplog.records if "cudaHostRegister" in r.getMessage()]
    torch.cuda.synchronize()  # no error is left behind for whoever asks next
    image.free(block)
