"""Host memory by page: mapped, faulted in and registered with CUDA in the ways that ``pinning`` compares."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

HUGE_PAGE = 2 << 20
PAGE = 4096


class Mapping:
    """Anonymous private memory that is not touched yet, from an address that is a multiple of a huge page."""

    def __init__(self, nbytes: int, *, huge: bool) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        address = ctypes.addressof(self._anchor)
        self.address = -(-address // HUGE_PAGE) * HUGE_PAGE

    def chunks(self, nbytes: int) -> list[tuple[int, int]]:
        """(address, size), in order."""
        ends = range(0, self.nbytes, nbytes)
        return [(self.address + start, min(nbytes, self.nbytes - start)) for start in ends]

    def close(self) -> None:
        del self._anchor
        self._map.close()


def touch(address: int, nbytes: int) -> None:
    """Every byte; ctypes drops the GIL for the call."""
    ctypes.memset(address, 0, nbytes)


def touch_pages(address: int, nbytes: int) -> None:
    """One byte of each page, in a view that is written with a stride."""
    buffer = (ctypes.c_char * nbytes).from_address(address)
    torch.frombuffer(buffer, dtype=torch.uint8)[::PAGE].fill_(0)


class Registrar:
    """``cudaHostRegister``; on a CPU nothing. Counts the calls that failed."""

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = torch.cuda.cudart() if device.type == "cuda" else None
        self.num_failures = 0

    def register(self, address: int, nbytes: int) -> None:
        if self._runtime is not None and int(self._runtime.cudaHostRegister(address, nbytes, 0)):
            self.num_failures += 1

    def unregister(self, address: int, nbytes: int) -> None:
        if self._runtime is not None and int(self._runtime.cudaHostUnregister(address)):
            self.num_failures += 1


def in_threads(threads: int, work: Callable[[int, int], None], chunks: list[tuple[int, int]]) -> None:
    """Each chunk once, by whichever thread is free."""
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, address, size) for address, size in chunks]:
            done.result()
