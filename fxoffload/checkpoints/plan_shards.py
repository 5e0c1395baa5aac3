"""Decide which shard holds which tensor, and the header of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fxoffload.checkpoints.header import DTYPE_BITS, build_header
from fxoffload.checkpoints.index import SINGLE_NAME
from fxoffload.checkpoints.plan_conversion import Copy, OutputTensor, Step


@dataclass(frozen=True)
class Shard:
    """A file to write: the header, then the steps, whose targets count from the start of the file."""

    name: str
    header: bytes
    tensor_names: tuple[str, ...]
    steps: tuple[Step, ...]
    num_bytes: int


def plan_shards(outputs: Sequence[OutputTensor], shard_size_bytes: int, metadata: Mapping[str, str]) -> list[Shard]:
    """Fill shards in order, none above ``shard_size_bytes`` of tensors unless one tensor is larger than that.

    Each has the source's ``metadata``, with the format "pt" where that names none.
    """
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for output in outputs:
        if groups[-1] and filled + output.num_bytes > shard_size_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(output)
        filled += output.num_bytes
    return [_shard(_name(n, len(groups)), group, with_format(metadata)) for n, group in enumerate(groups, 1)]


def plan_extras(outputs: Sequence[OutputTensor], extras: Mapping[Path, Mapping[str, str]]) -> list[Shard]:
    """A file for each of ``extras``, the source's outside the index, with the metadata that it has there.

    One whose tensors are all stacked into those of another is left out.
    """
    made = []
    for path, metadata in extras.items():
        held = [output for output in outputs if output.begins.path == path]
        if held:
            made.append(_shard(path.name, held, with_format(metadata)))
    return made


def with_format(metadata: Mapping[str, str]) -> dict[str, str]:
    """Metadata of a shard with its format, which transformers asks for: "pt" unless it says "mlx" or another."""
    return {"format": "pt", **metadata}


def build_index(shards: Sequence[Shard], outputs: Sequence[OutputTensor], metadata: Mapping[str, Any]) -> bytes | None:
    """The index's JSON, or None for a single shard, which has none by Hugging Face's convention.

    ``metadata`` is that of the source's index; ``total_size`` (bytes of all tensors) is counted anew.
    """
    if len(shards) == 1:
        return None
    weight_map = {name: shard.name for shard in shards for name in shard.tensor_names}
    total = sum(output.num_bytes for output in outputs)
    index = {"metadata": {**metadata, "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _name(number: int, count: int) -> str:
    return SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _shard(name: str, outputs: list[OutputTensor], metadata: Mapping[str, str]) -> Shard:
    # Widest dtype first, as the safetensors library writes them, so that every tensor is aligned to its elements.
    ordered = sorted(outputs, key=lambda output: -DTYPE_BITS[output.dtype])
    header = build_header([(o.name, o.dtype, o.shape) for o in ordered], metadata)
    steps: list[Step] = []
    offset = len(header)
    for output in ordered:
        for step in output.steps:
            _append(steps, replace(step, target=step.target + offset))
        offset += output.num_bytes
    return Shard(name, header, tuple(o.name for o in ordered), tuple(steps), offset)


def _append(steps: list[Step], step: Step) -> None:
    """Add a step, as part of the last one where both copy on from there in source and output."""
    last = steps[-1] if steps else None
    if (
        isinstance(step, Copy)
        and isinstance(last, Copy)
        and (last.path, last.offset + last.num_bytes, last.target + last.num_bytes)
        == (step.path, step.offset, step.target)
    ):
        steps[-1] = replace(last, num_bytes=last.num_bytes + step.num_bytes)
    else:
        steps.append(step)
