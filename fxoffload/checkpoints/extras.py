"""Finds weights outside the index: the model's, which are converted, and others.

A file such as mtp.safetensors is the model's where its tensors have the model's names, some are experts, and the index
has none of them. It stays a file of its own. All others are copied as they are, and named.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxoffload.checkpoints.errors import BrokenCheckpointError, CheckpointError, some
from fxoffload.checkpoints.expert_keys import ExpertKey, KeyReader
from fxoffload.checkpoints.families import Family
from fxoffload.checkpoints.header import StoredTensor, read_header
from fxoffload.checkpoints.index import INDEX_NAME, Checkpoint
from fxoffload.checkpoints.not_a_checkpoint import NO_WEIGHTS, PICKLES
from fxoffload.checkpoints.read_json import read_json

OTHER_FORMATS = (*PICKLES, ".gguf", ".h5", ".msgpack", ".npz", ".npy", ".onnx", ".distcp", ".nemo")
# Of other files, those are named that are larger than any tokenizer, and binary by git's rule: NUL near the beginning.
LARGE_BYTES = 16 << 20
PROBED_BYTES = 8000


def find_extras(checkpoint: Checkpoint, reader: KeyReader, family: Family) -> Checkpoint:
    """``checkpoint`` with the tensors of extra files, and with the reasons why other weights are not the model's.

    Raises BrokenCheckpointError for two that hold one tensor.
    """
    extras: dict[Path, Mapping[str, str]] = {}
    foreign: dict[str, str] = {}
    tensors = dict(checkpoint.tensors)
    indexed: dict[str, ExpertKey | None] = {}
    other_indexes = dict(_other_indexes(checkpoint))
    for path in checkpoint.other_files:
        name = path.as_posix()
        if path.suffix.lower() != ".safetensors":
            reason = _why_named(checkpoint, path)
            if reason is not None:
                foreign[name] = reason
        elif path.parent != Path():
            foreign[name] = "it is in a folder of its own"
        elif name in other_indexes:
            foreign[name] = f"{other_indexes[name]} names it, the index of another checkpoint"
        else:
            try:
                found, metadata = read_header(checkpoint.folder / path)
            except CheckpointError as error:
                foreign[name] = f"it cannot be read: {error}"
                continue
            indexed = indexed or {name: reader.read(name) for name in checkpoint.tensors}
            reason = _why_foreign(found, indexed, reader, family)
            if reason is not None:
                foreign[name] = reason
                continue
            _check_once(found, tensors)
            extras[checkpoint.folder / path] = metadata
            tensors |= {tensor.name: tensor for tensor in found}
    names = {path.name for path in extras}
    others = tuple(path for path in checkpoint.other_files if path.as_posix() not in names)
    return replace(checkpoint, tensors=tensors, other_files=others, extras=extras, foreign=foreign)


def _why_named(checkpoint: Checkpoint, path: Path) -> str | None:
    """Why a file of another format is named; None for one that holds no weights."""
    if NO_WEIGHTS.fullmatch(path.name):
        return None
    if path.name.lower().endswith(OTHER_FORMATS):
        return "it is no safetensors file"
    size, _ = checkpoint.stamps[checkpoint.folder / path]
    kind = (mimetypes.guess_type(path.name, strict=False)[0] or "").partition("/")[0]
    if size < LARGE_BYTES or kind in ("image", "audio", "video", "font"):
        return None
    with (checkpoint.folder / path).open("rb") as file:
        binary = b"\0" in file.read(PROBED_BYTES)
    return "it is a large binary file of another format, which may hold weights" if binary else None


def _why_foreign(
    found: list[StoredTensor], indexed: Mapping[str, ExpertKey | None], reader: KeyReader, family: Family
) -> str | None:
    """Why a file is not the model's; None where it is. The answer is the same in every layout of the index."""
    keys = {tensor.name: reader.read(tensor.name) for tensor in found}
    there = {_place(key) for key in indexed.values() if key is not None}
    again = [name for name, key in keys.items() if name in indexed or (key is not None and _place(key) in there)]
    if again:
        return f"it holds what the index has too ({some(again)})"
    beginnings = {name.split(".")[0] for name in indexed} | {tower.prefix.split(".")[0] for tower in family.towers}
    strangers = [name for name in keys if name.split(".")[0] not in beginnings]
    if strangers:
        return f"its tensors have other names than the model's ({some(strangers)})"
    unknown = [name for name, key in keys.items() if key is not None and key.parameter is None]
    if unknown:
        return f"it holds other than weights, biases and scales of experts ({some(unknown)})"
    return None if any(keys.values()) else "it holds no experts"


def _place(key: ExpertKey) -> tuple[str, int]:
    return key.stem, key.layer


def _check_once(found: list[StoredTensor], tensors: Mapping[str, StoredTensor]) -> None:
    for tensor in found:
        if tensor.name in tensors:
            raise BrokenCheckpointError(
                f"{tensor.path}: expected one file with {tensor.name}, found it in {tensors[tensor.name].path.name} "
                f"too; remove the file that is not the model's, or name the right one in {INDEX_NAME}"
            )


def _other_indexes(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """The files that another index in the folder names, each with the name of that index."""
    for path in checkpoint.other_files:
        if path.parent == Path() and path.name.endswith(".safetensors.index.json"):
            weight_map: Any = read_json(checkpoint.folder / path, finite=False).get("weight_map")
            if isinstance(weight_map, dict):
                yield from ((name, path.name) for name in weight_map.values() if isinstance(name, str))
