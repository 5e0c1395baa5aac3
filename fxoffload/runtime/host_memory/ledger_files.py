"""The files of the ledger: the bookings of one process, and whether it still runs."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_START_S = 2.0  # start times of one process differ where the clock was set meanwhile
_MEMORY_FOLDER = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Entry:
    """One process' bytes. ``group``: the path of its control group."""

    booked: int
    backed: int
    group: str

    def text(self) -> str:
        # Of one width, so that a shorter number leaves nothing of a longer one.
        return f"{self.booked:020d} {self.backed:020d}\n{self.group}\n"

    @staticmethod
    def parse(text: str) -> Entry:
        numbers, group, *_ = text.split("\n")
        booked, backed = numbers.split()
        return Entry(int(booked), int(backed), group)


def users_folder() -> Path:
    """Where this user's processes keep their entries."""
    base = _MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK) else Path(tempfile.gettempdir())
    try:
        # Containers may share a folder and not their processes' numbers.
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return base / f"fxoffload-{os.getuid()}-{space}"


def make_folder(path: Path) -> Path:
    """The folder, made where it is not there.

    Raises:
        OSError: it is not this user's, or cannot be written.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"expected a folder of this user's own that can be written, found {path}")
    return path


def lock_within(file: int, seconds: float) -> None:
    """Lock an open file.

    Raises:
        BlockingIOError: another process has held the lock for that long.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.002)


def start_ms(number: int) -> int:
    """When a process began, in milliseconds since 1970."""
    return int(1e3 * psutil.Process(number).create_time())


def is_alive(number: int, start_ms: int) -> bool:
    """Whether the process that has this number began then, and still runs."""
    try:
        process = psutil.Process(number)
        is_same = abs(process.create_time() * 1e3 - start_ms) <= _START_S * 1e3
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # it belongs to a user whose processes we may not read
