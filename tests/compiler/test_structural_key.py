from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx as fx

from fxoffload.analysis.segmentation import Segment
from fxoffload.compiler.segments import extract_segment
from fxoffload.compiler.structural_key import structural_key
from tests.capture import Captured, Sketch, Tower, capture, tiny_tower

aten = torch.ops.aten


def one_op(target: Any, *args: Any, shape: tuple[int, ...] = (4, 6), **kwargs: Any) -> fx.GraphModule:
    sketch = Sketch()
    return sketch.module([sketch.op(target, sketch.input("x", *shape), *args, **kwargs)])


def same(one: fx.GraphModule, two: fx.GraphModule) -> bool:
    keys = structural_key(one, ()), structural_key(two, ())
    assert (keys[0] == keys[1]) == ({keys[0]: 1}.get(keys[1]) == 1), "equality and hash disagree"
    return keys[0] == keys[1]


def segments_of(captured: Captured, direction: str) -> list[tuple[str, fx.GraphModule]]:
    state = getattr(captured, direction)
    return [(s.layer, extract_segment(state.gm, s, ())) for s in state.segmentation.segments]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_identical_layers_are_equal_and_others_are_not(direction: str) -> None:
    found = segments_of(tiny_tower(8), direction)
    layers = [gm for layer, gm in found if layer]
    others = [gm for layer, gm in found if not layer]
    inner = layers[1:-1]  # the first and the last may save other values
    assert len(inner) == 6
    assert all(same(inner[0], gm) for gm in inner[1:])
    assert not any(same(inner[0], gm) for gm in others)


def test_names_do_not_enter() -> None:
    one = one_op(aten.sin.default)
    two = one_op(aten.sin.default)
    for node in two.graph.nodes:
        node.name = f"{node.name}_of_another_layer"
    assert same(one, two)


DIFFERENT: dict[str, tuple[Callable[[], fx.GraphModule], Callable[[], fx.GraphModule]]] = {
    "op": (lambda: one_op(aten.sin.default), lambda: one_op(aten.cos.default)),
    "overload": (lambda: one_op(aten.add.Scalar, 2), lambda: one_op(aten.sub.Scalar, 2)),
    "constant": (lambda: one_op(aten.add.Scalar, 2), lambda: one_op(aten.add.Scalar, 3)),
    "zero and minus zero": (lambda: one_op(aten.add.Scalar, 0.0), lambda: one_op(aten.add.Scalar, -0.0)),
    "int and float": (lambda: one_op(aten.mul.Scalar, 1), lambda: one_op(aten.mul.Scalar, 1.0)),
    "int and bool": (lambda: one_op(aten.mul.Scalar, 1), lambda: one_op(aten.mul.Scalar, True)),
    "none and zero": (lambda: one_op(aten.clamp.default, None, 1), lambda: one_op(aten.clamp.default, 0, 1)),
    "list": (lambda: one_op(aten.permute.default, [1, 0]), lambda: one_op(aten.permute.default, [0, 1])),
    "keyword": (lambda: one_op(aten.sum.dim_IntList, [0], keepdim=True), lambda: one_op(aten.sum.dim_IntList, [0])),
    "dtype": (lambda: one_op(aten.to.dtype, torch.float16), lambda: one_op(aten.to.dtype, torch.bfloat16)),
    "shape": (lambda: one_op(aten.sin.default), lambda: one_op(aten.sin.default, shape=(6, 4))),
    "rank": (lambda: one_op(aten.sin.default), lambda: one_op(aten.sin.default, shape=(24,))),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs(what: str) -> None:
    one, two = DIFFERENT[what]
    assert same(one(), one())
    assert not same(one(), two())


def test_nan_equals_itself() -> None:
    assert same(one_op(aten.add.Scalar, float("nan")), one_op(aten.add.Scalar, float("nan")))


def relayout(change: Callable[[torch.Tensor], torch.Tensor]) -> fx.GraphModule:
    """``sin`` whose input has been replaced by another of the same shape."""
    gm = one_op(aten.sin.default)
    (x,) = gm.graph.find_nodes(op="placeholder")
    with x.meta["val"].fake_mode:
        x.meta["val"] = change(x.meta["val"])
    assert x.meta["val"].shape == (4, 6)
    return gm


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strides": lambda x: x.new_empty(6, 4).t(),
    "offset": lambda x: x.new_empty(5, 6)[1:],
    "dtype": lambda x: x.to(torch.float64),
    "device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_the_layout_of_inputs_enters(what: str) -> None:
    assert same(relayout(LAYOUTS[what]), relayout(LAYOUTS[what]))
    assert not same(one_op(aten.sin.default), relayout(LAYOUTS[what]))


def test_what_is_connected_to_what_enters() -> None:
    def make(swap: bool) -> fx.GraphModule:
        sketch = Sketch()
        x, y = sketch.input("x", 4), sketch.input("y", 4)
        return sketch.module([sketch.op(aten.sub.Tensor, *((y, x) if swap else (x, y)))])

    assert same(make(False), make(False))
    assert not same(make(False), make(True))


def test_what_is_returned_enters() -> None:
    def make(both: bool) -> fx.GraphModule:
        sketch = Sketch()
        a = sketch.op(aten.sin.default, sketch.input("x", 4))
        b = sketch.op(aten.cos.default, a)
        return sketch.module([a, b] if both else [b])

    assert not same(make(False), make(True))


def test_donated_inputs_enter() -> None:
    gm = one_op(aten.sin.default)
    assert structural_key(gm, ()) != structural_key(gm, (0,))
    assert structural_key(gm, (0,)) == structural_key(gm, [0])


class Inner(torch.nn.Module):
    """A subgraph as flex attention has one: its score function."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def with_attribute(value: Any, name: str) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    attribute = graph.get_attr(name)
    graph.output((graph.call_function(operator.add, (x, attribute)),))
    return fx.GraphModule({name: value}, graph)


def test_subgraphs_enter_by_content() -> None:
    def make(factor: float, name: str) -> fx.GraphModule:
        return with_attribute(fx.symbolic_trace(Inner(factor)), name)

    assert same(make(2.0, "score_0"), make(2.0, "score_17"))
    assert not same(make(2.0, "score_0"), make(3.0, "score_0"))


def test_constants_enter_by_identity() -> None:
    """Their content is not compared: a segment takes them as inputs, so this is rare."""
    value = torch.ones(3)
    assert same(with_attribute(value, "a"), with_attribute(value, "b"))
    assert not same(with_attribute(value, "a"), with_attribute(torch.ones(3), "a"))


def test_unknown_objects_are_told_apart_and_kept_alive() -> None:
    """An address that is used again must not make two of them equal."""

    def make() -> Any:
        graph = fx.Graph()
        graph.output((graph.call_function(len, (object(),)),))
        return SimpleNamespace(graph=graph)  # no code can be made of it

    keys = [structural_key(make(), ()) for _ in range(200)]
    assert len(set(keys)) == 200


@pytest.mark.slow
def test_symbolic_sizes_enter_as_text() -> None:
    x = torch.randn(4, 8, 16)
    torch._dynamo.mark_dynamic(x, 1)
    found = segments_of(capture(Tower(4), x), "forward")
    layers = [gm for layer, gm in found if layer][1:3]
    assert same(*layers)
    assert "s" in repr(structural_key(layers[0], ())[1:])
    # Another size in the same place is another key.
    static = [gm for layer, gm in segments_of(tiny_tower(4), "forward") if layer][1]
    assert not same(layers[0], static)


def test_extraction_keeps_order_inputs_and_outputs() -> None:
    state = tiny_tower().forward
    segment: Segment = state.segmentation.segments[1]
    gm = extract_segment(state.gm, segment, (1,))
    gm.graph.lint()
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    assert names == [("donated_1" if i == 1 else f"arg_{i}") for i in range(len(segment.inputs))]
    ops = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert ops == [n.target for n in segment.nodes]
    output = gm.graph.output_node()
    assert output.meta["user_visible_output_idxs"] == list(range(len(segment.outputs)))
    assert [n.name for n in output.args[0]] == [n.name for n in segment.outputs]  # type: ignore[union-attr]
    for mine, theirs in zip(gm.graph.find_nodes(op="placeholder"), segment.inputs, strict=True):
        assert mine.meta["val"] is theirs.meta["val"]
