"""A step under FSDP2 whose forwards are paced: the host waits for the device, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fxoffload
from fxoffload.compiler import pacing
from tests.gpu.gpu_support import Stack, deterministic, differing, join, sleep

pytestmark = pytest.mark.gpu

WIDTH, TOKENS, DEPTH = 2048, 8192, 6
OPTIONS = {"min_bytes": 1 << 16, "profile": "h200", "max_slowdown": 0.3, "disable": ("tape_recompute",)}
DEVICE = "cuda"
STEPS = 12  # two are recorded; until the plan is settled some are measured


@pytest.fixture
def group() -> Iterator[None]:
    """One rank: reductions have a stream of their own all the same. (Of torch 2.11 gathers are copies then.)"""
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def build() -> Stack:
    torch.manual_seed(0)
    model = Stack(DEPTH, WIDTH, 16).to(DEVICE, torch.bfloat16)
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=OPTIONS)
        fully_shard(layer)
    fully_shard(model)
    return model


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Loss and gradients."""
    model.zero_grad(set_to_none=True)
    loss = model(x)
    loss.backward()
    return [loss.detach().clone(), *(p.grad.to_local().clone() for p in model.parameters())]  # type: ignore[union-attr]


def settle(model: nn.Module, x: Tensor) -> None:
    for _ in range(STEPS):
        step(model, x)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        join("fxoffload-chain-plan", "fxoffload-replan")


@pytest.mark.usefixtures("group")
def test_a_paced_step_moves_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_LEAST_MS", 0.5)  # a layer takes one or two
    monkeypatch.setattr(pacing, "_BUSY", 0.1)
    torch.compiler.reset()
    with deterministic():
        model = build()
        x = torch.randn(1, TOKENS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        settle(model, x)
        fxoffload.reset_stats()
        sleep(30.0)  # so that the host is ahead
        found = step(model, x)
        stats = fxoffload.stats()
        assert stats.bytes_offloaded > 0
        assert stats.host_paced_ms > 10
        fxoffload.reset_stats()
        with fxoffload.override_policy("keep_all"):
            kept = step(model, x)
        assert fxoffload.stats().bytes_offloaded == 0
    assert len(found) > DEPTH and differing(found, kept) == 0
