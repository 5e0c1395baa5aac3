"""A checkpoint folder, read through its index: its tensors, and whether its files agree with each other.

Only headers and JSON are read; no tensor is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxoffload.checkpoints.errors import BrokenCheckpointError, shortened, some
from fxoffload.checkpoints.header import StoredTensor, read_header
from fxoffload.checkpoints.not_a_checkpoint import no_folder, no_weights
from fxoffload.checkpoints.read_json import check_name, read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHARD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")
# Size and time of a file that is not there.
_NO_FILE = (-1, -1)
# Folders in each other, and folders in all: far above any checkpoint's. Links can make millions of a few.
DEEPEST = 32
MOST_FOLDERS = 100_000
# Of the clone or the download and not of the model: they describe the source's files, and would be wrong for others.
NOT_COPIED = (".git", ".cache/huggingface")
Identity = tuple[int, int]


@dataclass(frozen=True)
class Checkpoint:
    """A verified folder of safetensors shards.

    ``tensors`` are in the order of the files and of the offsets in them; ``metadata`` is the shards' own,
    ``index_metadata`` the index's. ``other_files`` are paths relative to ``folder``, links followed.
    ``conflicts`` are the names in the shards' metadata on which they differ; these are not in ``metadata``.
    ``stamps`` are size and modification time (ns) of each file, to notice that one changed since.
    ``extras`` are files of the model that the index does not name, with the metadata of each; ``foreign`` are weights
    in other_files, with the reason why they are not the model's. See extras.py.
    """

    folder: Path
    config: Mapping[str, Any] | None
    tensors: Mapping[str, StoredTensor]
    shards: tuple[Path, ...]
    metadata: Mapping[str, str]
    index_metadata: Mapping[str, Any]
    other_files: tuple[Path, ...]
    stamps: Mapping[Path, tuple[int, int]]
    conflicts: tuple[str, ...] = ()
    extras: Mapping[Path, Mapping[str, str]] = field(default_factory=dict)
    foreign: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        """All that hold tensors of the model."""
        return (*self.shards, *self.extras)

    @property
    def has_index(self) -> bool:
        return self.stamps[self.folder / INDEX_NAME] != _NO_FILE

    @property
    def kept_metadata(self) -> Mapping[str, Any]:
        """Of the index: all but what counts its tensors, which every writer counts anew."""
        counts = ("total_size", "total_parameters")
        return {key: value for key, value in self.index_metadata.items() if key not in counts}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read and check a folder: every shard is there, whole, and holds the keys that the index says.

    Raises BrokenCheckpointError where files contradict each other, UnsupportedCheckpointError for pickled weights.
    """
    try:
        if not os.path.isdir(folder):
            raise no_folder(os.fspath(folder))
        return _open(Path(folder))
    except OSError as error:
        raise BrokenCheckpointError(
            f"{error.filename or folder}: cannot be read ({error.strerror or error}); expected every file and folder "
            "of the checkpoint to be readable: mend that, or remove what does not belong to it"
        ) from error


def _open(root: Path) -> Checkpoint:
    weight_map, index_metadata = _read_index(root)
    names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]
    _check_listing(root, names)
    others = _other_files(root, names)
    stamps = {root / name: _stamp(root / name) for name in (*names, *others, INDEX_NAME)}
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, set[str]] = {}
    for name in names:
        found, shard_metadata = read_header(root / name)
        for key, value in shard_metadata.items():
            metadata.setdefault(key, set()).add(value)
        if weight_map is not None:
            _check_against_index(root / name, {tensor.name for tensor in found}, weight_map)
        tensors.update({tensor.name: tensor for tensor in found})
    config = root / "config.json"
    return Checkpoint(
        root,
        # transformers writes Infinity into some, and nothing of a config is written here.
        read_json(config, finite=False) if config.is_file() else None,
        tensors,
        tuple(root / name for name in names),
        {key: next(iter(values)) for key, values in metadata.items() if len(values) == 1},
        index_metadata,
        others,
        stamps,
        tuple(sorted(key for key, values in metadata.items() if len(values) > 1)),
    )


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Raise BrokenCheckpointError where a file was written to, or came to be, since the folder was opened."""
    changed = [path.name for path, stamp in checkpoint.stamps.items() if _stamp(path) != stamp]
    now = _other_files(checkpoint.folder, [path.name for path in checkpoint.files])
    changed += [path.as_posix() for path in now if checkpoint.folder / path not in checkpoint.stamps]
    if changed:
        raise BrokenCheckpointError(
            f"{checkpoint.folder}: {some(changed)} changed while being read; convert again when nothing writes to it"
        )


def _read_index(root: Path) -> tuple[dict[str, str] | None, dict[str, Any]]:
    path = root / INDEX_NAME
    if not path.is_file():
        if (root / SINGLE_NAME).is_file():
            return None, {}
        raise no_weights(root)
    index = read_json(path, finite=True)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenCheckpointError(
            f"{path}: expected a weight_map of tensor names to files, found {type(weight_map).__name__}; fetch it again"
        )
    bad = [f"{key}: {shortened(name)}" for key, name in weight_map.items() if not _is_file_name(name)]
    if bad:
        raise BrokenCheckpointError(
            f"{path}: expected names of files in the same folder, found {some(bad)}; fetch it again"
        )
    for name in (*weight_map, *set(weight_map.values())):
        check_name(path, name)
    metadata = index.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise BrokenCheckpointError(
            f"{path}: expected metadata to be an object, found {shortened(metadata)}; mend the index"
        )
    return weight_map, metadata or {}


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value and value not in ("", "..")


def _check_listing(root: Path, names: list[str]) -> None:
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise BrokenCheckpointError(
            f"{root}: expected {len(names)} shards, {len(missing)} missing: {some(missing)}; fetch them again"
        )
    # Of a file with another name, extras.py says whether it is the model's.
    strays = sorted(
        name
        for name in {p.name for p in root.iterdir()} - set(names)
        if name == SINGLE_NAME or SHARD_NAME.fullmatch(name)
    )
    if strays:
        raise BrokenCheckpointError(
            f"{root}: expected the index to name every shard, found others: {some(strays)}; "
            "remove what does not belong to the checkpoint, or mend the index"
        )


def _check_against_index(shard: Path, found: set[str], weight_map: Mapping[str, str]) -> None:
    said = {key for key, name in weight_map.items() if name == shard.name}
    problems = []
    if said - found:
        problems.append(f"said to be in it but not there: {some(sorted(said - found))}")
    if found - said:
        problems.append(f"in it but not said to be: {some(sorted(found - said))}")
    if problems:
        raise BrokenCheckpointError(
            f"{shard}: expected the tensors that {INDEX_NAME} lists for it, but the index lies: {'; '.join(problems)}; "
            "fetch both again, from one revision, or mend the index"
        )


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return _NO_FILE
    return status.st_size, status.st_mtime_ns


def _other_files(root: Path, shards: Collection[str]) -> tuple[Path, ...]:
    """Files that are neither shards nor their index, relative to ``root``."""
    named = {*shards, INDEX_NAME}
    return tuple(path for path in _walk(root) if path.as_posix() not in named)


def _walk(root: Path) -> Iterator[Path]:
    """Files below ``root`` relative to it, through links; the files of a folder come before those below it.

    Not os.walk, which leaves out folders that it cannot read, and says nothing.
    """
    waiting, num_folders = [(Path(), _around(root))], 0
    while waiting:
        num_folders += 1
        if num_folders > MOST_FOLDERS:
            raise BrokenCheckpointError(
                f"{root}: expected at most {MOST_FOLDERS} folders below it, found more; remove what does not belong to "
                "the checkpoint, links to folders first"
            )
        here, around = waiting.pop()
        with os.scandir(root / here) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        folders = [entry for entry in entries if entry.is_dir()]
        for name in (entry.name for entry in entries if not entry.is_dir()):
            _check_file(root / here / name)
            yield here / name
        for entry in reversed(folders):
            path = here / entry.name
            if path.as_posix() not in NOT_COPIED:
                waiting.append((path, _step_into(root / path, len(path.parts), around, linked=entry.is_symlink())))


def _check_file(path: Path) -> None:
    if not os.path.isfile(path):
        raise BrokenCheckpointError(
            f"{path}: expected a file, found a dangling link or a device; remove it, or fetch the file that it stands "
            "for"
        )
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _step_into(folder: Path, num_levels: int, around: frozenset[Identity], *, linked: bool) -> frozenset[Identity]:
    """``folder`` and the folders ``around`` it, for a walk that goes on there. Raises where it must not."""
    if num_levels > DEEPEST:
        raise BrokenCheckpointError(
            f"{folder}: expected at most {DEEPEST} folders in each other, found more; remove what does not belong "
            "to the checkpoint, or give a folder without it"
        )
    identity = _identity(folder)
    if identity in around:
        raise BrokenCheckpointError(f"{folder}: a link to a folder around it; remove it")
    return around | {identity} | (_around(folder) if linked else frozenset())


def _around(folder: Path) -> frozenset[Identity]:
    """``folder`` and all that it lies in, where links lead; but for what cannot be seen, as no walk goes there."""
    found = set()
    real = Path(os.path.realpath(folder))
    for path in (real, *real.parents):
        with contextlib.suppress(OSError):
            found.add(_identity(path))
    return frozenset(found)


def _identity(folder: Path) -> Identity:
    """Device and inode: a mount is a loop too where it shows a folder around it."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino
