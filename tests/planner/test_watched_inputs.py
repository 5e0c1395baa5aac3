"""A program that writes to a layer's input before that layer's backward, while a plan offloads it: an error, as in
eager PyTorch, whatever the inner compiler makes of the saved value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.step.choice import Choice, Windows

WIDTH = 32


class Layer(nn.Module):
    """Saves a 2-D view of its 3-D input, for the weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture(autouse=True)
def everything_is_under_way() -> Iterator[None]:
    """All that may move does, and nothing is released before the backward."""
    choose = ChainPlanning.choices

    def choices(*args: Any) -> tuple[Choice, ...]:
        found = []
        for choice in choose(*args):
            windows = choice.windows
            assert windows is not None
            wide = Windows((1 << 30,) * len(windows.in_flight), windows.ahead)
            found.append(replace(choice, offload=(True,) * len(choice.offload), windows=wide))
        return tuple(found)

    torch.compiler.reset()
    with mock.patch.object(ChainPlanning, "choices", choices):
        yield


def compiled(inner: str) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(4))
    options = {
        "inner": inner,
        "device_types": ("cpu",),
        "min_bytes": 1,
        "profile": "h200",
        "disable": ("tape_recompute",),
        "activation_budget": 60_000,
    }
    for layer in layers:
        layer.compile(backend="fxoffload", options=options)
    return layers


def step(layers: nn.ModuleList, *, write: bool = False) -> Tensor:
    layers.zero_grad()
    torch.manual_seed(5)
    x = torch.randn(4, 16, WIDTH)
    outputs = []
    for layer in layers:
        x = layer(x)
        outputs.append(x)
    if write:
        with torch.no_grad():
            outputs[0].mul_(3)
    x.sum().backward()
    gradient = layers[1].up.weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Tensor)
    return gradient.clone()


@pytest.mark.slow_except("aot_eager")
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_write_before_the_backward_is_an_error_and_the_next_step_is_right(inner: str) -> None:
    layers = compiled(inner)
    with fxoffload.override_policy("keep_all"):
        expected = step(layers)
    for _ in range(4):
        assert torch.equal(step(layers), expected)
    fxoffload.reset_stats()
    assert torch.equal(step(layers), expected)
    assert fxoffload.stats().bytes_reclaimed > 3 * 4 * 16 * WIDTH * 4, (
        "inputs are taken back too: nobody waited for them"
    )
    with pytest.raises(fxoffload.ModifiedInputError, match=r"shape \[64, 32\]"):
        step(layers, write=True)
    assert torch.equal(step(layers), expected)
