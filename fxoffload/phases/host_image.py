"""Placeholder until H1's lands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from fxoffload.runtime.host_arena import HostArena, HostBlock, Pinner, address_space_bytes


class HostMemoryError(MemoryError):
    """No host memory."""


class HostImage:
    def __init__(self, pinner: Pinner, limit_bytes: Callable[[], int], *, pin: bool = True) -> None:
        self._limit = limit_bytes
        self._arena = HostArena(pinner, address_space_bytes(limit_bytes()))

    def reserve(self, nbytes: int) -> None:
        self._arena.reserve(nbytes, self._limit())

    def take(self, nbytes: int) -> HostBlock:
        block = self._arena.allocate(nbytes, self._limit())
        if block is None:
            raise HostMemoryError(f"no host memory for {nbytes} bytes")
        return block

    def free(self, block: HostBlock) -> None:
        self._arena.free(block, None)

    def pieces(self, block: HostBlock, nbytes: int) -> Iterator[tuple[int, Tensor]]:
        return self._arena.pieces(block, nbytes)

    def release(self) -> int:
        return self._arena.release()

    @property
    def reserved_bytes(self) -> int:
        return self._arena.reserved_bytes

    @property
    def in_use_bytes(self) -> int:
        return self._arena.in_use_bytes
