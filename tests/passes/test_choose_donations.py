from __future__ import annotations

import torch
import torch.fx as fx

from fxoffload.analysis.segmentation import Segment, Segmentation
from fxoffload.passes.choose_donations import ChooseDonations
from tests.capture import Sketch, tiny_tower

aten = torch.ops.aten


def segmentation(gm: fx.GraphModule, *starts: fx.Node) -> Segmentation:
    """Cut in front of ``starts``."""
    ops = [n for n in gm.graph.nodes if n.op == "call_function"]
    cuts = [0, *(ops.index(n) for n in starts), len(ops)]
    returned = set(gm.graph.output_node().all_input_nodes)
    segments = []
    for k in range(len(cuts) - 1):
        nodes = tuple(ops[cuts[k] : cuts[k + 1]])
        inputs = tuple(dict.fromkeys(v for n in nodes for v in n.all_input_nodes if v not in nodes))
        outputs = tuple(n for n in nodes if n in returned or any(u not in nodes for u in n.users))
        segments.append(Segment(f"s{k}", "", nodes, inputs, outputs))
    return Segmentation(tuple(segments))


def donated(gm: fx.GraphModule, cuts: Segmentation, *donatable: fx.Node) -> dict[str, list[str]]:
    chosen = ChooseDonations(cuts, donatable)(gm)
    return {s.name: [s.inputs[i].name for i in chosen[s.name]] for s in cuts.segments}


def test_the_last_reader_may_overwrite_saved_values_and_intermediates() -> None:
    sketch = Sketch()
    saved, tangent = sketch.input("saved", 4), sketch.input("tangent", 4)
    a = sketch.op(aten.mul.Tensor, tangent, saved)
    b = sketch.op(aten.mul.Tensor, a, saved)
    c = sketch.op(aten.mul.Tensor, b, a)
    gm = sketch.module([c])
    cuts = segmentation(gm, b, c)
    # s0: saved is read again; s1: saved for the last time, `a` not yet; s2: `a` and `b`.
    assert donated(gm, cuts, saved) == {"s0": [], "s1": ["saved"], "s2": ["mul_1", "mul"]}


def test_tangents_and_parameters_are_the_callers() -> None:
    sketch = Sketch()
    tangent, weight = sketch.input("tangent", 4), sketch.input("weight", 4)
    gm = sketch.module([sketch.op(aten.mul.Tensor, tangent, weight)])
    assert donated(gm, segmentation(gm)) == {"s0": []}


def test_what_is_returned_is_not_donated_nor_are_its_views() -> None:
    sketch = Sketch()
    saved, tangent = sketch.input("saved", 4), sketch.input("tangent", 4)
    grad = sketch.op(aten.mul.Tensor, tangent, saved)
    view = sketch.op(aten.view.default, grad, [2, 2])
    out = sketch.op(aten.sum.default, view)
    gm = sketch.module([out, grad])
    cuts = segmentation(gm, out)
    assert donated(gm, cuts, saved) == {"s0": ["saved"], "s1": []}  # `view` is the returned `mul`


def test_what_shares_memory_with_another_value_that_crosses_is_not_donated() -> None:
    sketch = Sketch()
    saved, tangent = sketch.input("saved", 4), sketch.input("tangent", 4)
    a = sketch.op(aten.mul.Tensor, tangent, tangent)
    view = sketch.op(aten.view.default, a, [2, 2])
    alias = sketch.op(aten.view.default, saved, [2, 2])
    b = sketch.op(aten.mul.Tensor, a, saved)
    c = sketch.op(aten.sum.default, view)
    d = sketch.op(aten.sum.default, alias)
    gm = sketch.module([b, c, d])
    cuts = segmentation(gm, b, c)
    assert donated(gm, cuts, saved) == {"s0": [], "s1": [], "s2": []}


def test_a_view_inside_one_segment_is_that_segments_own_business() -> None:
    sketch = Sketch()
    saved, tangent = sketch.input("saved", 4), sketch.input("tangent", 4)
    view = sketch.op(aten.view.default, saved, [4])
    gm = sketch.module([sketch.op(aten.mul.Tensor, tangent, view)])
    assert donated(gm, segmentation(gm), saved) == {"s0": ["saved"]}


def test_views_of_what_the_caller_owns_are_the_callers() -> None:
    sketch = Sketch()
    tangent = sketch.input("tangent", 4)
    view = sketch.op(aten.view.default, tangent, [2, 2])
    out = sketch.op(aten.sin.default, view)
    gm = sketch.module([out])
    assert donated(gm, segmentation(gm, out)) == {"s0": [], "s1": []}


def test_sizes_are_not_donated() -> None:
    sketch = Sketch()
    size = sketch.graph.placeholder("size")
    size.meta["val"] = 3
    gm = sketch.module([sketch.op(aten.mul.Scalar, sketch.input("x", 4), size)])
    assert donated(gm, segmentation(gm), size) == {"s0": []}


def test_every_saved_activation_of_a_real_backward_is_donated_once() -> None:
    state = tiny_tower().backward
    copies = [n for n in state.gm.graph.find_nodes(op="placeholder") if n.name in state.copies]
    chosen = ChooseDonations(state.segmentation, copies)(state.gm)
    taken = [s.inputs[i] for s in state.segmentation.segments for i in chosen[s.name]]
    assert len(taken) == len(set(taken))
    assert set(copies) <= set(taken)
    tangents = [n for n in state.gm.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]
    assert not set(taken) & set(tangents)
