"""Tensor and sequence parallelism, alone and with FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
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
from .models import DEPTH, Stack
from .world import Rank


def tensor_parallel(mesh: Any) -> nn.Module:
    """Projections cut across the ranks; everything between the layers is whole."""
    model = Stack()
    columns = ("attention.q", "attention.k", "attention.v", "mlp.up")
    for layer in model.layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan.update({name: RowwiseParallel() for name in ("attention.out", "mlp.down")})
        parallelize_module(layer, mesh, plan)
    return model


def sequence_parallel(mesh: Any, depth: int = DEPTH, *, dtensors: bool = False) -> nn.Module:
    """As tensor_parallel, and between the projections each rank has its part of the sequence. ``dtensors``: so that
    layers take and return DTensors."""
    model = Stack(depth)
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


def layers_compiled(model: nn.Module, options: Any) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        if options is not None:
            layer.compile(backend="fxoffload", options=options)
    return model


def compiled(model: nn.Module, options: Any) -> Any:
    return model if options is None else torch.compile(model, backend="fxoffload", options=options)


def tensor_layers(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    return rank.flip(lambda options: layers_compiled(tensor_parallel(mesh), options), x)


def tensor_planned(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    return rank.follow(lambda options: layers_compiled(tensor_parallel(mesh), options), x, budget=121_000)


def sequence_whole(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    return rank.flip(lambda options: compiled(sequence_parallel(mesh), options), x)


def sequence_whole_planned(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    return rank.plan_graphs(lambda options: compiled(sequence_parallel(mesh, 2), options), x)


def sequence_dtensors(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    return rank.flip(lambda options: layers_compiled(sequence_parallel(mesh, dtensors=True), options), x)


def sequence_dtensors_planned(rank: Rank) -> Found:
    mesh, x = rank.mesh(), rank.input(everywhere=True)
    return rank.follow(
        lambda options: layers_compiled(sequence_parallel(mesh, dtensors=True), options), x, budget=124_000
    )


# -- with FSDP2, on four ranks -----------------------------------------------------------------------------------------


def _on_mesh(mesh: Any, options: Any) -> nn.Module:
    model = layers_compiled(sequence_parallel(mesh["tensor"]), options)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def _mesh_and_input(rank: Rank) -> tuple[Any, Tensor]:
    mesh = rank.mesh(2, 2, names=("data", "tensor"))
    return mesh, rank.input(mesh["data"].get_local_rank(), everywhere=True)


def mesh_layers(rank: Rank) -> Found:
    mesh, x = _mesh_and_input(rank)
    return rank.flip(lambda options: _on_mesh(mesh, options), x)


def mesh_planned(rank: Rank) -> Found:
    mesh, x = _mesh_and_input(rank)
    return rank.follow(lambda options: _on_mesh(mesh, options), x, budget=100_000)
