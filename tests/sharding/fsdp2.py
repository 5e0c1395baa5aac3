"""FSDP2: ``fully_shard`` of each layer and of the root."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from .launch import Found
from .models import Stack
from .world import Rank

BUDGET = 140_000  # keeping everything takes 225,024


def sharded(rank: Rank, when: str, options: Any, **how: Any) -> nn.Module:
    """A model, each layer and the root sharded. Its layers are compiled "before" or "after" they are sharded, or the
    "whole" of it is."""
    model, mesh = Stack(), how.pop("mesh", None) or rank.mesh()
    if options is None:
        when = "never"
    for layer in model.layers:
        if when == "before":
            layer.compile(backend="fxoffload", options=options)
        fully_shard(layer, mesh=mesh, **how)
        if when == "after":
            layer.compile(backend="fxoffload", options=options)
    fully_shard(model, mesh=mesh, **how)
    return torch.compile(model, backend="fxoffload", options=options) if when == "whole" else model  # type: ignore[return-value]


def _flipped(rank: Rank, when: str, **how: Any) -> Found:
    return rank.flip(functools.partial(sharded, rank, when, **how), rank.input())


def compiled_before(rank: Rank) -> Found:
    return _flipped(rank, "before")


def compiled_after(rank: Rank) -> Found:
    return _flipped(rank, "after", reshard_after_forward=False)


MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ON_HOST = CPUOffloadPolicy(pin_memory=False)


def mixed_precision(rank: Rank) -> Found:
    return _flipped(rank, "before", mp_policy=MIXED)


def parameters_on_host(rank: Rank) -> Found:
    return _flipped(rank, "before", offload_policy=ON_HOST)


def whole_model(rank: Rank) -> Found:
    return _flipped(rank, "whole")


def inductor(rank: Rank) -> Found:
    """Segments that Inductor compiles, as by default."""
    return rank.flip(functools.partial(sharded, rank, "before"), rank.input(), inner="inductor")


def planned(rank: Rank) -> Found:
    return rank.follow(functools.partial(sharded, rank, "before"), rank.input(), budget=BUDGET)


def mixed_precision_planned(rank: Rank) -> Found:
    build = functools.partial(sharded, rank, "before", mp_policy=MIXED)
    return rank.follow(build, rank.input(), budget=BUDGET // 2)


def parameters_on_host_planned(rank: Rank) -> Found:
    build = functools.partial(sharded, rank, "before", offload_policy=ON_HOST)
    return rank.follow(build, rank.input(), budget=BUDGET)


def whole_model_planned(rank: Rank) -> Found:
    """FSDP's hooks break it into a graph for each layer."""
    return rank.follow(functools.partial(sharded, rank, "whole"), rank.input(), budget=BUDGET)


def planned_as_compiled(rank: Rank) -> Found:
    build = functools.partial(sharded, rank, "after", reshard_after_forward=False)
    return rank.follow(build, rank.input(), budget=BUDGET, disable=("tape_recompute",))


# -- HSDP, on four ranks: sharded over two, replicated over two --------------------------------------------------------


def _hybrid(rank: Rank, when: str) -> Any:
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    return functools.partial(sharded, rank, when, mesh=mesh)


def hybrid_before(rank: Rank) -> Found:
    return rank.flip(_hybrid(rank, "before"), rank.input())


def hybrid_whole(rank: Rank) -> Found:
    return rank.flip(_hybrid(rank, "whole"), rank.input())


def hybrid_planned(rank: Rank) -> Found:
    return rank.follow(_hybrid(rank, "before"), rank.input(), budget=BUDGET)
