"""FSDP2: ``fully_shard`` of each layer and of the root."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from .launch import Found
from .models import Stack
from .world import OPTIONS, Rank


def sharded(rank: Rank, compiled: str = "", model: nn.Module | None = None, options: Any = None, **how: Any) -> Any:
    """A model, each layer and the root sharded; ``compiled``: "before" or "after" its layers are, or "whole"."""
    model = model or Stack()
    mesh = rank.mesh()
    chosen = {"backend": "fxoffload", "options": {**OPTIONS, **(options or {})}}
    for layer in model.layers:  # type: ignore[union-attr]
        if compiled == "before":
            layer.compile(**chosen)
        fully_shard(layer, mesh=mesh, **how)
        if compiled == "after":
            layer.compile(**chosen)
    fully_shard(model, mesh=mesh, **how)
    return torch.compile(model, **chosen) if compiled == "whole" else model


def _flipped(rank: Rank, compiled: str, **how: Any) -> Found:
    return rank.flip(sharded(rank, compiled, **how), rank.input(), sharded(rank, **how))


def compiled_before(rank: Rank) -> Found:
    return _flipped(rank, "before")


def compiled_after(rank: Rank) -> Found:
    return _flipped(rank, "after", reshard_after_forward=False)


def mixed_precision(rank: Rank) -> Found:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _flipped(rank, "before", mp_policy=policy)


def parameters_on_host(rank: Rank) -> Found:
    return _flipped(rank, "before", offload_policy=CPUOffloadPolicy(pin_memory=False))


def whole_model(rank: Rank) -> Found:
    return _flipped(rank, "whole")
