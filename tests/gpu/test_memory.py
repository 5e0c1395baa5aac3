"""What the device holds, by algebra: peaks of a stack whose saved bytes are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fxoffload
from tests.gpu.gpu_support import MIB, build, fresh_input

pytestmark = pytest.mark.gpu

DEPTH = 8
IN_FLIGHT, PREFETCH = 8 * MIB, 16 * MIB


def _peak(step: Callable[[Tensor], Tensor], x: Tensor) -> int:
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(x).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


def test_the_peak_is_what_the_algebra_says() -> None:
    model = build(DEPTH)
    step = torch.compile(
        model,
        backend="fxoffload",
        options={
            "policy": "offload_all",
            "min_bytes": 1,
            "in_flight_budget": IN_FLIGHT,
            "prefetch_budget": PREFETCH,
        },
    )
    x = fresh_input(1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2):
        step(x).backward()
    with fxoffload.override_policy("keep_all"):
        kept = _peak(step, x)
    fxoffload.reset_stats()
    offloaded = _peak(step, x)
    saved = fxoffload.stats().bytes_offloaded
    per_layer = saved / DEPTH
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())

    # Forward: values saved by one layer, plus sources still on their way, plus one layer's temporaries. Backward:
    # values that this layer reads, plus those reloaded ahead (one storage may exceed the bound), plus the gradients so
    # far, plus temporaries. One layer's temporaries are less than its saved values.
    largest = max(c.nbytes or 0 for g in fxoffload.graphs() for c in g.saved.candidates)
    forward = per_layer + IN_FLIGHT + largest + per_layer
    backward = per_layer + PREFETCH + largest + gradients + per_layer
    assert offloaded <= max(forward, backward), (offloaded, forward, backward)
    # Keeping holds every layer's saved values at the end of the forward.
    assert kept >= saved
    assert kept - offloaded >= saved - (2 * per_layer + IN_FLIGHT + PREFETCH + 2 * largest + gradients)


def test_memory_returns_between_steps() -> None:
    fxoffload.release_host_memory()
    model = build(2)
    step = torch.compile(model, backend="fxoffload", options={"policy": "offload_all", "min_bytes": 1})
    x = fresh_input(1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        step(x).backward()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    for _ in range(5):
        step(x).backward()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == base
    stats = fxoffload.stats()
    assert stats.host_bytes_in_use == 0
    assert stats.host_bytes_reserved <= 1.02 * max(stats.bytes_offloaded / 8, 1) + 2 * MIB
