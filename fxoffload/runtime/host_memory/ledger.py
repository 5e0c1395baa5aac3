"""Bookings of this machine's memory, so that two processes do not count on the same bytes.

[Note: Ledger]
Each process has one file in a folder of its user, named by its process number and its start time. So the file of a
process that died is not taken for that of a later one with the same number; it is ignored and removed. A file has three
entries: the bytes booked, how many of them are backed by memory, and the process' control group.

Bookings change under one lock over the folder. A growth has to fit in the machine and in each control group with a
limit. There, all live bookings together must stay within a share of the limit. And the memory in use, bookings that are
not yet backed, and the growth must stay below it. Where no folder can be written there is no ledger, and the limits
hold for each process by itself.

Bookings change in transactions ([Note: Asynchronous exceptions]): the file repeats them. A finalizer that gives memory
back in the middle of one only notes it; the memory is given back at the end of that transaction.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

from fxoffload.runtime.fork_safe_lock import ForkSafeRLock
from fxoffload.runtime.host_memory import ledger_files
from fxoffload.runtime.host_memory import limits as host_limits
from fxoffload.runtime.host_memory.cgroups import ControlGroup
from fxoffload.runtime.host_memory.limits import DEFAULT_SHARE
from fxoffload.runtime.transactions import transaction
from fxoffload.runtime.weak_bag import WeakBag

log = logging.getLogger(__name__)

# Memory in use may come this near to a limit. The rest is for needs that cannot be foreseen.
_FULL = 0.95
_LOCK_S = 2.0


class Booking:
    """The bytes of one arena. ``refusal`` says why the last growth was not allowed."""

    def __init__(self, ledger: Ledger | None = None, *, share: float = DEFAULT_SHARE) -> None:
        self._ledger = ledger or shared_ledger()
        self.share = share
        self.nbytes = 0
        self.backed_bytes = 0
        self.refusal = ""

    def grow_to(self, nbytes: int) -> bool:
        """Book ``nbytes`` in all; False, and nothing changed, where there is no room for them."""
        return nbytes <= self.nbytes or self._ledger.grow(self, nbytes, nbytes) >= nbytes

    def grow_within(self, nbytes: int) -> int:
        """Book as much of ``nbytes`` as there is room for. Returns all booked bytes."""
        return self.nbytes if nbytes <= self.nbytes else self._ledger.grow(self, nbytes, 0)

    def backed(self, nbytes: int) -> None:
        """Say that ``nbytes`` are backed by memory now: the machine counts them as used."""
        self._ledger.note_backed(self, nbytes)

    def shrink_to(self, nbytes: int) -> None:
        """Give back bookings beyond ``nbytes``."""
        self._ledger.shrink(self, nbytes)

    def release(self) -> None:
        """Give everything back. May be called by a finalizer, in the middle of anything."""
        self.shrink_to(0)


class Ledger:
    """See [Note: Ledger]. Thread-safe. ``folder``: None for the user's."""

    def __init__(self, folder: Path | None = None) -> None:
        self._given = folder
        self._reset()
        _LEDGERS.add(self)

    def _reset(self) -> None:
        self._folder: Path | None = self._given
        self._opened = False
        self._path: Path | None = None
        self._lock = ForkSafeRLock()
        self._torn = False
        self._folder_file: IO[bytes] | None = None  # while the folder is locked
        self._bookings: WeakBag[Booking] = WeakBag()
        self._group = ""
        self._shrinking: deque[tuple[Booking, int]] = deque()

    def _mend(self) -> None:
        """The bookings are the source of truth."""
        self._unlock_folder()
        self._do_shrinking()
        self._write()

    @property
    def _booked_bytes(self) -> int:
        return sum(booking.nbytes for booking in self._bookings)

    @property
    def _backed_bytes(self) -> int:
        return sum(booking.backed_bytes for booking in self._bookings)

    def grow(self, booking: Booking, nbytes: int, at_least: int) -> int:
        """See ``Booking``: book up to ``nbytes``, nothing where fewer than ``at_least`` would be booked in all."""
        granted = self._grow(booking, nbytes, at_least)
        self._shrink_if_idle()
        return granted

    @transaction
    def _grow(self, booking: Booking, nbytes: int, at_least: int) -> int:
        self._do_shrinking()  # bytes given back before this growth must not be taken off it afterwards
        self._lock_folder()
        others = self._others()
        self._group, limits = host_limits.memory_limits()
        room, refusal = self._room(others, limits, booking.share)
        granted = min(nbytes, booking.nbytes + max(room, 0))
        if granted < nbytes:
            more, left = (nbytes - booking.nbytes) / 2**30, max(room, 0) / 2**30
            booking.refusal = f"{more:.2f} GiB more were asked for and {left:.2f} GiB are left: {refusal}"
        if granted > booking.nbytes and granted >= at_least:
            if all(known is not booking for known in self._bookings):
                self._bookings.add(booking)
            booking.nbytes = granted
            self._write()
        self._unlock_folder()
        return booking.nbytes

    def note_backed(self, booking: Booking, nbytes: int) -> None:
        """See ``Booking.backed``."""
        self._note_backed(booking, nbytes)
        self._shrink_if_idle()

    @transaction
    def _note_backed(self, booking: Booking, nbytes: int) -> None:
        booking.backed_bytes = nbytes
        self._write()

    def shrink(self, booking: Booking, nbytes: int) -> None:
        """See ``Booking.shrink_to``."""
        self._shrinking.append((booking, nbytes))
        self._shrink_if_idle()

    def _shrink_if_idle(self) -> None:
        """A thread in a transaction does it when that is over: maybe this thread, which a finalizer interrupts."""
        while self._shrinking and not self._torn:
            self._do_shrinking()

    def booked_bytes(self) -> int:
        """Bytes that all live processes have booked."""
        booked = self._count()
        self._shrink_if_idle()
        return booked

    @transaction
    def _count(self) -> int:
        self._do_shrinking()
        self._lock_folder()
        booked = self._booked_bytes + sum(entry.booked for entry in self._others())
        self._unlock_folder()
        return booked

    def forget(self) -> None:
        """In a forked child: the memory is the parent's, and so is the file."""
        for booking in self._bookings:
            booking.nbytes = booking.backed_bytes = 0
        self._reset()

    def close(self) -> None:
        """Remove this process' file."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def _room(
        self, others: Sequence[ledger_files.Entry], limits: Sequence[ControlGroup], share: float
    ) -> tuple[int, str]:
        """How many more bytes may be booked, and why not more."""
        tightest: tuple[int, str] | None = None
        for group in limits:
            name = f"control group {group.path}" if group.path else "machine"
            inside = [entry for entry in others if group.holds(entry.group)]
            booked = self._booked_bytes + sum(entry.booked for entry in inside)
            pending = booked - self._backed_bytes - sum(entry.backed for entry in inside)
            whole = f"{group.limit_bytes / 2**30:.2f} GiB of the {name}"
            by_share = int(share * group.limit_bytes) - booked
            by_use = int(_FULL * group.limit_bytes) - group.used_bytes - max(pending, 0)
            booked_text = f"{booked / 2**30:.2f} GiB are booked by {1 + len(inside)} processes"
            for room, text in (
                (by_share, f"of {whole}, {booked_text} and {share:.0%} may be"),
                (by_use, f"of {whole}, {group.used_bytes / 2**30:.2f} GiB are in use"),
            ):
                if tightest is None or room < tightest[0]:
                    tightest = room, text
        return tightest or (1 << 62, "")

    # -- files ---------------------------------------------------------------------------------------------------------

    @transaction
    def _do_shrinking(self) -> None:
        changed = False
        while self._shrinking:
            booking, nbytes = self._shrinking[0]
            if nbytes < booking.nbytes:
                booking.backed_bytes = min(booking.backed_bytes, nbytes)
                booking.nbytes = nbytes
                changed = True
            self._shrinking.popleft()
        if changed:
            self._write()

    def _lock_folder(self) -> None:
        self._open()
        if self._folder is None:
            return
        try:
            self._folder_file = open(self._folder / "lock", "ab", buffering=0, opener=_open_private)  # noqa: SIM115
            ledger_files.lock_within(self._folder_file.fileno(), _LOCK_S)
        except OSError as error:
            log.debug("booking host memory without a lock: %s", str(error))

    def _unlock_folder(self) -> None:
        file = self._folder_file
        if file is not None and not file.closed:
            fcntl.flock(file, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
            file.close()
        self._folder_file = None

    def _open(self) -> None:
        if self._opened:
            return
        try:
            self._folder = ledger_files.make_folder(self._folder or ledger_files.users_folder())
            self._path = self._folder / f"{os.getpid()}-{ledger_files.start_ms(os.getpid())}"
        except (OSError, psutil.Error) as error:
            self._folder = None
            log.debug("no ledger of host memory: %s", str(error))
        self._opened = True

    def _others(self) -> list[ledger_files.Entry]:
        """Bookings of other live processes; the files of dead ones are removed."""
        if self._folder is None:
            return []
        found = []
        for path in self._folder.iterdir():
            number, dash, start = path.name.partition("-")
            if path == self._path or not dash or not (number.isdigit() and start.isdigit()):
                continue
            try:
                if ledger_files.is_alive(int(number), int(start)):
                    found.append(ledger_files.Entry.parse(path.read_text()))
                else:
                    path.unlink()
            except (OSError, ValueError) as error:
                log.debug("%s cannot be read: %s", path, str(error))
        return found

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            booked, backed = self._booked_bytes, self._backed_bytes
            if not booked:
                self._path.unlink(missing_ok=True)
                return
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                # In one call and without emptying it first: a reader finds the old numbers or the new ones.
                os.pwrite(file, ledger_files.Entry(booked, backed, self._group).text().encode(), 0)
            finally:
                os.close(file)
        except OSError as error:
            log.debug("host memory is not booked: %s", str(error))


def _open_private(path: str, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def shared_ledger() -> Ledger:
    """The ledger that this user's processes share."""
    return _SHARED


_LEDGERS: weakref.WeakSet[Ledger] = weakref.WeakSet()
_SHARED = Ledger()


def _after_fork_in_child() -> None:
    for ledger in _LEDGERS:
        ledger.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_SHARED.close)
