"""What runs beside the collectives of a block: copies as fxoffload makes them in a step, and matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.collectives.blocks import PIECE_BYTES
from fxoffload.runtime.copies.streams import CudaCopies

# So many times as long as the collectives of the round before took.
LONGER = 2.0
MATMUL_SIZE = 8192
NUM_PIECES = 4
LINK_BYTES_PER_MS = 55e6


class Beside:
    """Attributes:
    products: whether there are matrix products.
    collectives_ms: what the collectives of a block take.
    """

    def __init__(self, device: torch.device, *, products: bool) -> None:
        self.products = products
        self.collectives_ms = 40.0
        self._copies = CudaCopies(device)
        nbytes = NUM_PIECES * PIECE_BYTES
        self._host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        shape = (MATMUL_SIZE, MATMUL_SIZE)
        self._left, self._right, self._out = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
        self._product_ms = self._time_product()

    def queue_copies(self, down: bool, up: bool) -> None:
        """They begin when the compute stream has come to where it is now."""
        if down:
            self._copies.offload_waits_for_compute()
        if up:
            self._copies.reload_waits_for_compute()
        to_host, to_device = (_pieces(self._host[0], self._there[0]), _pieces(self._there[1], self._host[1]))
        for _ in range(max(1, round(LONGER * self.collectives_ms * LINK_BYTES_PER_MS / (NUM_PIECES * PIECE_BYTES)))):
            if down:
                with self._copies.offloading():
                    self._copies.offload(to_host, gives_way=False)
            if up:
                with self._copies.reloading():
                    self._copies.reload(to_device, gives_way=False)

    def queue_products(self) -> None:
        if self.products:
            for _ in range(max(1, round(LONGER * self.collectives_ms / self._product_ms))):
                torch.mm(self._left, self._right, out=self._out)

    def _time_product(self) -> float:
        torch.mm(self._left, self._right, out=self._out)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(5):
            torch.mm(self._left, self._right, out=self._out)
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 5


def _pieces(target: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True))
