"""Everything that is not a weight: tokenizer, chat template, config, remote code, licence, copied byte for byte."""

from __future__ import annotations

import filecmp
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from fxoffload.checkpoints.errors import MismatchError
from fxoffload.checkpoints.index import Checkpoint


def side_file_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all files that are copied as they are."""
    return sum(os.stat(checkpoint.folder / path).st_size for path in checkpoint.other_files)


def copy_side_files(checkpoint: Checkpoint, folder: Path, *, fsync: bool) -> None:
    """Copy them with their permissions; links become files."""
    for path in checkpoint.other_files:
        target = folder / path
        _make_folders(checkpoint.folder, folder, path.parent)
        shutil.copyfile(checkpoint.folder / path, target)
        shutil.copymode(checkpoint.folder / path, target)
        if fsync:
            sync(target)


def write_file(path: Path, content: bytes, *, mode: int, fsync: bool) -> None:
    """Write a whole new file, with the permissions ``mode`` less the umask."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)
    if fsync:
        sync(path)


def weights_mode(checkpoint: Checkpoint) -> int:
    """The permissions that all of the source's weights give; the owner can read."""
    mode = 0o666
    for path in checkpoint.shards:
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
        raise MismatchError(f"expected every file of the source, found {what} {output.folder}: {', '.join(listed)}")


def _make_folders(source: Path, target: Path, below: Path) -> None:
    """The folders of ``below``, no more open than the source's."""
    for path in [*below.parents, below][-len(below.parts) :] if below.parts else []:
        mode = stat.S_IMODE(os.stat(source / path).st_mode) & 0o777
        (target / path).mkdir(mode | stat.S_IRWXU, exist_ok=True)


def sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
