"""The host image: where the bytes of parameters, gradients and optimizer state lie while they are off the device.

[Note: Host image]
Two arenas. The first is pinned, and grows in the background from the moment its size is known. Blocks that it cannot
take, at its limit or where the driver refuses, go to the second, which is pageable. Copies still work then, slowly,
which is said once. Memory is taken by the page, so the image is as large as its blocks, each rounded up to 512 bytes.

[Note: Limits of the image]
``limit_bytes`` bounds pinned memory, and by default nothing but the machine bounds the rest: a job that has pinned its
share goes on slowly rather than ending. ``total_limit_bytes`` bounds both together, since a user who has named a number
means that number. No growth of either arena is begun that would take the sum beyond it; a block that does not fit
raises. A block lies in one arena. So where the driver has refused, the room that is left may be in two parts, and the
last block fit in neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import psutil
from torch import Tensor

from fxoffload.runtime.fork_safe_lock import ForkSafeRLock, locked
from fxoffload.runtime.host_memory.arena import HeapMemory, HostArena, HostBlock, Pinner, address_space_bytes
from fxoffload.runtime.host_memory.ledger import Booking, Ledger
from fxoffload.runtime.host_memory.limits import PAGEABLE_SHARE

log = logging.getLogger(__name__)


class HostMemoryError(MemoryError):
    """The host has no memory for tensors that should leave the device."""


class _Total:
    """The limit for all bookings of an image together."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.bookings: list[_Booking] = []
        self.lock = ForkSafeRLock()


class _Booking(Booking):
    """Within a total. Memory that is being pinned is booked already: two growths at once cannot pass the limit."""

    def __init__(self, total: _Total, ledger: Ledger | None, **options: float) -> None:
        super().__init__(ledger, **options)
        self._total = total
        total.bookings.append(self)

    @locked(lambda self, nbytes: self._total.lock)
    def grow_to(self, nbytes: int) -> bool:
        return nbytes <= self._granted(nbytes) and super().grow_to(nbytes)

    @locked(lambda self, nbytes: self._total.lock)
    def grow_within(self, nbytes: int) -> int:
        return super().grow_within(self._granted(nbytes))

    def _granted(self, nbytes: int) -> int:
        limit = self._total.limit_bytes
        if limit is None:
            return nbytes
        others = sum(other.nbytes for other in self._total.bookings if other is not self)
        room = max(limit - others, self.nbytes)
        if nbytes > room:
            self.refusal = f"the limit is {_gib(limit)} of pinned and pageable memory together"
        return min(nbytes, room)


class HostImage:
    """See [Note: Host image]. Thread-safe.

    Args:
        pinner: registers memory with the device's driver.
        limit_bytes: most pinned bytes; asked at every growth. Without ``pin``: most bytes.
        total_limit_bytes: most bytes, pinned and pageable together; None for the machine's limits. See
            [Note: Limits of the image].
        pin: False to take pageable memory for everything, without a warning.
        ledger: None for the one that all processes share.
    """

    def __init__(
        self,
        pinner: Pinner,
        limit_bytes: Callable[[], int],
        *,
        total_limit_bytes: int | None = None,
        pin: bool = True,
        ledger: Ledger | None = None,
    ) -> None:
        space = address_space_bytes(psutil.virtual_memory().total)
        pageable = HeapMemory(touch=True)
        total = _Total(total_limit_bytes)
        first, rest = _Booking(total, ledger), _Booking(total, ledger, share=PAGEABLE_SHARE)
        self._limit_bytes = limit_bytes
        self._pins = pin and pinner.pinned
        self._first = HostArena(pinner if pin else pageable, space, exact=True, warn=False, booking=first)
        self._rest = HostArena(pageable, space, exact=True, warn=False, booking=rest)
        self._space = space
        self._has_warned = False
        self._driver_refused = False

    def reserve(self, nbytes: int) -> None:
        """Grow to ``nbytes`` in the background, as far as the limit allows. Returns at once."""
        if not self._driver_refused:
            self._first.reserve(nbytes - self._rest.reserved_bytes, self._limit_bytes())

    def take(self, nbytes: int) -> HostBlock:
        """A block of ``nbytes`` bytes, pinned where it can be. Waits while its bytes are being pinned.

        Raises:
            HostMemoryError: the machine, its control group or ``total_limit_bytes`` has no room for it.
        """
        block = self._first.allocate_ready(nbytes) or self._first.allocate(nbytes, self._limit_bytes())
        if block is not None:
            return block
        reason = self._first.refusal
        if self._pins:
            block = self._rest.allocate_ready(nbytes) or self._rest.allocate(nbytes, self._space)
            if block is not None:
                self._warn(nbytes, reason)
                return block
            reason = self._rest.refusal
        raise HostMemoryError(
            f"expected {_gib(nbytes)} of host memory for what leaves the device, found none ({reason}). The image has "
            f"{_gib(self.pinned_bytes)} pinned and {_gib(self.pageable_bytes)} pageable, of which "
            f"{_gib(self.in_use_bytes)} are in use{self._in_tensors()}. Offload fewer groups, give the process or its "
            "control group more memory, raise host_limit if that is what is reached, or release what other processes "
            "have booked"
        )

    def free(self, block: HostBlock) -> None:
        """Return a block. The next owner waits for ``block.fence`` before it writes."""
        self._arena_of(block).free(block, None)

    def pieces(self, block: HostBlock, nbytes: int) -> list[tuple[int, Tensor]]:
        """(offset within the block, uint8 host tensor) for each chunk that the block's first ``nbytes`` touch."""
        return self._arena_of(block).pieces(block, nbytes)

    def tensor(self, block: HostBlock, nbytes: int) -> Tensor:
        """The block's first ``nbytes`` bytes as a tensor for users, who may keep it."""
        return self._arena_of(block).tensor(block, nbytes)

    def may_write(self, block: HostBlock) -> bool:
        """Whether no such tensor is alive. Waits for copies out of the last one."""
        return self._arena_of(block).may_write(block)

    def _arena_of(self, block: HostBlock) -> HostArena:
        return self._rest if self._rest.owns(block) else self._first

    def release(self) -> int:
        """Give everything back to the operating system. Returns bytes.

        Raises:
            RuntimeError: blocks are in use.
        """
        in_use = self.in_use_bytes
        if in_use:
            raise RuntimeError(
                f"expected nothing in the host image, found {_gib(in_use)} of offloaded tensors: onload them first "
                "(PhaseManager.onload())"
            )
        given = self._first.release() + self._rest.release()
        self._driver_refused = False
        return given

    def _in_tensors(self) -> str:
        nbytes = self._first.in_tensors_bytes + self._rest.in_tensors_bytes
        return f", and {_gib(nbytes)} in tensors of earlier state dicts that are still referenced" if nbytes else ""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of host memory that the image has."""
        return self._first.reserved_bytes + self._rest.reserved_bytes

    @property
    def in_use_bytes(self) -> int:
        """Bytes in blocks that were taken and not returned."""
        return self._first.in_use_bytes + self._rest.in_use_bytes

    @property
    def pinned_bytes(self) -> int:
        """Those of ``reserved_bytes`` that are registered with the driver."""
        return self._first.reserved_bytes if self._pins else 0

    @property
    def pageable_bytes(self) -> int:
        """Those that are not."""
        return self.reserved_bytes - self.pinned_bytes

    def _warn(self, nbytes: int, reason: str) -> None:
        self._driver_refused = self._driver_refused or self._first.has_failed
        if self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "%s of host memory could not be pinned (%s) and are pageable, as may be what follows "
            "(PhaseManager.image.pageable_bytes counts it): such copies run at about 1.2 GB/s to the host and 5 to 7 "
            "GB/s back, instead of 55. Raise host_limit, the limit of locked memory (ulimit -l) or the memory of the "
            "control group, or pass pin=False to have pageable memory without this warning",
            _gib(nbytes),
            reason,
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
