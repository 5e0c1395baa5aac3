"""What copies to and from the host may hold up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fxoffload.runtime.streams import RELOAD_PIECE_BYTES, CudaCopies

pytestmark = pytest.mark.gpu

NBYTES = 1 << 30


@pytest.fixture(scope="module")
def pinned() -> torch.Tensor:
    return torch.randint(0, 255, (NBYTES,), dtype=torch.uint8).pin_memory()


def ms_of_a_small_copy(start_large: Callable[[], None], small: torch.Tensor) -> float:
    """That a copy of 4 KiB on the current stream takes while a large one of another stream is under way."""
    torch.cuda.synchronize()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_large()
    before.record()
    small.to("cuda", non_blocking=True)
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after)


def test_a_small_copy_does_not_wait_for_a_whole_reload(pinned: torch.Tensor) -> None:
    copies = CudaCopies(torch.device("cuda", torch.cuda.current_device()))
    target = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
    small = torch.ones(1024).pin_memory()
    torch.cuda.synchronize()

    def whole() -> None:
        with torch.cuda.stream(copies.reload_stream):
            target.copy_(pinned, non_blocking=True)

    def reload() -> None:
        with copies.reloading():
            copies.reload([(target, pinned)])

    for start in (whole, reload):
        ms_of_a_small_copy(start, small)
    alone = min(ms_of_a_small_copy(whole, small) for _ in range(5))
    beside = max(ms_of_a_small_copy(reload, small) for _ in range(5))
    assert alone > 5.0  # a GiB takes 20 ms: the test sees what it is about
    assert beside < 2.0


@pytest.mark.parametrize("nbytes", [1, RELOAD_PIECE_BYTES, RELOAD_PIECE_BYTES + 1, 3 * RELOAD_PIECE_BYTES - 7])
def test_a_reload_in_pieces_is_whole(pinned: torch.Tensor, nbytes: int) -> None:
    copies = CudaCopies(torch.device("cuda", torch.cuda.current_device()))
    target = torch.zeros(nbytes + 8, dtype=torch.uint8, device="cuda")
    copies.reload_waits_for_compute()
    with copies.reloading():
        copies.reload([(target[:nbytes], pinned[5 : 5 + nbytes])])
    copies.synchronize()
    assert torch.equal(target[:nbytes].cpu(), pinned[5 : 5 + nbytes])
    assert not target[nbytes:].any()
