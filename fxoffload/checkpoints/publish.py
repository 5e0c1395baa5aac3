"""Nothing is lost: a checkpoint is built in a temporary folder beside its destination and renamed when it is whole.

    .{name}.fxoffload-partial   being written; its lock file is locked as long as the process lives
    .{name}.fxoffload-old       what was at the destination, while it is replaced (``overwrite``)

A killed process leaves the first, never a destination. The next run takes its lock, knows from it that nobody writes,
and removes what is in it. If it was killed between the two renames of a replacement, the next run puts the old one
back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fxoffload.checkpoints.errors import DestinationError, DiskFullError
from fxoffload.checkpoints.index import INDEX_NAME, SINGLE_NAME, Checkpoint
from fxoffload.sizes import format_bytes

LOCK_NAME = ".fxoffload-lock"
# Directories, the index, side files' last blocks.
SLACK_BYTES = 16 << 20


@dataclass(frozen=True)
class Destination:
    """Where the result goes: ``final``, and the folders beside it that hold it meanwhile."""

    final: Path
    partial: Path
    old: Path
    overwrite: bool


def choose_destination(source: Checkpoint, target: str | os.PathLike[str], *, overwrite: bool) -> Destination:
    """Check that ``target`` may be written. Raises DestinationError; changes nothing but what a killed run left."""
    final = Path(os.path.abspath(target))
    if final.is_symlink():
        raise DestinationError(f"{target} is a symbolic link; name the folder that it leads to")
    real, real_source = Path(os.path.realpath(final)), Path(os.path.realpath(source.folder))
    if real == real_source or real.is_relative_to(real_source) or real_source.is_relative_to(real):
        relation = "the source" if real == real_source else "inside the source, or around it"
        raise DestinationError(f"{target} is {relation} ({source.folder}); expected a folder apart from it")
    if not final.parent.is_dir():
        raise DestinationError(f"expected a folder to write into, found no {final.parent}; make it first")
    destination = Destination(
        final,
        final.with_name(f".{final.name}.fxoffload-partial"),
        final.with_name(f".{final.name}.fxoffload-old"),
        overwrite,
    )
    _put_back(destination)
    if os.path.lexists(final):
        _check_replaceable(source, final, overwrite)
    return destination


def check_room(destination: Destination, num_bytes: int) -> None:
    """Raise DiskFullError when the output does not fit, before a byte is written."""
    free = shutil.disk_usage(destination.final.parent).free
    if free < num_bytes + SLACK_BYTES:
        raise DiskFullError(
            f"{destination.final.parent}: expected room for {format_bytes(num_bytes + SLACK_BYTES)}, found "
            f"{format_bytes(free)} free; make room or write elsewhere"
        )


@contextlib.contextmanager
def building(destination: Destination) -> Iterator[Path]:
    """The folder to write into; renamed to its destination at the end, removed where an exception comes.

    Raises DestinationError when another process is writing there.
    """
    lock = _claim(destination)
    try:
        yield destination.partial
        os.unlink(destination.partial / LOCK_NAME)
        _rename(destination)
    except BaseException:
        shutil.rmtree(destination.partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _check_replaceable(source: Checkpoint, final: Path, overwrite: bool) -> None:
    if not overwrite:
        raise DestinationError(f"{final} exists; write elsewhere, or replace it with --overwrite (overwrite=True)")
    if not final.is_dir():
        raise DestinationError(f"{final} is a file; expected a checkpoint folder to replace")
    known = ("config.json", INDEX_NAME, SINGLE_NAME)
    if any(final.iterdir()) and not any((final / name).is_file() for name in known):
        raise DestinationError(
            f"{final} holds files but none of {', '.join(known)}: it is no checkpoint, and is not replaced; "
            "remove it yourself"
        )
    inside = [
        path.name for path in source.shards if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(final))
    ]
    if inside:
        raise DestinationError(f"{final} holds the files that the source links to ({inside[0]}); write elsewhere")


def _put_back(destination: Destination) -> None:
    """Undo a replacement that was killed between its renames."""
    if destination.old.exists() and not os.path.lexists(destination.final):
        os.rename(destination.old, destination.final)


def _claim(destination: Destination) -> int:
    """The partial folder, empty and locked."""
    partial = destination.partial
    if partial.exists():
        lock = _lock(partial)
        # Nobody holds it: a killed run left it. Its lock file goes last, so that a kill now leaves the same state.
        for entry in partial.iterdir():
            if entry.name != LOCK_NAME:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        return lock
    partial.mkdir()
    return _lock(partial)


def _lock(partial: Path) -> int:
    lock = os.open(partial / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise DestinationError(
            f"{partial} is being written by another process; wait for it, or write elsewhere"
        ) from error
    return lock


def _rename(destination: Destination) -> None:
    final, partial, old = destination.final, destination.partial, destination.old
    if not os.path.lexists(final):
        os.rename(partial, final)
        sync_folder(final.parent)
        return
    if not destination.overwrite:
        raise DestinationError(f"{final} appeared while the checkpoint was being written; nothing was replaced")
    shutil.rmtree(old, ignore_errors=True)
    try:
        os.rename(final, old)
        os.rename(partial, final)
    except BaseException:
        _put_back(destination)
        raise
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
