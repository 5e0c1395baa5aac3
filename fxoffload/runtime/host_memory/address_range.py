"""One range of host addresses, which has no memory until it is touched."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import platform
import re
from typing import NamedTuple

import torch

from fxoffload.runtime.weak_bag import WeakBag
from fxoffload.torch_private.storages import StorageWeakRef, is_gone

log = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
_PIECE = 16 << 20  # bytes given back at a time


class HostRange:
    """Addresses that start at a huge page, and their bytes as a tensor.

    The mapping goes with the last reference to ``bytes`` or a view of them: closing it earlier would pull the memory
    from under a live view. A forked child does not have the range at all (MADV_DONTFORK): a child would copy pages that
    the device writes to. It has the bytes of a ``tensor`` that is alive when it is forked.
    """

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        # One huge page more than asked for, to start at the border of one: huge pages are used for whole ones only.
        self._map = _Map(-1, nbytes + HUGE_PAGE, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
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
        self._map.parts = []
        _MAPS.add(self._map)

    def tensor(self, start: int, nbytes: int, *, for_children: bool) -> torch.Tensor:
        """Some bytes, in a storage of their own.

        Args:
            for_children: whether any kernel gives a forked child these pages. One before 5.12 shares pinned pages with
                it, and then the parent no longer writes where the device reads: such a child must not touch them.
        """
        offset = self._skipped + start
        found = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)
        if for_children or _COPIES_PINNED_PAGES:
            self._map.parts = [part for part in self._map.parts if not is_gone(part.storage)]
            self._map.parts.append(_Part(StorageWeakRef(found.untyped_storage()), offset, nbytes))
        return found

    def give_back(self, start: int, nbytes: int) -> None:
        """Return the memory of some whole pages to the operating system; the addresses stay."""
        # madvise() keeps the GIL: a piece at a time, so that no other thread waits for all of it.
        for at in range(start, start + nbytes, _PIECE):
            try:
                self._map.madvise(mmap.MADV_DONTNEED, self._skipped + at, min(_PIECE, start + nbytes - at))
            except OSError as error:
                log.debug("MADV_DONTNEED refused: %s", error)


class _Part(NamedTuple):
    """A tensor of a range, and where it lies in the mapping."""

    storage: StorageWeakRef
    offset: int
    nbytes: int


class _Map(mmap.mmap):
    """A mapping, and the tensors of it that a forked child is to have."""

    parts: list[_Part]


_MAPS: WeakBag[_Map] = WeakBag()


def _copies_pinned_pages(release: str) -> bool:
    """Whether a Linux kernel copies pinned pages for a child at the fork, and shares none."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (5, 12)


_COPIES_PINNED_PAGES = _copies_pinned_pages(platform.release())


def _advise_parts(advice: str) -> None:
    if not hasattr(mmap, advice):
        return
    for held in _MAPS:
        for part in held.parts:
            if not is_gone(part.storage):
                start = part.offset // mmap.PAGESIZE * mmap.PAGESIZE
                with contextlib.suppress(OSError):
                    held.madvise(getattr(mmap, advice), start, part.offset + part.nbytes - start)


def _after_fork_in_child() -> None:
    # The child has a hole there, in which its own mappings will come to lie: unmapping the range would unmap those. A
    # reference that is never given back keeps the object from ever doing it.
    for held in _MAPS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


os.register_at_fork(
    before=lambda: _advise_parts("MADV_DOFORK"),
    after_in_parent=lambda: _advise_parts("MADV_DONTFORK"),
    after_in_child=_after_fork_in_child,
)
