"""Every wait of phases on a GPU: right with all of them over delayed copies, and wrong without any one of them.

Taken out in ``fxoffload.phases``, by name in ``CopyStreams.left_out`` and, where the wait is not made there, by hand:
SOURCE_READY   before a copy to the host, for the caller's stream (``Mover.before_leaving``)
SOURCE_DONE    before a storage is emptied, for its copy; the host waits for it (``Mover.leave``)
TARGET_FREE    before a copy to the device, for whoever had the memory (``Mover.before_writing``)
TARGET_READY   before a reader, for its copy (``Transit._fence``, by ``Transition.let_wait``)
HOST_READ      before a block is written, for the last copy out of it (``Mover._start_leaving``); ``before_leaving``
               waits for all copies to the device too, on behalf of weight streams
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases import PhaseManager, Where
from fxoffload.phases.metrics import Transition
from fxoffload.phases.moving.mover import Mover
from fxoffload.runtime.copies.streams import CudaCopies, Wait

from .gpu_support import MIB, sleep

pytestmark = pytest.mark.gpu

COUNT, NUMEL = 12, 4 * MIB  # 16 MiB each: the allocator does not share a segment between such
DELAY_MS, LONG_MS = 15.0, 150.0


class Scene:
    """Parameters that each hold their number, a manager whose image is pinned, and what the tests do to both."""

    def __init__(self) -> None:
        self.model = nn.ParameterList(nn.Parameter(torch.full((NUMEL,), float(i), device="cuda")) for i in range(COUNT))
        # Freed memory stays with the allocator, which hands it to the next one of the same size.
        self.manager = PhaseManager(self.model, empty_cache=False)
        self.manager.offload()
        self.manager.onload()
        copies = self.manager.copies(next(iter(self.model)).device)
        assert isinstance(copies, CudaCopies)
        self.copies = copies
        torch.cuda.synchronize()

    def delay(self, *streams: torch.cuda.Stream) -> None:
        """From now on, copies on these streams are late."""
        self.copies.before_copy = lambda stream: sleep(DELAY_MS) if stream in streams else None

    def litter(self) -> list[Tensor]:
        """Writes of another owner to the free memory."""
        return [torch.full((NUMEL,), float("nan"), device="cuda") for _ in range(COUNT)]

    def away(self) -> None:
        """Everything on the host, and nothing of it in the device's free memory."""
        self.manager.offload()
        litter = self.litter()
        torch.cuda.synchronize()
        del litter

    def values(self) -> list[float]:
        """Values when everything has settled; NaN for a tensor with several values."""
        torch.cuda.synchronize()
        self.copies.before_copy = self.copies.left_out = None
        self.manager.onload()
        torch.cuda.synchronize()
        return [one_value(p.detach()) for p in self.model]

    def end(self) -> None:
        torch.cuda.synchronize()
        self.copies.before_copy = self.copies.left_out = None
        self.manager.close()


def spoil(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))


def one_value(tensor: Tensor) -> float:
    return tensor[0].item() if bool((tensor == tensor[0]).all()) else float("nan")


EXPECTED = [float(i) for i in range(COUNT)]
both = pytest.mark.parametrize("without", [False, True], ids=["all", "without"])


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.end()


@both
def test_kernels_before_an_offload_are_part_of_it(scene: Scene, without: bool) -> None:
    scene.copies.left_out = Wait.SOURCE_READY if without else None
    sleep(LONG_MS)
    for p in scene.model:
        p.detach().add_(100.0)
    scene.manager.offload()
    assert (scene.values() != [value + 100.0 for value in EXPECTED]) is without


@both
def test_a_storage_is_emptied_when_its_bytes_are_on_the_host(
    scene: Scene, without: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.delay(scene.copies.offload_stream)
    if without:
        offload = scene.copies.offload

        def forgetful(pieces: Iterable[tuple[Tensor, Tensor]], **options: Any) -> None:
            offload(pieces, **options)  # no event: as if it were done

        monkeypatch.setattr(scene.copies, "offload", forgetful)
    scene.manager.offload()
    litter = scene.litter()
    torch.cuda.synchronize()
    del litter
    monkeypatch.undo()
    assert (scene.values() != EXPECTED) is without


@both
@pytest.mark.parametrize("wait", [False, True])
def test_what_is_allocated_is_written_after_its_last_owners_kernels(scene: Scene, without: bool, wait: bool) -> None:
    scene.away()
    scene.copies.left_out = Wait.TARGET_FREE if without else None
    litter = [torch.empty(NUMEL, device="cuda") for _ in range(COUNT)]
    sleep(LONG_MS)
    spoil(litter)
    del litter
    scene.manager.onload(wait=False)
    if wait:
        scene.manager.onload()
    torch.cuda.current_stream().synchronize()
    assert (scene.values() != EXPECTED) is without


@both
@pytest.mark.parametrize("how", ["tensor", "fence", "group"])
def test_a_reader_waits_for_its_copy(scene: Scene, without: bool, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.away()
    scene.delay(scene.copies.reload_stream)
    if without:
        scene.copies.left_out = Wait.TARGET_READY
        monkeypatch.setattr(Transition, "let_wait", lambda *_: None)
    scene.manager.onload(wait=False)
    if how == "fence":
        scene.manager.fence(scene.model)
    elif how == "group":
        scene.manager.fence_group("params")
    found = [p.detach() + 0 for p in reversed(list(scene.model))]
    torch.cuda.synchronize()
    monkeypatch.undo()
    assert ([one_value(one) for one in found] != EXPECTED[::-1]) is without
    assert scene.values() == EXPECTED


@both
def test_a_block_is_written_after_it_was_read(scene: Scene, without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by a copy that stream A waited for, and written again on behalf of stream B."""
    scene.away()
    scene.delay(scene.copies.reload_stream)
    mover: Any = scene.manager._transit.mover
    if without:
        scene.copies.left_out = Wait.HOST_READ
        monkeypatch.setattr(mover, "before_leaving", lambda holdings: scene.copies.offload_waits_for_compute())
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(a):
        litter = scene.litter()  # cudaMalloc would wait for the delayed copies
    torch.cuda.synchronize()
    del litter
    with torch.cuda.stream(a):
        scene.manager.onload(wait=False)
        scene.manager.fence_group("params")
    assert scene.manager.where("params") is Where.DEVICE
    with torch.cuda.stream(b):
        scene.manager.offload()
    monkeypatch.undo()
    assert (scene.values() != EXPECTED) is without


@pytest.mark.parametrize("seed", range(5))
def test_cycles_over_delayed_copies(scene: Scene, seed: int) -> None:
    """All waits, kernels on both sides of every transition, and transitions that are not waited for."""
    scene.delay(scene.copies.offload_stream, scene.copies.reload_stream)
    expected = list(EXPECTED)
    for cycle in range(4):
        sleep(5.0 * ((seed + cycle) % 3))
        for i, p in enumerate(scene.model):
            p.detach().mul_(2.0).add_(float(i))
            expected[i] = 2.0 * expected[i] + i
        scene.manager.offload(wait=(seed + cycle) % 2 == 0)
        litter = scene.litter()
        del litter
        scene.manager.onload(wait=(seed + cycle) % 4 == 0)
    assert scene.values() == expected


@both
def test_memory_that_another_thread_frees_meanwhile_is_not_written_too_early(
    scene: Scene, without: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait comes after the allocation; taken out: it comes before."""
    scene.away()
    result = torch.zeros(NUMEL, device="cuda")
    torch.cuda.synchronize()
    allocate, held = Mover.allocate, iter([True])

    def with_company(mover: Mover, holding: Any) -> None:
        if next(held, False):
            if without:
                scene.copies.reload_waits_for_compute()
                monkeypatch.setattr(Mover, "before_writing", lambda mover, device: None)
            value = torch.full((NUMEL,), 7.0, device="cuda")
            sleep(LONG_MS)
            result.copy_(value)
            del value  # the storage gets its memory
        allocate(mover, holding)

    monkeypatch.setattr(Mover, "allocate", with_company)
    scene.manager.onload()
    torch.cuda.synchronize()
    assert (one_value(result) != 7.0) is without
