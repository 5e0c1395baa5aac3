"""The header of a safetensors file: eight bytes of length, JSON, then the tensors' bytes without gaps.

Source: https://huggingface.co/docs/safetensors (format). Headers are read and written here and not by the safetensors
library because a conversion needs the offsets: most of it is byte ranges copied from file to file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fxoffload.checkpoints.errors import BrokenCheckpointError, UnsupportedCheckpointError, shortened
from fxoffload.checkpoints.read_json import MOST_BYTES, check_name, parse_json

# Bits of one element. F4 and the F6 pair are packed: a row need not end at a byte.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
# As many as an array of numpy 1 has at most. The product of 300,000 sizes would take half a minute.
MOST_DIMENSIONS = 32


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``offset`` and ``num_bytes`` in bytes from the start of the file at ``path``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


def read_header(path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file in the order of their offsets, and its metadata.

    Raises BrokenCheckpointError where lengths, shapes, offsets and the file's size do not fit together.
    """
    size = os.stat(path).st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MOST_BYTES):
            raise BrokenCheckpointError(
                f"{path}: expected a safetensors header of at most {MOST_BYTES} bytes, found {size} bytes of "
                f"file and a header of {length}; the file is truncated or no safetensors file: fetch it again"
            )
        text = file.read(length)
    entries = parse_json(path, text)
    metadata = _metadata(path, entries.pop("__metadata__", None))
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_offsets(path, tensors, 8 + length, size)
    return tensors, metadata


def build_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON for tensors ``(name, dtype, shape)`` that follow in this order, padded to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + num_bytes_of(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def num_bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor. Raises UnsupportedCheckpointError for a dtype that is not of this list."""
    if dtype not in DTYPE_BITS:
        raise UnsupportedCheckpointError(
            f"expected one of the dtypes {', '.join(DTYPE_BITS)}, found {dtype!r}; use one of these"
        )
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def _metadata(path: Path, found: object) -> dict[str, str]:
    """The safetensors library reads no file whose metadata is anything but texts by name; nor is it passed on."""
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise BrokenCheckpointError(
            f"{path}: expected __metadata__ to be an object of texts, found {shortened(found)}; write the file again "
            "with the safetensors library"
        )
    return found


def _tensor(path: Path, name: str, entry: object, start: int) -> StoredTensor:
    check_name(path, name)
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise BrokenCheckpointError(
            f"{path}: expected dtype, shape and data_offsets of {name}, found {shortened(entry)}; the header cannot be "
            "read: fetch the file again"
        )
    shape = _whole_numbers(path, name, entry, "shape", most=MOST_DIMENSIONS)
    begin, end = _whole_numbers(path, name, entry, "data_offsets", least=2, most=2)
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise UnsupportedCheckpointError(
            f"{path}: expected {name} to be one of the dtypes {', '.join(DTYPE_BITS)}, found {shortened(dtype)}; "
            "convert a checkpoint of these"
        )
    expected = num_bytes_of(dtype, shape)
    if end - begin != expected:
        raise BrokenCheckpointError(
            f"{path}: {name} is {dtype} {list(shape)}, expected {expected} bytes, found {end - begin}; "
            "fetch the file again"
        )
    return StoredTensor(name, dtype, shape, path, start + begin, end - begin)


def _whole_numbers(
    path: Path, name: str, entry: Mapping[str, object], key: str, *, most: int, least: int = 0
) -> tuple[int, ...]:
    """Sizes and offsets as they are: 5.9 or "6" made a number would be another tensor than other readers see."""
    values = entry[key]
    if not isinstance(values, list) or not least <= len(values) <= most or not all(map(_is_size, values)):
        count = f"{most}" if least == most else f"at most {most}"
        raise BrokenCheckpointError(
            f"{path}: expected {key} of {name} to be {count} whole numbers below 2**63, found {shortened(values)}; "
            "fetch the file again"
        )
    return tuple(values)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_offsets(path: Path, tensors: Sequence[StoredTensor], start: int, size: int) -> None:
    offset = start
    for tensor in tensors:
        if tensor.offset != offset:
            raise BrokenCheckpointError(
                f"{path}: expected {tensor.name} at byte {offset}, where the tensor before it ends, found it at "
                f"{tensor.offset}; the header lies: fetch the file again"
            )
        offset += tensor.num_bytes
    if offset != size:
        word = "truncated" if size < offset else "longer than its header says"
        raise BrokenCheckpointError(
            f"{path}: expected {offset} bytes, found {size}; the file is {word}: fetch it again"
        )
