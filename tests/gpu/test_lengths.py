"""Batches of changing length on a GPU: few compilations, and no memory that grows after the longest was seen."""

from __future__ import annotations

import os
import random
import threading

import psutil
import pytest
import torch
from torch import Tensor, nn

import fxoffload
from tests.gpu.gpu_support import MIB, Block, deterministic, differing, gradients

pytestmark = pytest.mark.gpu

WIDTH, DEPTH, STEPS = 1024, 6, 200
LONGEST, SHORTEST = 16_384, 1_024
# Lengths that are seen before memory must not grow any more.
WARM_UP = 24


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, 8) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def batch(length: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(length)
    x = torch.randn(1, length, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
    return x.requires_grad_()


def run_plain_inductor(lengths: list[int]) -> None:
    """Lets torch's own caches of every length (attention's plans, matmul's choices) be filled before we count."""
    torch.compiler.reset()
    model = Stack().to("cuda", torch.bfloat16)
    for layer in model.layers:
        layer.compile(dynamic=True)
    for length in lengths:
        model.zero_grad(set_to_none=True)
        model(batch(length)).backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize("how", ["layers", "whole"])
def test_two_hundred_lengths(how: str) -> None:
    generator = random.Random(0)
    lengths = [LONGEST, *(generator.randint(SHORTEST, LONGEST) for _ in range(STEPS))]
    lengths[1:4] = [LONGEST] * 3  # a plan over several graphs is made of steps of one length
    if how == "layers":  # on torch 2.11 every new length makes a process with plain Inductor grow by about 3.4 MiB
        run_plain_inductor(lengths)
    torch.compiler.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    compiled_before = graphs["unique_graphs"]
    torch.manual_seed(0)
    model = Stack().to("cuda", torch.bfloat16)
    options = {"min_bytes": 1 << 16, "profile": "h200", "activation_budget": 700 * MIB}
    call: nn.Module = model
    if how == "layers":
        for layer in model.layers:
            layer.compile(backend="fxoffload", dynamic=True, options=options)
    else:
        call = torch.compile(model, backend="fxoffload", dynamic=True, options=options)  # type: ignore[assignment]
    process = psutil.Process(os.getpid())
    grown = (0, 0, 0)
    for i, length in enumerate(lengths):
        for thread in threading.enumerate():
            if thread.name == "fxoffload-tape-plan":
                thread.join()
        model.zero_grad(set_to_none=True)
        call(batch(length)).backward()
        torch.cuda.synchronize()
        now = (torch.cuda.memory_reserved(), fxoffload.stats().host_bytes_reserved, process.memory_info().rss)
        if i == WARM_UP:
            grown = now
    assert graphs["unique_graphs"] - compiled_before <= 4
    assert now[0] <= grown[0] * 1.05, "device memory reserved"
    assert now[1] <= grown[1], "host memory of the arena"
    rss = now[2] - grown[2]

    # A short batch that fits moves nothing; a long one does, with the gradients of keeping.
    with deterministic():
        for length, moves in ((SHORTEST, False), (LONGEST, True)):
            x = batch(length)
            fxoffload.reset_stats()
            found = gradients(model, lambda x=x: call(x))
            assert (fxoffload.stats().bytes_offloaded > 0) is moves, length
            with fxoffload.override_policy("keep_all"):
                assert differing(found, gradients(model, lambda x=x: call(x))) == 0
    if how == "layers":
        assert rss <= 256 * MIB, f"the process grew by {rss / MIB:.0f} MiB over {STEPS - WARM_UP} steps"
