"""What tests of the host arena share."""

from __future__ import annotations

import time
from collections.abc import Callable

from fxoffload.runtime.host_arena import HostArena, HostBlock

MIB = 1 << 20
LARGE = 64 * MIB  # the limit of their arenas


def take(arena: HostArena, nbytes: int) -> HostBlock:
    """A block, which there has to be."""
    block = arena.allocate(nbytes, LARGE)
    assert block is not None, arena.refusal
    return block


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, for 20 s."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
