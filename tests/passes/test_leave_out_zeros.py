"""Inputs that are zeros are left out of a segment: results stay, and adds go where nothing tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fxoffload.analysis.segmentation import Segment
from fxoffload.errors import PassError
from fxoffload.passes.cut_segments import CutSegments
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


def _outside(sketch: Sketch, tangent: fx.Node) -> list[fx.Node]:
    return [sketch.op(aten.add.Tensor, tangent, sketch.input("a", *SIZES))]


def _returned(sketch: Sketch, tangent: fx.Node) -> list[fx.Node]:
    grad = sketch.op(aten.mul.Tensor, sketch.input("a", *SIZES), 2.0)
    return [sketch.op(aten.add.Tensor, tangent, grad), sketch.op(aten.view.default, grad, [24])]


def _lies_otherwise(sketch: Sketch, tangent: fx.Node) -> list[fx.Node]:
    turned = sketch.op(aten.permute.default, sketch.input("a", *reversed(SIZES)), [1, 0])
    return [sketch.op(aten.add.Tensor, tangent, sketch.op(aten.mul.Tensor, turned, 2.0))]


def _part(sketch: Sketch, tangent: fx.Node) -> list[fx.Node]:
    """Returned, it would keep all of the larger one."""
    larger = sketch.op(aten.mul.Tensor, sketch.input("a", 10 * SIZES[0], SIZES[1]), 2.0)
    return [sketch.op(aten.add.Tensor, tangent, sketch.op(aten.slice.Tensor, larger, 0, 0, SIZES[0]))]


def _unsafe_view(sketch: Sketch, tangent: fx.Node) -> list[fx.Node]:
    grad = sketch.op(aten.mul.Tensor, sketch.input("a", *SIZES), 2.0)
    return [sketch.op(aten._unsafe_view.default, sketch.op(aten.add.Tensor, tangent, grad), [24])]


@pytest.mark.parametrize("case", [_outside, _returned, _lies_otherwise, _part, _unsafe_view])
def test_a_sum_is_a_copy(case: Callable[[Sketch, fx.Node], list[fx.Node]]) -> None:
    sketch = Sketch()
    gm = sketch.module(case(sketch, sketch.input("tangent", *SIZES)))
    assert left_out(gm, 0) == 0
    assert names(gm).count("aten.clone.default") + names(gm).count("aten.add.Scalar") == 1
    assert "aten.add.Tensor" not in names(gm)


def test_an_operand_is_returned_once() -> None:
    """The second add would return the same memory again."""
    sketch = Sketch()
    grad = sketch.op(aten.mul.Tensor, sketch.input("a", *SIZES), 2.0)
    sums = [sketch.op(aten.add.Tensor, sketch.input(f"tangent_{i}", *SIZES), grad) for i in range(2)]
    gm = sketch.module(sums)
    assert left_out(gm, 1, 2) == 1


def test_a_view_of_a_sum_is_in_memory_of_its_own() -> None:
    """The first sum is a copy; a view of it is the second one's other operand."""
    sketch = Sketch()
    x, *tangents = (sketch.input(n, *SIZES) for n in ("a", "one", "two"))
    first = sketch.op(aten.add.Tensor, tangents[0], x)
    second = sketch.op(aten.add.Tensor, tangents[1], sketch.op(aten.view.default, first, list(SIZES)))
    gm = sketch.module([first, second])
    assert left_out(gm, 1, 2) == 0


def test_what_is_no_sum_is_an_error() -> None:
    sketch = Sketch()
    gm = sketch.module([sketch.op(aten.mul.Tensor, sketch.input("tangent", *SIZES), sketch.input("a", *SIZES))])
    with pytest.raises(PassError, match="expected zeros that are added, found"):
        LeaveOutZeros([0])(gm)


# -- what can be left out ----------------------------------------------------------------------------------------------


Fn = Callable[[Tensor, Tensor], Any]
FITS: dict[str, Fn] = {
    "added": lambda t, x: t + x * 2,
    "added twice": lambda t, x: (t + x * 2, t + x * 3),
    "added as a view": lambda t, x: t.view(-1) + x.view(-1),
    "added as another type": lambda t, x: t.half() + x.half(),
    "added to something that lies across": lambda t, x: t + (x * 2).t(),
}
FAILS: dict[str, Fn] = {
    "multiplied": lambda t, x: t * x,
    "scaled": lambda t, x: torch.add(x, t, alpha=2),
    "added to a row": lambda t, x: t + x[0],
    "added to itself": lambda t, x: (t + t.neg()) * x,
    "returned": lambda t, x: (t + x, t.view(-1)),
    "and multiplied": lambda t, x: (t + x, t.neg() * x),
}


def traced(fn: Fn, *, varies: bool) -> fx.GraphModule:
    square = torch.zeros(4, 4)
    trace = make_fx(lambda t, x: tuple(pytree.tree_leaves(fn(t, x))), tracing_mode="symbolic" if varies else "fake")
    return trace(square, torch.ones(4, 4))


def tangent_of(gm: fx.GraphModule) -> tuple[int, fx.Node]:
    placeholders = enumerate(gm.graph.find_nodes(op="placeholder"))
    return next((i, n) for i, n in placeholders if isinstance(n.meta["val"], Tensor))


@pytest.mark.parametrize("varies", [False, True])
def test_only_sums_need_no_zeros(varies: bool) -> None:
    for name, fn in {**FITS, **FAILS}.items():
        gm = traced(fn, varies=varies)
        at, tangent = tangent_of(gm)
        (segment,) = CutSegments(whole=True)(gm).segments
        assert can_be_left_out(segment, tangent, [tangent]) is (name in FITS), name
        if name in FITS:
            x = torch.arange(16.0).view(4, 4)
            before = gm(torch.zeros(4, 4), x)
            LeaveOutZeros([at])(gm)
            gm.graph.lint()
            for one, other in zip(gm(x), before, strict=True):
                assert torch.equal(one, other) and one.stride() == other.stride(), name


def test_a_view_that_another_segment_reads_needs_zeros() -> None:
    gm = traced(lambda t, x: t.view(-1) + x.view(-1), varies=False)
    _, tangent = tangent_of(gm)
    view, other, total = (n for n in gm.graph.nodes if n.op == "call_function")
    first = Segment("first", "", (view, other), (tangent, other.args[0]), (view, other))
    assert not can_be_left_out(first, tangent, [tangent])
    assert can_be_left_out(Segment("second", "", (total,), (view, other), (total,)), tangent, [tangent])
