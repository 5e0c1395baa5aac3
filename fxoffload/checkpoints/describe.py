"""The description of a checkpoint: layout, family, layers, experts, dtypes, bytes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace

from fxoffload.checkpoints.check_experts import open_experts
from fxoffload.checkpoints.families import Form
from fxoffload.checkpoints.layouts import Layout, LayoutBlock, Mixed
from fxoffload.checkpoints.notes import source_notes
from fxoffload.checkpoints.slices import expert_shape


@dataclass(frozen=True)
class TowerInspection:
    """Layers of one decoder that are alike: ``prefix`` is how their keys begin, ``shape`` is [I, H] of gate.

    ``form`` is set for the fused layout.
    """

    prefix: str
    layout: Layout
    form: Form | None
    layers: tuple[int, ...]
    num_experts: int
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class Inspection:
    """A whole checkpoint. ``layout`` is "mixed" where towers differ; ``form`` is set where all are fused in one form.

    ``bytes_by_dtype`` counts every tensor. ``extra_files`` hold tensors of the model and are not in the index;
    ``foreign_weights`` are other weights, which are not converted, with the reason. ``notes`` are sentences about
    checks that could not be made and tensors that are not converted.
    """

    folder: str
    family: str
    layout: Layout | Mixed
    form: Form | None
    towers: tuple[TowerInspection, ...]
    num_shards: int
    num_tensors: int
    num_bytes: int
    bytes_by_dtype: dict[str, int]
    other_files: tuple[str, ...]
    extra_files: tuple[str, ...]
    foreign_weights: dict[str, str]
    notes: tuple[str, ...] = ()


def inspect(folder: str | os.PathLike[str], *, pattern: str | None = None) -> Inspection:
    """Read the headers of the checkpoint in ``folder`` and describe it; no tensor is read.

    ``pattern`` describes a family that is not known, as for ``convert``. Raises CheckpointError for a checkpoint that
    cannot be converted, as ``convert`` does.
    """
    experts = open_experts(folder, pattern)
    checkpoint = experts.checkpoint
    alike: dict[TowerInspection, list[LayoutBlock]] = {}
    for block in experts.blocks.values():
        dtypes = tuple(sorted({tensor.dtype for tensor in block.all_tensors()}))
        shape = expert_shape(block, "gate", "weight") or ()
        kind = TowerInspection(block.stem, block.layout, block.form, (), block.num_experts, shape, dtypes, 0)
        alike.setdefault(kind, []).append(block)
    towers = tuple(
        replace(
            kind,
            layers=tuple(sorted(block.layer for block in blocks)),
            num_bytes=sum(tensor.num_bytes for block in blocks for tensor in block.all_tensors()),
        )
        for kind, blocks in alike.items()
    )
    bytes_by_dtype: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        bytes_by_dtype[tensor.dtype] += tensor.num_bytes
    return Inspection(
        str(checkpoint.folder),
        experts.family.name,
        experts.layout,
        experts.form,
        towers,
        len(checkpoint.shards),
        len(checkpoint.tensors),
        checkpoint.num_bytes,
        dict(bytes_by_dtype.most_common()),
        tuple(path.as_posix() for path in checkpoint.other_files),
        tuple(path.name for path in checkpoint.extras),
        dict(checkpoint.foreign),
        source_notes(experts),
    )
