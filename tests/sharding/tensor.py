"""Tensor and sequence parallelism, alone and with FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .launch import Found
from .models import Stack
from .world import OPTIONS, Rank

COMPILED: dict[str, Any] = {"backend": "fxoffload", "options": OPTIONS}


def tensor_parallel(mesh: Any) -> nn.Module:
    """Projections cut across the ranks; everything between the layers is whole."""
    model = Stack()
    columns = ("attention.q", "attention.k", "attention.v", "mlp.up")
    for layer in model.layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan.update({name: RowwiseParallel() for name in ("attention.out", "mlp.down")})
        parallelize_module(layer, mesh, plan)
    return model


def sequence_parallel(mesh: Any, *, dtensors: bool = False) -> nn.Module:
    """As tensor_parallel, and between the projections each rank has its part of the sequence. ``dtensors``: so that
    layers take and return DTensors."""
    model = Stack()
    columns = ("attention.q", "attention.k", "attention.v", "mlp.up")
    for layer in model.layers:
        gathers = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        cut = RowwiseParallel(output_layouts=Shard(1), use_local_output=not dtensors)
        plan.update({name: cut for name in ("attention.out", "mlp.down")})
        plan.update(norm1=SequenceParallel(), norm2=SequenceParallel(), attention=gathers, mlp=gathers)
        parallelize_module(layer, mesh, plan)
    cuts = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=not dtensors
    )
    parallelize_module(
        model,
        mesh,
        {
            "layers.0": cuts,
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    return model


def layers_compiled(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(**COMPILED)
    return model


def tensor_layers(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    return rank.flip(layers_compiled(tensor_parallel(mesh)), x, tensor_parallel(mesh))


def tensor_whole(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    return rank.flip(torch.compile(tensor_parallel(mesh), **COMPILED), x, tensor_parallel(mesh))


def sequence_layers(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    return rank.flip(layers_compiled(sequence_parallel(mesh)), x, sequence_parallel(mesh))


def sequence_whole(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    return rank.flip(torch.compile(sequence_parallel(mesh), **COMPILED), x, sequence_parallel(mesh))


def sequence_dtensors(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    model, reference = (sequence_parallel(mesh, dtensors=True) for _ in range(2))
    return rank.flip(layers_compiled(model), x, reference)


def mesh_layers(rank: Rank) -> Found:
    mesh = rank.mesh(2, 2, names=("data", "tensor"))

    def build(compiled: bool) -> nn.Module:
        model = sequence_parallel(mesh["tensor"])
        for layer in model.layers:  # type: ignore[union-attr]
            if compiled:
                layer.compile(**COMPILED)
            fully_shard(layer, mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])

    x = rank.input(mesh["data"].get_local_rank(), everywhere=True)
    return rank.flip(build(True), x, build(False))
