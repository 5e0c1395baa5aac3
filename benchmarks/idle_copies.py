"""Copies that nothing waits for, made as fxoffload makes its own: what they cost what runs beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from fxoffload.runtime.copies.streams import CudaCopies

# Of one copy.
PIECE_BYTES = 64 << 20
NUM_PIECES = 4
LINK_BYTES_PER_MS = 55e6


class IdleCopies:
    """Buffers on both sides, 256 MiB each way, and the streams of copies between them."""

    def __init__(self, device: torch.device) -> None:
        self._copies = CudaCopies(device)
        nbytes = NUM_PIECES * PIECE_BYTES
        self._host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def queue(self, down: bool, up: bool, ms: float) -> None:
        """For about so long, from when the compute stream has come to where it is now."""
        if down:
            self._copies.offload_waits_for_compute()
        if up:
            self._copies.reload_waits_for_compute()
        to_host, to_device = (_pieces(self._host[0], self._there[0]), _pieces(self._there[1], self._host[1]))
        for _ in range(max(1, round(ms * LINK_BYTES_PER_MS / (NUM_PIECES * PIECE_BYTES)))):
            if down:
                with self._copies.offloading():
                    self._copies.offload(to_host, gives_way=False)
            if up:
                with self._copies.reloading():
                    self._copies.reload(to_device, gives_way=False)


def _pieces(target: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True))
