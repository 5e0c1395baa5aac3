"""Inputs that are zeros are left out of a segment: results stay, and adds go where nothing tells them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

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
    """What the pass returns. Results are those with zeros, and lie as these. None is in an input's memory."""
    inputs = inputs_of(gm, positions)
    expected = gm(*inputs)
    count = LeaveOutZeros(positions)(gm)
    gm.graph.lint()
    given = [x for i, x in enumerate(inputs) if i not in positions]
    found = gm(*given)
    places = {t.data_ptr() for t in given}
    for one, other in zip(found, expected, strict=True):
        assert one.data_ptr() not in places
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


def test_a_sum_of_zeros() -> None:
    sketch = Sketch()
    a, one, other = (sketch.input(n, *SIZES) for n in ("a", "one", "other"))
    both = sketch.op(aten.add.Tensor, one, other)
    total = sketch.op(aten.add.Tensor, sketch.op(aten.neg.default, a), both)
    gm = sketch.module([total, sketch.op(aten.mul.Tensor, both, 2.0)])
    assert left_out(gm, 1, 2) == 1
    assert "aten.full.default" in names(gm)


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


@pytest.mark.parametrize("case", [_outside, _returned, _lies_otherwise])
def test_a_sum_is_a_copy(case: Callable[[Sketch, fx.Node], list[fx.Node]]) -> None:
    sketch = Sketch()
    gm = sketch.module(case(sketch, sketch.input("tangent", *SIZES)))
    assert left_out(gm, 0) == 0
    assert "aten.clone.default" in names(gm) and "aten.add.Tensor" not in names(gm)


@pytest.mark.parametrize("case", [_wider, _scaled])
def test_an_op_reads_a_constant(case: Callable[[Sketch, fx.Node], list[fx.Node]]) -> None:
    sketch = Sketch()
    gm = sketch.module(case(sketch, sketch.input("tangent", *SIZES)))
    assert left_out(gm, 0) == 0
    assert {"aten.full.default", "aten.add.Tensor"} <= set(names(gm))


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


def _sum(tangent: Tensor, *, varies: bool, fn: Callable[[Tensor, Tensor], Tensor] = torch.add) -> fx.Node:
    """The tangent in a graph of ``fn``, whose sizes vary or do not."""
    gm = make_fx(fn, tracing_mode="symbolic" if varies else "fake")(tangent, torch.zeros(tangent.shape))
    return gm.graph.find_nodes(op="placeholder")[0]


def test_what_can_be_left_out() -> None:
    for tangent, fits in {
        torch.zeros(3, 4): True,
        torch.zeros(3, 4).t(): True,
        torch.zeros(3, 1).expand(3, 4): True,  # it is only added
    }.items():
        assert can_be_left_out(_sum(tangent, varies=False)) is fits
    assert not can_be_left_out(_sum(torch.zeros(3, 1).expand(3, 4), varies=False, fn=torch.mul))
    assert can_be_left_out(_sum(torch.zeros(3, 4), varies=False, fn=torch.mul))
    # Where sizes vary there are no constants.
    assert can_be_left_out(_sum(torch.zeros(3, 4), varies=True))
    assert can_be_left_out(_sum(torch.zeros(3, 4), varies=True, fn=lambda t, x: t.view(x.shape).neg() + x))
    assert not can_be_left_out(_sum(torch.zeros(3, 4), varies=True, fn=torch.mul))
    assert not can_be_left_out(_sum(torch.zeros(3, 4), varies=True, fn=lambda t, x: (t + x, t)))  # type: ignore[arg-type]


def test_sizes_that_vary() -> None:
    trace = make_fx(lambda t, x: (t + x * 2, t.view(-1) + x.view(-1)), tracing_mode="symbolic")
    gm = trace(torch.zeros(4, 5), torch.ones(4, 5))
    at = next(i for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if isinstance(n.meta["val"], Tensor))
    LeaveOutZeros([at])(gm)
    gm.graph.lint()
    assert "aten.add.Tensor" not in names(gm)
    x = torch.arange(12.0).view(3, 4)
    first, second = gm(x)
    assert torch.equal(first, 2 * x) and torch.equal(second, x.view(-1)) and second.data_ptr() != x.data_ptr()
