"""Who has booked how much of this machine's memory, so that two processes do not count on the same bytes.

[Note: Ledger]
Each process has one file in a folder of its user, named by its number and its start time: what is left of a process
that died is told from a process that was given the same number, ignored and removed. A file says what is booked, how
much of that has memory behind it, and the process' control group. Bookings change under one lock over the folder. A
growth is allowed where, for the machine and for each control group with a limit, all live bookings together stay within
a share of the limit, and what is used already, what is booked but not yet backed, and the growth fit below it. Where no
folder can be written there is no ledger, and the limits hold for each process by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from fxoffload.runtime.host_memory import ledger_files
from fxoffload.runtime.host_memory import limits as host_limits
from fxoffload.runtime.host_memory.cgroups import Group
from fxoffload.runtime.host_memory.limits import DEFAULT_SHARE

log = logging.getLogger(__name__)

# What is used may come this near to a limit. Memory below it goes to what cannot be foreseen.
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
        """Book as much of ``nbytes`` as there is room for. Returns what is booked in all."""
        return self.nbytes if nbytes <= self.nbytes else self._ledger.grow(self, nbytes, 0)

    def backed(self, nbytes: int) -> None:
        """Say that ``nbytes`` have memory behind them by now: they are part of what the machine says is used."""
        self._ledger.note_backed(self, nbytes)

    def shrink_to(self, nbytes: int) -> None:
        """Give back what is booked beyond ``nbytes``."""
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
        self._lock = threading.RLock()
        self._busy = False
        self._bookings: weakref.WeakSet[Booking] = weakref.WeakSet()
        self._totals = [0, 0]  # booked and backed bytes of this process
        self._group = ""
        self._shrinking: deque[tuple[Booking, int]] = deque()

    def grow(self, booking: Booking, nbytes: int, at_least: int) -> int:
        """See ``Booking``: book up to ``nbytes``, nothing where fewer than ``at_least`` would be booked in all."""
        with self._turn(), self._folder_lock():
            others = self._others()
            self._group, limits = host_limits.memory_limits()
            room, refusal = self._room(others, limits, booking.share)
            granted = min(nbytes, booking.nbytes + max(room, 0))
            if granted < nbytes:
                more, left = (nbytes - booking.nbytes) / 2**30, max(room, 0) / 2**30
                booking.refusal = f"{more:.2f} GiB more were asked for and {left:.2f} GiB are left: {refusal}"
            if granted <= booking.nbytes or granted < at_least:
                return booking.nbytes
            self._bookings.add(booking)
            self._totals[0] += granted - booking.nbytes
            booking.nbytes = granted
            self._write()
            return granted

    def note_backed(self, booking: Booking, nbytes: int) -> None:
        """See ``Booking.backed``."""
        with self._turn():
            self._totals[1] += nbytes - booking.backed_bytes
            booking.backed_bytes = nbytes
            self._write()

    def shrink(self, booking: Booking, nbytes: int) -> None:
        """See ``Booking.shrink_to``."""
        self._shrinking.append((booking, nbytes))
        # A finalizer may have interrupted this very thread in the middle of its turn, which then does it at its end.
        if self._lock.acquire(timeout=_LOCK_S):
            try:
                if not self._busy:
                    with self._turn():
                        pass
            finally:
                self._lock.release()

    def booked_bytes(self) -> int:
        """What all live processes have booked."""
        with self._turn(), self._folder_lock():
            return self._totals[0] + sum(entry.booked for entry in self._others())

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

    def _room(self, others: Sequence[ledger_files.Entry], limits: Sequence[Group], share: float) -> tuple[int, str]:
        """How many more bytes may be booked, and what keeps it from being more."""
        tightest: tuple[int, str] | None = None
        for group in limits:
            name = f"control group {group.path}" if group.path else "machine"
            inside = [entry for entry in others if group.holds(entry.group)]
            booked = self._totals[0] + sum(entry.booked for entry in inside)
            pending = booked - self._totals[1] - sum(entry.backed for entry in inside)
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

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread at a time. What finalizers leave to do meanwhile is done at the end."""
        with self._lock:
            was_busy, self._busy = self._busy, True
            self._do_shrinking()  # what was given back before this growth must not be taken off it afterwards
            try:
                yield
            finally:
                self._do_shrinking()
                self._busy = was_busy

    def _do_shrinking(self) -> None:
        changed = False
        while self._shrinking:
            changed |= self._shrink(*self._shrinking.popleft())
        if changed:
            self._write()

    def _shrink(self, booking: Booking, nbytes: int) -> bool:
        if nbytes >= booking.nbytes:
            return False
        backed = min(booking.backed_bytes, nbytes)
        self._totals[0] += nbytes - booking.nbytes
        self._totals[1] += backed - booking.backed_bytes
        booking.nbytes, booking.backed_bytes = nbytes, backed
        return True

    @contextlib.contextmanager
    def _folder_lock(self) -> Iterator[None]:
        self._open()
        file = -1
        try:
            if self._folder is not None:
                file = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                ledger_files.lock_within(file, _LOCK_S)
        except OSError as error:
            log.debug("booking host memory without a lock: %s", error)
        try:
            yield
        finally:
            if file >= 0:
                fcntl.flock(file, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
                os.close(file)

    def _open(self) -> None:
        if self._opened:
            return
        self._opened = True
        try:
            self._folder = ledger_files.make_folder(self._folder or ledger_files.users_folder())
            self._path = self._folder / f"{os.getpid()}-{ledger_files.start_ms(os.getpid())}"
        except (OSError, psutil.Error) as error:
            self._folder = None
            log.debug("no ledger of host memory: %s", error)

    def _others(self) -> list[ledger_files.Entry]:
        """What other live processes have booked; the files of dead ones are removed."""
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
                log.debug("%s cannot be read: %s", path, error)
        return found

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            if not self._totals[0]:
                self._path.unlink(missing_ok=True)
                return
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                # In one call and without emptying it first: a reader finds the old numbers or the new ones.
                booked, backed = self._totals
                os.pwrite(file, ledger_files.Entry(booked, backed, self._group).text().encode(), 0)
            finally:
                os.close(file)
        except OSError as error:
            log.debug("host memory is not booked: %s", error)


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
