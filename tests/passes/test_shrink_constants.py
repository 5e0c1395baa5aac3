"""Large constants become one element, with the same results; the others stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

import fxoffload
from fxoffload.passes.shrink_constants import ShrinkConstants
from tests.capture import Sketch, rehearsal_options

aten = torch.ops.aten
SHAPE = (4, 256, 512)  # 2 MiB in float32


def masked(value: float = 0.0, shape: tuple[int, ...] = SHAPE, **kwargs: Any) -> tuple[Sketch, fx.Node, fx.Node]:
    """A sketch, its constant, and a ``where`` that reads it, below a path."""
    sketch = Sketch()
    x = sketch.input("x", *shape)
    with sketch.mode:
        zeros = sketch.op(aten.full.default, list(shape), value, path="layers.0", **kwargs)
    return sketch, zeros, sketch.op(aten.where.self, sketch.op(aten.gt.Scalar, x, 0), zeros, x)


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def test_a_constant_is_one_element_and_results_are_equal() -> None:
    sketch, zeros, out = masked(-1.5, dtype=torch.float32, pin_memory=False)
    gm = sketch.module([out])
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    (expected,) = gm(x)
    before = zeros.meta["val"]
    assert ShrinkConstants()(gm) == 1
    gm.graph.lint()
    (found,) = gm(x)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    one = next(iter(gm.graph.find_nodes(op="call_function", target=aten.full.default)))
    (shown,) = one.users
    assert one.meta["val"].untyped_storage().nbytes() == 4 == shown.meta["val"].untyped_storage().nbytes()
    assert (shown.meta["val"].shape, shown.meta["val"].dtype) == (before.shape, before.dtype)
    assert one.meta["nn_module_stack"] == shown.meta["nn_module_stack"] != {}
    assert ShrinkConstants()(gm) == 0


def test_small_ones_stay() -> None:
    sketch, _, out = masked(shape=(4, 256, 255))
    gm = sketch.module([out])
    assert ShrinkConstants()(gm) == 0
    assert "aten.expand.default" not in targets(gm)


def test_a_constant_that_is_returned_stays() -> None:
    sketch, zeros, out = masked()
    assert ShrinkConstants()(sketch.module([out, zeros])) == 0


@pytest.mark.parametrize(
    "reader",
    [
        lambda s, zeros: s.op(aten.mm.default, s.op(aten.select.int, zeros, 0, 0), s.input("w", 512, 4)),
        lambda s, zeros: s.op(aten.view.default, zeros, [4, -1]),
        lambda s, zeros: s.op(aten.add_.Tensor, zeros, s.input("y", *SHAPE)),
        lambda s, zeros: s.op(aten.diagonal_scatter.default, zeros, s.input("d", 4, 256), 0, 1, 2),
    ],
    ids=["a view and a product", "a view", "written in place", "written in place later"],
)
def test_a_constant_that_is_not_read_element_by_element_alone_stays(reader: Any) -> None:
    sketch, zeros, out = masked()
    gm = sketch.module([out, reader(sketch, zeros)])
    before = targets(gm)
    assert ShrinkConstants()(gm) == 0
    assert targets(gm) == before


def test_a_constant_that_decides_how_a_result_lies_in_memory_stays() -> None:
    """The result lies as the constant does, which comes first; of one element, it would lie as ``x`` does."""
    sketch = Sketch()
    x = sketch.op(aten.permute.default, sketch.input("x", 512, 256, 4), [2, 1, 0])
    with sketch.mode:
        ones = sketch.op(aten.full.default, list(SHAPE), 1.0)
    out = sketch.op(aten.add.Tensor, ones, x)
    assert out.meta["val"].stride() != x.meta["val"].stride()
    gm = sketch.module([out])
    before = targets(gm)
    assert ShrinkConstants()(gm) == 0
    assert targets(gm) == before
    gm.graph.lint()


class Diagonals(nn.Module):
    """The backward writes a diagonal into zeros, which Inductor does in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() + torch.diagonal(layer(x), dim1=-2, dim2=-1).square().mean()
        return x.square().mean()


def test_zeros_that_inductor_writes_to_stay() -> None:
    torch.manual_seed(0)
    model, x = Diagonals(), torch.randn(2, 512, 512)
    found = []
    for inner in ("aot_eager", "inductor"):
        torch.compiler.reset()
        model.zero_grad()
        torch.compile(model, backend="fxoffload", options=rehearsal_options(inner=inner))(x).backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


class Attention(nn.Module):
    """Written out, as the bias requires grad: rows that are masked whole are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(self.project(x), x, x, attn_mask=bias)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(4, 256, 256))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.bias)
        return x.square().mean()


def test_no_layer_saves_a_constant() -> None:
    """Where scores are recomputed, the constant that they are masked with is read again."""
    kwargs = {"x": torch.randn(4, 256, 16)}
    least = fxoffload.plan(Stack(), kwargs).smallest_budget_bytes
    plan = fxoffload.plan(Stack(), kwargs, activation_budget=least)
    assert {d.nbytes for d in plan.decisions if "full" in d.producer} == {4}
    assert any(d.action == "recompute" and "where" in d.producer for d in plan.decisions)
