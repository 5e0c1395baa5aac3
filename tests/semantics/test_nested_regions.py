"""``torch.compiler.nested_compile_region``, for which torch 2.13's plain Inductor gives wrong gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from tests.support import Block

OPTIONS: dict[str, Any] = {"device_types": ("cpu",), "min_bytes": 1, "profile": "h200"}


@torch.compiler.nested_compile_region
def as_region(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


class Labelled(Block):
    """Dynamo sees a module whose forward is a region: its nodes carry the layer's name."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class PostNorm(Block):
    """Reads its input first by a product, which saves a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Several(nn.Module):
    """Returns what shares memory: with another result, which the backward needs as well, and with the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def results(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.up(x).tanh() * 2
        return y, y.sin()

    @torch.compiler.nested_compile_region
    def region(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.results(x)

    def forward(self, x: Tensor) -> Tensor:
        return _sum(self.region(x))


class Views(Several):
    """Saves views of its result, of its input and of each other."""

    def results(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.up(x).tanh() * 2
        return (
            y,
            self.up(y).sin(),
            y.transpose(0, 1).sin().transpose(0, 1),
            self.up(x.transpose(0, 1)).transpose(0, 1).cos(),
        )


class Parts(Several):
    """Saves two parts, and another view, of a value that it neither saves nor returns as a whole."""

    def results(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.up(x) + x
        a, b = y.chunk(2, dim=-1)
        return torch.cat((a.sin(), b.cos()), dim=-1), self.up(y)


def _sum(results: tuple[Tensor, ...]) -> Tensor:
    total = results[0]
    for one in results[1:]:
        total = total + one
    return total / len(results)


class Net(nn.Module):
    def __init__(self, block: type[Block], calls: bool = True, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block(64) for _ in range(layers))
        self.head = nn.Linear(64, 64)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = as_region(layer, x) if self.calls else layer(x)
        return self.head(x)


def gradients(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    call(x).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def check(model: nn.Module, x: Tensor, expected: list[Tensor], inner: str) -> None:
    """Near eager's gradients under every policy; and offloading changes no bit."""
    found = {}
    for policy in ("keep_all", "offload_all", "auto"):
        torch.compiler.reset()
        call = torch.compile(model, backend="fxoffload", options={**OPTIONS, "policy": policy, "inner": inner})
        found[policy] = gradients(model, call, x)
        for one, right in zip(found[policy], expected, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-3, atol=1e-3)
    assert fxoffload.stats().bytes_offloaded > 0
    assert all(torch.equal(a, b) for a, b in zip(found["keep_all"], found["offload_all"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "inner"),
    [
        pytest.param(Block, "inductor", marks=pytest.mark.inductor),
        pytest.param(PostNorm, "inductor", marks=[pytest.mark.inductor, pytest.mark.slow]),
        pytest.param(Labelled, "inductor", marks=[pytest.mark.inductor, pytest.mark.slow]),
        (PostNorm, "aot_eager"),
        (Labelled, "aot_eager"),
    ],
)
def test_torch_2_13_nested_regions_have_the_right_gradients(block: type[Block], inner: str) -> None:
    model, x = Net(block, calls=block is not Labelled), torch.randn(4, 32, 64)  # as large as a weight
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain.head(_through(plain.layers, x))
    expected = gradients(plain, plain, x)
    check(model, x, expected, inner)


@pytest.mark.slow_except("Parts-aot_eager")
@pytest.mark.parametrize(
    ("block", "inner"),
    [
        pytest.param(Several, "inductor", marks=pytest.mark.inductor),
        pytest.param(Views, "inductor", marks=[pytest.mark.inductor, pytest.mark.slow]),
        pytest.param(Parts, "inductor", marks=[pytest.mark.inductor, pytest.mark.slow]),
        (Views, "aot_eager"),
        (Parts, "aot_eager"),
    ],
)
def test_torch_2_13_regions_that_return_shared_memory(block: type[Several], inner: str) -> None:
    model, x = Net(block, calls=False, layers=2), torch.randn(4, 8, 64)  # type: ignore[arg-type]
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.region = layer.results  # type: ignore[union-attr]
    expected = gradients(plain, plain, x)
    check(model, x, expected, inner)


def test_layers_that_call_one_region_save_storages_of_their_own() -> None:
    model = Net(Block)
    torch.compile(model, backend="fxoffload", options={**OPTIONS, "policy": "offload_all", "inner": "aot_eager"})(
        torch.randn(4, 32, 64)
    )
    candidates = fxoffload.graphs()[-1].saved.candidates
    assert len(candidates) > 20
    assert all(len(c.nodes) == 1 for c in candidates)


def _through(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = PostNorm.forward(layer, x) if isinstance(layer, PostNorm) else Block.forward(layer, x)
    return x
