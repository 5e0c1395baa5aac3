"""Nothing is lost: a checkpoint is built in a temporary folder next to its destination and renamed when it is whole.

    .{name}.fxoffload-lock      Locked from the first look at these to the last removal; lists ours (claim.py).
    .{name}.fxoffload-partial   Being written.
    .{name}.fxoffload-old       The replaced checkpoint, between the two renames that replace it; always whole.
    .{name}.fxoffload-trash     The same once it is replaced; only ever removed.

A killed process leaves the first two, never a destination. The next run takes the lock, which shows that no other
process writes, and removes the folder that the lock names. If the process was killed between the two renames, the next
run puts the old checkpoint back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from fxoffload.checkpoints.claim import Claim, identity, take_claim
from fxoffload.checkpoints.destination import Destination, check_replaceable
from fxoffload.checkpoints.errors import DestinationError, DiskFullError
from fxoffload.checkpoints.interrupts import held_back
from fxoffload.checkpoints.side_files import sync
from fxoffload.sizes import format_bytes
from fxoffload.tell import warn

# Directories, the index, side files' last blocks.
SLACK_BYTES = 16 << 20


def check_room(destination: Destination, num_bytes: int) -> None:
    """Raise DiskFullError when the output does not fit, before a byte is written."""
    free = shutil.disk_usage(destination.final.parent).free
    if free < num_bytes + SLACK_BYTES:
        raise DiskFullError(
            f"{destination.final.parent}: expected room for {format_bytes(num_bytes + SLACK_BYTES)}, found "
            f"{format_bytes(free)} free; make room or write elsewhere"
        )


@contextlib.contextmanager
def building(destination: Destination, num_bytes: int) -> Iterator[Path]:
    """The folder to write ``num_bytes`` into; renamed to its destination at the end, removed where an exception comes.

    Raises DestinationError when another process is writing there, or a checkpoint there may not be replaced;
    DiskFullError when there is no room, once a killed run's folder is gone.
    """
    claim = take_claim(destination.lock)
    try:
        with held_back():
            _settle(destination, claim)
        check_replaceable(destination)
        check_room(destination, num_bytes)
        try:
            _make(destination, claim)
            yield destination.partial
            with held_back():
                _publish(destination, claim)
        except BaseException:
            with held_back():
                if _is_named(destination.partial, claim):
                    _remove(destination.partial)
            raise
    finally:
        left = (destination.partial, destination.old, destination.trash)
        claim.release(keep=any(map(os.path.lexists, left)))


def _make(destination: Destination, claim: Claim) -> None:
    """The empty folder, no more open than the source."""
    mode = stat.S_IMODE(os.stat(destination.source.folder).st_mode) & 0o777
    os.mkdir(destination.partial, mode | stat.S_IRWXU)
    claim.note(partial=os.lstat(destination.partial).st_ino)


def _settle(destination: Destination, claim: Claim) -> None:
    """Undo or finish what a killed run began, which its record names. Anything else of these names is not touched."""
    partial, old, trash = destination.partial, destination.old, destination.trash
    for folder in (partial, trash):
        if os.path.lexists(folder):
            if not _is_named(folder, claim):
                raise _foreign(folder)
            _remove(folder)
    if not os.path.lexists(old):
        return
    if claim.record.get("old") != identity(old) or not _is_folder(old):
        raise _foreign(old)
    if not os.path.lexists(destination.final):
        os.rename(old, destination.final)
    elif claim.record.get("new") == identity(destination.final):
        _discard(destination)
    else:
        raise DestinationError(
            f"expected one of {destination.final} and {old}, found both: a killed run left the second, the checkpoint "
            "that it was to replace; keep the one that you want under the first name, and move the other away"
        )


def _is_named(folder: Path, claim: Claim) -> bool:
    """Is it a folder of this claim's, or an empty one?"""
    if not _is_folder(folder):
        return False
    ours = (claim.record.get("partial"), *claim.record.get("old", [])[:1])
    return os.lstat(folder).st_ino in ours or not os.listdir(folder)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _foreign(path: Path) -> DestinationError:
    lock = path.with_name(path.name.rpartition("-")[0] + "-lock")
    return DestinationError(
        f"expected {path} to be of an earlier run, found no record of it in {lock}; look what it is, and move or "
        "remove it yourself"
    )


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        warn(f"{folder} could not be removed in full; remove it yourself")


def _publish(destination: Destination, claim: Claim) -> None:
    final, partial, old = destination.final, destination.partial, destination.old
    if not _is_folder(partial) or os.lstat(partial).st_ino != claim.record["partial"]:
        raise DestinationError(f"{partial} was moved or replaced while it was being written; convert again")
    if not os.path.lexists(final):
        os.rename(partial, final)
        sync(final.parent)
        return
    if not destination.overwrite:
        raise DestinationError(
            f"{final} appeared while the checkpoint was being written; nothing was replaced: write elsewhere, or "
            "use --overwrite"
        )
    check_replaceable(destination)  # it may hold other files than hours ago
    claim.note(old=identity(final), new=identity(partial), durable=True)
    os.rename(final, old)
    try:
        os.rename(partial, final)
    except BaseException:
        os.rename(old, final)
        raise
    sync(final.parent)
    _discard(destination)


def _discard(destination: Destination) -> None:
    """Remove the replaced checkpoint, under a name from which nothing is put back."""
    os.rename(destination.old, destination.trash)
    _remove(destination.trash)
