"""Work during the collectives of a block: copies as fxoffload makes them in a step, and matrix products."""

from __future__ import annotations

import torch

from benchmarks.idle_copies import IdleCopies

# In times of the collectives of the round before.
LONGER = 2.0
MATMUL_SIZE = 8192


class Beside:
    """Attributes:
    products: whether there are matrix products.
    collectives_ms: what the collectives of a block take.
    """

    def __init__(self, device: torch.device, *, products: bool) -> None:
        self.products = products
        self.collectives_ms = 40.0
        self._copies = IdleCopies(device, down=True, up=True)
        shape = (MATMUL_SIZE, MATMUL_SIZE)
        self._left, self._right, self._out = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
        self._product_ms = self._time_product()

    def queue_copies(self, down: bool, up: bool) -> None:
        """They begin when the compute stream has come to where it is now."""
        self._copies.queue(down=down, up=up, ms=LONGER * self.collectives_ms)

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
