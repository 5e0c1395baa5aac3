"""Everything that is not a weight: tokenizer, chat template, config, remote code, licence, copied byte for byte."""

from __future__ import annotations

import filecmp
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from fxoffload.checkpoints.errors import MismatchError, some
from fxoffload.checkpoints.index import Checkpoint
from fxoffload.checkpoints.move_bytes import ByteMover


def side_file_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all files that are copied as they are."""
    return sum(os.stat(checkpoint.folder / path).st_size for path in checkpoint.other_files)


def copy_side_files(checkpoint: Checkpoint, folder: Path, *, fsync: bool) -> None:
    """Copy them with their permissions; links become files."""
    mover = ByteMover(lambda num_bytes: None, lambda: False)
    made = {Path()}
    for path in checkpoint.other_files:
        _make_folders(checkpoint.folder, folder, path.parent, made)
        with (checkpoint.folder / path).open("rb") as source, create_file(folder / path, 0o600) as target:
            status = os.fstat(source.fileno())
            mover.copy(source.fileno(), 0, target.fileno(), 0, status.st_size)
            os.fchmod(target.fileno(), stat.S_IMODE(status.st_mode))
            if fsync:
                os.fsync(target.fileno())


def write_file(path: Path, content: bytes, *, mode: int, fsync: bool) -> None:
    """Write a whole new file, with the permissions ``mode`` less the umask."""
    with create_file(path, mode) as file:
        file.write(content)
    if fsync:
        sync(path)


def weights_mode(checkpoint: Checkpoint) -> int:
    """The permissions that all of the source's weights give; the owner can read."""
    mode = 0o666
    for path in checkpoint.files:
        mode &= os.stat(path).st_mode
    return mode | stat.S_IRUSR


def compare_side_files(source: Checkpoint, output: Checkpoint) -> None:
    """Raise MismatchError where a file is missing in the output, differs, or is not in the source."""
    there = set(output.other_files)
    _raise_for("others in", output, sorted(there - set(source.other_files)))
    missing = [path for path in source.other_files if path not in there]
    _raise_for("missing from", output, missing)
    differing = [
        path
        for path in source.other_files
        if not filecmp.cmp(source.folder / path, output.folder / path, shallow=False)
    ]
    _raise_for("different in", output, differing)


def _raise_for(what: str, output: Checkpoint, paths: Iterable[Path]) -> None:
    listed = [str(path) for path in paths]
    if listed:
        raise MismatchError(
            f"expected every file of the source, found {what} {output.folder}: {some(listed)}; convert again, or copy "
            "the source's files there"
        )


def create_file(path: Path, mode: int) -> BinaryIO:
    """A new file to write, with the permissions ``mode`` less the umask. A link that lies there is an error."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


def _make_folders(source: Path, target: Path, below: Path, made: set[Path]) -> None:
    """The folders of ``below`` but those ``made`` before, no more open than the source's."""
    for path in [*reversed(below.parents), below]:
        if path not in made:
            mode = stat.S_IMODE(os.stat(source / path).st_mode) & 0o777
            (target / path).mkdir(mode | stat.S_IRWXU)
            made.add(path)


def sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
