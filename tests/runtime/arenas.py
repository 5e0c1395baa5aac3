"""What tests of the host arena share."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable

from fxoffload.runtime.host_memory.arena import HostArena, HostBlock

MIB = 1 << 20
LARGE = 64 * MIB  # the limit of their arenas


def take(arena: HostArena, nbytes: int) -> HostBlock:
    """A block, which there has to be, and which is in use until it is freed."""
    block = arena.allocate(nbytes, LARGE)
    assert block is not None, arena.refusal
    vars(arena).setdefault("taken", []).append(block)
    return block


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, for 20 s."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def resident_share(arena: HostArena, start: int, end: int) -> float:
    """Of the pages of some bytes of an arena, those that have memory."""
    assert arena._range is not None
    pages = (ctypes.c_ubyte * ((end - start) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(arena._range.address + start)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(end - start), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)
