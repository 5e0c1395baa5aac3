"""FSDP1 and DDP: modules around the model."""

from __future__ import annotations

import contextlib
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
from .world import Rank

BUCKET_BYTES = 1 << 16  # a layer
CPU = torch.device("cpu")


def layers_compiled(options: Any) -> nn.Module:
    model = Stack()
    for layer in model.layers:
        if options is not None:
            layer.compile(backend="fxoffload", options=options)
    return model


def compiled(model: nn.Module, options: Any) -> Any:
    return model if options is None else torch.compile(model, backend="fxoffload", options=options)


# -- FSDP1 -------------------------------------------------------------------------------------------------------------


def fsdp1(model: nn.Module, use_orig_params: bool = True) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=CPU, use_orig_params=use_orig_params)


def fsdp1_layers(rank: Rank) -> Found:
    return rank.flip(lambda options: fsdp1(layers_compiled(options)), rank.input())


def fsdp1_whole(rank: Rank) -> Found:
    return rank.flip(lambda options: compiled(fsdp1(Stack()), options), rank.input())


def fsdp1_flat(rank: Rank) -> Found:
    return rank.flip(lambda options: fsdp1(layers_compiled(options), use_orig_params=False), rank.input())


def fsdp1_planned(rank: Rank) -> Found:
    return rank.follow(lambda options: fsdp1(layers_compiled(options)), rank.input(), budget=140_000)


# -- DDP ---------------------------------------------------------------------------------------------------------------


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_BYTES / 2**20)


@contextlib.contextmanager
def small_buckets() -> Iterator[None]:
    """The first bucket is another size, and DDPOptimizer wants it to be no larger than the others."""
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", BUCKET_BYTES):
        yield


@small_buckets()
def ddp_of_layers(rank: Rank) -> Found:
    return rank.flip(lambda options: ddp(layers_compiled(options)), rank.input())


@small_buckets()
def compiled_ddp(rank: Rank) -> Found:
    """Dynamo's DDPOptimizer cuts at the buckets."""
    return rank.flip(lambda options: compiled(ddp(Stack()), options), rank.input())


@small_buckets()
def ddp_planned(rank: Rank) -> Found:
    return rank.follow(lambda options: ddp(layers_compiled(options)), rank.input(), budget=204_000)


@small_buckets()
def compiled_ddp_planned(rank: Rank) -> Found:
    return rank.plan_graphs(lambda options: compiled(ddp(Stack()), options), rank.input())
