"""One run at a time for a destination: a locked file next to it, which lists the folders that the run has made there.

The lock ends with the process; the file stays. So the next run knows a killed run's folders from others of the same
names, and removes or puts back only those.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxoffload.checkpoints.errors import DestinationError

# One write of a fixed length: a record is the old one or the new one.
RECORD_BYTES = 256


@dataclass
class Claim:
    """The lock on ``path``. ``record`` names folders by what ``identity`` gives or, while they change, by inode."""

    path: Path
    file: int
    record: dict[str, Any] = field(default_factory=dict)

    def note(self, *, durable: bool = False, **facts: object) -> None:
        """Add to the record; ``durable``: it outlives a power cut from now on."""
        self.record.update(facts)
        os.pwrite(self.file, (json.dumps(self.record) + "\n").encode().ljust(RECORD_BYTES), 0)
        if durable:
            os.fsync(self.file)

    def release(self, *, keep: bool) -> None:
        """End the lock; ``keep`` the record where something is left that the next run must know."""
        try:
            if not keep:
                os.unlink(self.path)
            fcntl.flock(self.file, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
        finally:
            os.close(self.file)


def take_claim(path: Path) -> Claim:
    """Lock ``path``. Raises DestinationError where another process has it, or where it cannot be locked."""
    while True:
        file = _open(path)
        try:
            _lock(path, file)
            # The run before may have removed the file between the two calls; then this lock says nothing.
            if _is_at(path, file):
                return Claim(path, file, _read(path, file))
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def identity(folder: Path) -> list[int]:
    """Inode and time of the last change of its entries: an inode alone may be used again."""
    status = os.lstat(folder)
    return [status.st_ino, status.st_mtime_ns]


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DestinationError(
            f"expected to write files beside the destination, found that {path} cannot be opened ({error.strerror}); "
            "check the permissions of that folder and the length of the name, or write elsewhere"
        ) from error


def _lock(path: Path, file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DestinationError(
            f"the destination of {path} is being written by another process; wait for it, or write elsewhere"
        ) from error
    except OSError as error:
        os.unlink(path)
        raise DestinationError(
            f"{path.parent}: expected a filesystem with file locks, found none ({error.strerror}); write to another "
            "and move the result, or mount this one with locks (Lustre: -o flock)"
        ) from error


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _read(path: Path, file: int) -> dict[str, Any]:
    status = os.fstat(file)
    try:
        # A file with a second name may be another user's, linked here so that a run writes into it.
        ours = stat.S_ISREG(status.st_mode) and status.st_nlink < 2 and status.st_size in (0, RECORD_BYTES)
        record = json.loads(os.pread(file, RECORD_BYTES, 0) or b"{}") if ours else None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise DestinationError(f"expected {path} to be a lock of an earlier run, found something else; move it away")
    return record
