"""Everything that is not a weight: tokenizer, chat template, config, remote code, licence, copied byte for byte."""

from __future__ import annotations

import filecmp
import os
import shutil
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
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.folder / path, target)
        shutil.copymode(checkpoint.folder / path, target)
        if fsync:
            _sync(target)


def write_file(path: Path, content: bytes, *, fsync: bool) -> None:
    """Write a whole file."""
    path.write_bytes(content)
    if fsync:
        _sync(path)


def compare_side_files(source: Checkpoint, output: Checkpoint) -> None:
    """Raise MismatchError where a file is missing in the output or differs."""
    there = set(output.other_files)
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


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
