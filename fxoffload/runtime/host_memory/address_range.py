"""One range of host addresses, without memory behind it until it is touched."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os

import torch

from fxoffload.runtime.weak_bag import WeakBag

log = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
_PIECE = 16 << 20  # bytes given back at a time


class HostRange:
    """Addresses that start at a huge page, and their bytes as a tensor.

    The mapping goes with the last reference to ``bytes`` or a view of them: closing it earlier would pull the memory
    from under a view that somebody holds. A forked child does not have the range at all (MADV_DONTFORK): a child would
    copy pages that the device writes to.
    """

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        # One huge page more than asked for, to start at the border of one: huge pages are used for whole ones only.
        self._map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                try:
                    self._map.madvise(getattr(mmap, advice))
                except OSError as error:
                    log.debug("%s refused: %s", advice, error)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._skipped = -whole.data_ptr() % HUGE_PAGE
        self.bytes = whole[self._skipped : self._skipped + nbytes]
        self.address = self.bytes.data_ptr()
        _MAPS.add(self._map)

    def give_back(self, start: int, nbytes: int) -> None:
        """Return the memory behind some whole pages to the operating system; the addresses stay."""
        # madvise() keeps the GIL: a piece at a time, so that no other thread waits for all of it.
        for at in range(start, start + nbytes, _PIECE):
            try:
                self._map.madvise(mmap.MADV_DONTNEED, self._skipped + at, min(_PIECE, start + nbytes - at))
            except OSError as error:
                log.debug("MADV_DONTNEED refused: %s", error)


_MAPS: WeakBag[mmap.mmap] = WeakBag()


def _after_fork_in_child() -> None:
    # The child has a hole there, in which its own mappings will come to lie: unmapping the range would unmap those. A
    # reference that nobody gives back keeps the object from ever doing it.
    for held in _MAPS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


os.register_at_fork(after_in_child=_after_fork_in_child)
