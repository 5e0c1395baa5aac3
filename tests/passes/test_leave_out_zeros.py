"""Inputs that are zeros are left out of a segment: results stay, and adds go where nothing tells them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from fxoffload.passes.leave_out_zeros import LeaveOutZeros, can_be_left_out
from tests.capture import Sketch

aten = torch.ops.aten
SIZES = (4, 6)


def inputs_of(gm: fx.GraphModule, zeros: tuple[int, ...]) -> list[Tensor]:
    found = []
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta["val"]
        values = torch.arange(value.numel(), dtype=value.dtype).view(value.shape) + i + 1
        like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        found.append(like.zero_() if i in zeros else like.copy_(values))
    return found


def left_out(gm: fx.GraphModule, *positions: int) -> int:
    """What the pass returns. Results are those with zeros, and lie as these."""
    inputs = inputs_of(gm, positions)
    expected = gm(*inputs)
    count = LeaveOutZeros(positions)(gm)
    gm.graph.lint()
    found = gm(*(x for i, x in enumerate(inputs) if i not in positions))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    return count


def names(gm: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def test_an_add_is_gone() -> None:
    sketch = Sketch()
    grad = sketch.op(aten.mul.Tensor, sketch.input("a", *SIZES), 2.0)
    total = sketch.op(aten.add.Tensor, sketch.input("tangent", *SIZES), grad)
    gm = sketch.module([sketch.op(aten.mul.Tensor, total, 3.0)])
    assert left_out(gm, 1) == 1
    assert names(gm) == ["aten.mul.Tensor"] * 2


def test_zeros_on_their_way_stay_zeros() -> None:
    sketch = Sketch()
    grad = sketch.op(aten.mul.Tensor, sketch.input("a", 24), 2.0)
    flat = sketch.op(aten.view.default, sketch.input("tangent", *SIZES), [24])
    total = sketch.op(aten.add.Tensor, grad, sketch.op(aten.clone.default, flat))
    gm = sketch.module([total])
    assert left_out(gm, 1) == 1
    assert names(gm) == ["aten.mul.Tensor"]


def test_two_inputs() -> None:
    sketch = Sketch()
    a, one, other = (sketch.input(n, *SIZES) for n in ("a", "one", "other"))
    both = sketch.op(aten.add.Tensor, one, other)
    total = sketch.op(aten.add.Tensor, sketch.op(aten.neg.default, a), both)
    gm = sketch.module([total, sketch.op(aten.mul.Tensor, both, 2.0)])
    # A sum of zeros alone is computed: it is rare.
    assert left_out(gm, 1, 2) == 0


def _outside(sketch: Sketch, tangent: fx.Node) -> list[fx.Node]:
    return [sketch.op(aten.add.Tensor, tangent, sketch.input("a", *SIZES))]


def _returned(sketch: Sketch, tangent: fx.Node) -> list[fx.Node]:
    grad = sketch.op(aten.mul.Tensor, sketch.input("a", *SIZES), 2.0)
    return [sketch.op(aten.add.Tensor, tangent, grad), sketch.op(aten.view.default, grad, [24])]


def _lies_otherwise(sketch: Sketch, tangent: fx.Node) -> list[fx.Node]:
    turned = sketch.op(aten.permute.default, sketch.input("a", *reversed(SIZES)), [1, 0])
    return [sketch.op(aten.add.Tensor, tangent, sketch.op(aten.mul.Tensor, turned, 2.0))]


def _wider(sketch: Sketch, tangent: fx.Node) -> list[fx.Node]:
    row = sketch.op(aten.mul.Tensor, sketch.input("a", SIZES[1]), 2.0)
    return [sketch.op(aten.add.Tensor, tangent, row)]


def _scaled(sketch: Sketch, tangent: fx.Node) -> list[fx.Node]:
    grad = sketch.op(aten.mul.Tensor, sketch.input("a", *SIZES), 2.0)
    return [sketch.op(aten.add.Tensor, tangent, grad, alpha=3)]


@pytest.mark.parametrize("case", [_outside, _returned, _lies_otherwise, _wider, _scaled])
def test_an_add_stays(case: Callable[[Sketch, fx.Node], list[fx.Node]]) -> None:
    """Its result is memory of its own, of another form, or not the other operand."""
    sketch = Sketch()
    tangent = sketch.input("tangent", *SIZES)
    gm = sketch.module(case(sketch, tangent))
    assert left_out(gm, 0) == 0
    assert "aten.add.Tensor" in names(gm)


def test_an_operand_is_returned_once() -> None:
    """The second add would return the same memory again."""
    sketch = Sketch()
    grad = sketch.op(aten.mul.Tensor, sketch.input("a", *SIZES), 2.0)
    sums = [sketch.op(aten.add.Tensor, sketch.input(f"tangent_{i}", *SIZES), grad) for i in range(2)]
    gm = sketch.module(sums)
    assert left_out(gm, 1, 2) == 1


def test_zeros_that_lie_across() -> None:
    """The layout of the result says that they do."""
    sketch = Sketch()
    tangent, other = sketch.input("tangent", 3, 4, 5), sketch.input("a", 2)
    tangent.meta["val"] = tangent.meta["val"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    gm = sketch.module([sketch.op(aten.mul.Tensor, tangent, 2.0), sketch.op(aten.neg.default, other)])
    assert gm.graph.find_nodes(op="placeholder")[0].meta["val"].stride() == (4, 1, 12)
    assert left_out(gm, 0) == 0


def test_what_can_be_left_out() -> None:
    assert can_be_left_out(torch.zeros(3, 4)) and can_be_left_out(torch.zeros(3, 4).t())
    assert not can_be_left_out(torch.zeros(3, 1).expand(3, 4))
    assert not can_be_left_out(torch.zeros(3, 8)[:, :4])
