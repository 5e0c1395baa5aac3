"""The plan does not change what users may do with a graph. Plain graphs may run backwards again too, and do not
recompute from overwritten values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.compiler import planning
from tests.support import Stack, assert_close, assert_equal, batch, compiled, effects

INNERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Inductor's own CPU code adds gradients atomically; with one thread the order is fixed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    yield
    torch.set_num_threads(before)


# -- backwards that run again ------------------------------------------------------------------------------------------

PLAIN: dict[str, dict[str, Any]] = {
    "nothing worth moving": {"min_bytes": 1 << 30},
    "a budget that holds all of it": {"policy": "auto", "profile": "h200", "activation_budget": "1GiB"},
    "a plan with nothing to gain": {"policy": "auto", "profile": "h200", "max_slowdown": 0.0},
}


@pytest.mark.slow_except("nothing worth moving-inductor")
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("why", PLAIN)
def test_a_plain_graph_keeps_what_a_second_backward_reads(
    why: str, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "loss_of", lambda states: "inside")  # else it is cut, within a budget
    model = Stack(layers=3)
    module = compiled(model, inner=inner, **PLAIN[why])
    before = fxoffload.stats().num_plain_graphs

    def gradients(backward: Callable[[Tensor], None]) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        loss = module(batch()).square().mean()
        backward(loss)
        return effects(model)

    once = gradients(lambda loss: loss.backward())
    assert fxoffload.stats().num_plain_graphs > before

    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        model.zero_grad(set_to_none=True)
        loss.backward()

    assert_equal(gradients(twice), once)

    def in_parts(loss: Tensor) -> None:
        names, parameters = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(loss, parameters[:2], retain_graph=True)
        model.zero_grad(set_to_none=True)
        loss.backward()
        for name, one in zip(names, found, strict=False):
            assert torch.equal(one, once[f"grad {name}"])

    assert_equal(gradients(in_parts), once)


@pytest.mark.slow
@pytest.mark.inductor
def test_a_short_batch_may_run_backwards_again_like_a_long_one() -> None:
    """The short one's variant is plain; which batch comes is not the program's choice."""
    module = compiled(
        Stack(layers=4), dynamic=True, inner="inductor", policy="auto", profile="h200", activation_budget="120KB"
    )
    for length in (6, 64, 6, 64):
        loss = module(batch(length=length)).sum()
        loss.backward(retain_graph=True)
        loss.backward()


# -- buffers that the graph writes -------------------------------------------------------------------------------------


class Updated(nn.Module):
    """Blocks that read a buffer and write it afterwards."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        for i in range(3):
            self.register_buffer(f"level_{i}", torch.full((16,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            level = self.get_buffer(f"level_{i}")
            h = layer(x)
            if self.how == "added to":
                h = torch.sigmoid(torch.tanh(h + level))
                level.add_(0.5)
            elif self.how == "replaced":
                h = torch.sigmoid(torch.tanh(h + level))
                level.copy_(h.detach().mean((0, 1)))
            else:
                level.mul_(1.5)
                h = torch.sigmoid(torch.tanh(h + level.view(4, 4).flatten()))
                level.add_(0.5)
            x = x + h
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "inner"),
    [
        ("added to", "aot_eager"),
        ("replaced", "aot_eager"),
        ("twice", "aot_eager"),
        pytest.param("twice", "inductor", marks=[pytest.mark.inductor, pytest.mark.slow]),
        pytest.param("added to", "inductor", marks=[pytest.mark.inductor, pytest.mark.slow]),
        pytest.param("replaced", "inductor", marks=[pytest.mark.inductor, pytest.mark.slow]),
    ],
)
def test_what_was_overwritten_is_not_read_again(how: str, inner: str) -> None:
    """Plain Inductor computes the pointwise ops again from the buffer as it is then (torch 2.13)."""
    model = Updated(how)
    start = {name: value.clone() for name, value in model.named_buffers()}

    def step(call: Any) -> dict[str, Tensor]:
        for name, value in model.named_buffers():
            value.copy_(start[name])
        model.zero_grad(set_to_none=True)
        call(batch()).square().mean().backward()
        return effects(model)

    expected = step(model)
    ways: list[dict[str, Any]] = [
        {"policy": "keep_all"},
        {"policy": "offload_all"},
        {"policy": "offload_all", "recompute": "cheap"},
        {"policy": "auto", "profile": "h200"},
        {"policy": "auto", "profile": "h200", "max_slowdown": 100.0},
        {"min_bytes": 1 << 30},
    ]
    for options in ways:
        torch.compiler.reset()
        assert_close(step(compiled(model, inner=inner, **options)), expected, rtol=1e-4, atol=1e-6)
