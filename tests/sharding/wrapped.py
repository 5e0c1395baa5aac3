"""FSDP1 and DDP: modules around the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from .launch import Found
from .models import Block, Stack
from .world import OPTIONS, Rank

COMPILED: dict[str, Any] = {"backend": "fxoffload", "options": OPTIONS}
BUCKET_BYTES = 1 << 16  # a layer
CPU = torch.device("cpu")


def fsdp1(model: nn.Module, **how: Any) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=CPU, **how)


def layers_compiled(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(**COMPILED)
    return model


def fsdp1_layers(rank: Rank, use_orig_params: bool = True) -> Found:
    how = {"use_orig_params": use_orig_params}
    return rank.flip(fsdp1(layers_compiled(Stack()), **how), rank.input(), fsdp1(Stack(), **how))


def fsdp1_whole(rank: Rank, use_orig_params: bool = True) -> Found:
    how = {"use_orig_params": use_orig_params}
    return rank.flip(torch.compile(fsdp1(Stack(), **how), **COMPILED), rank.input(), fsdp1(Stack(), **how))


fsdp1_flat_layers = functools.partial(fsdp1_layers, use_orig_params=False)
fsdp1_flat_whole = functools.partial(fsdp1_whole, use_orig_params=False)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_BYTES / 2**20)


@contextlib.contextmanager
def small_buckets() -> Iterator[None]:
    """The first bucket is another size, and DDPOptimizer wants it to be no larger than the others."""
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", BUCKET_BYTES):
        yield


@small_buckets()
def ddp_of_layers(rank: Rank) -> Found:
    return rank.flip(ddp(layers_compiled(Stack())), rank.input(), ddp(Stack()))


@small_buckets()
def ddp_of_compiled(rank: Rank) -> Found:
    return rank.flip(ddp(torch.compile(Stack(), **COMPILED)), rank.input(), ddp(Stack()))


@small_buckets()
def compiled_ddp(rank: Rank) -> Found:
    """Dynamo's DDPOptimizer cuts at the buckets."""
    return rank.flip(torch.compile(ddp(Stack()), **COMPILED), rank.input(), ddp(Stack()))
