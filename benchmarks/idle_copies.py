"""Copies that nothing waits for, made as fxoffload makes its own: their cost for other work."""

from __future__ import annotations

import torch
from torch import Tensor

from fxoffload.runtime.copies.streams import CudaCopies

# Of one copy.
PIECE_BYTES = 64 << 20
NUM_PIECES = 4
LINK_BYTES_PER_MS = 55e6


class IdleCopies:
    """The streams of copies, and 256 MiB on both sides for each way that is asked for."""

    def __init__(self, device: torch.device, *, down: bool, up: bool) -> None:
        self._copies = CudaCopies(device)
        self._to_host = self._to_device = None
        if down:
            here, there = _buffers(device)
            self._to_host = _pieces(here, there)
        if up:
            here, there = _buffers(device)
            self._to_device = _pieces(there, here)

    def queue(self, *, down: bool, up: bool, ms: float) -> None:
        """For about so long, from when the compute stream has come to where it is now."""
        to_host, to_device = self._to_host if down else None, self._to_device if up else None
        if to_host:
            self._copies.offload_waits_for_compute()
        if to_device:
            self._copies.reload_waits_for_compute()
        for _ in range(max(1, round(ms * LINK_BYTES_PER_MS / (NUM_PIECES * PIECE_BYTES)))):
            if to_host:
                with self._copies.offloading():
                    self._copies.offload(to_host, gives_way=False)
            if to_device:
                with self._copies.reloading():
                    self._copies.reload(to_device, gives_way=False)


def _buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    nbytes = NUM_PIECES * PIECE_BYTES
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return here, torch.empty(nbytes, dtype=torch.uint8, device=device)


def _pieces(target: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True))
