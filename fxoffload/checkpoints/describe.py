"""What a checkpoint is: layout, family, layers, experts, dtypes, bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fxoffload.checkpoints.check_experts import check_experts
from fxoffload.checkpoints.families import Form
from fxoffload.checkpoints.header import StoredTensor
from fxoffload.checkpoints.index import open_checkpoint
from fxoffload.checkpoints.layouts import Block, Layout, detect
from fxoffload.checkpoints.notes import source_notes
from fxoffload.checkpoints.slices import expert_shape


@dataclass(frozen=True)
class TowerInspection:
    """Layers of one decoder that are alike: ``prefix`` is how their keys begin, ``shape`` is [I, H] of gate."""

    prefix: str
    layers: tuple[int, ...]
    num_experts: int
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class Inspection:
    """A whole checkpoint. ``form`` is set for the fused layout; ``bytes_by_dtype`` counts every tensor.

    ``notes`` say in sentences what could not be checked.
    """

    folder: str
    family: str
    layout: Layout
    form: Form | None
    towers: tuple[TowerInspection, ...]
    num_shards: int
    num_tensors: int
    num_bytes: int
    bytes_by_dtype: dict[str, int]
    other_files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def inspect(folder: str | os.PathLike[str], *, pattern: str | None = None) -> Inspection:
    """Read the headers of the checkpoint in ``folder`` and say what it is; no tensor is read.

    ``pattern`` describes a family that is not known, as for ``convert``. Raises CheckpointError for a checkpoint that
    cannot be converted, as ``convert`` does.
    """
    experts = detect(open_checkpoint(folder), pattern)
    check_experts(experts)
    checkpoint = experts.checkpoint
    alike: dict[tuple[str, int, tuple[int, ...], tuple[str, ...]], list[Block]] = {}
    for block in experts.blocks.values():
        dtypes = tuple(sorted({tensor.dtype for tensor in block.all_tensors()}))
        shape = expert_shape(experts, block, "gate", "weight") or ()
        alike.setdefault((block.stem, block.num_experts, shape, dtypes), []).append(block)
    towers = tuple(_tower(*key, blocks) for key, blocks in alike.items())
    return Inspection(
        str(checkpoint.folder),
        experts.family.name,
        experts.layout,
        experts.form,
        towers,
        len(checkpoint.shards),
        len(checkpoint.tensors),
        checkpoint.num_bytes,
        _bytes_by_dtype(checkpoint.tensors.values()),
        tuple(path.as_posix() for path in checkpoint.other_files),
        source_notes(experts),
    )


def _tower(
    prefix: str, num_experts: int, shape: tuple[int, ...], dtypes: tuple[str, ...], blocks: list[Block]
) -> TowerInspection:
    num_bytes = sum(tensor.num_bytes for block in blocks for tensor in block.all_tensors())
    return TowerInspection(
        prefix, tuple(sorted(block.layer for block in blocks)), num_experts, shape, dtypes, num_bytes
    )


def _bytes_by_dtype(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for tensor in tensors:
        counted[tensor.dtype] += tensor.num_bytes
    return dict(counted.most_common())
