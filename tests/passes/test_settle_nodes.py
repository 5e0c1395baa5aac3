from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxoffload.passes.settle_nodes import GLUE_KEY, SettleNodes
from tests.capture import Sketch
from tests.marks import examples

aten = torch.ops.aten


def names(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op == "call_function"]


def glued(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.meta.get(GLUE_KEY)]


def test_what_only_the_backward_needs_moves_behind_its_last_input() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 4)
    first = sketch.op(aten.sin.default, x)
    second = sketch.op(aten.mm.default, first, x)
    out = sketch.chain(second, 5)
    view = sketch.op(aten.view.default, second, [16])
    greater = sketch.op(aten.gt.Scalar, view, 0)
    both = sketch.op(aten.mul.Tensor, first, first)
    gm = sketch.module([out, view, greater, both])

    value = torch.randn(4, 4)
    before = gm(value)
    assert SettleNodes(num_user_outputs=1)(gm) == 3
    gm.graph.lint()
    # `both` moves after `first`; `view` after `mm`, and `gt` after `view`.
    assert names(gm) == ["sin", "mul", "mm", "view", "gt", "sin_1", "cos", "sin_2", "cos_1", "sin_3"]
    assert glued(gm) == ["mul", "view", "gt"]
    assert all(torch.equal(a, b) for a, b in zip(gm(value), before, strict=True))


def test_what_the_caller_sees_stays() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 4)
    first = sketch.op(aten.sin.default, x)
    out = sketch.chain(first, 3)
    late = sketch.op(aten.view.default, first, [16])
    gm = sketch.module([late, out])
    assert SettleNodes(num_user_outputs=2)(gm) == 0
    assert SettleNodes(num_user_outputs=None)(gm) == 0  # a backward: every output is seen
    assert names(gm)[-1] == "view"
    gm.graph.output_node().args = (gm.graph.output_node().args[0][::-1],)
    assert SettleNodes(num_user_outputs=1)(gm) == 1
    assert names(gm)[1] == "view"


def test_what_reads_inputs_only_stays() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    out = sketch.chain(x, 3)
    gm = sketch.module([out, sketch.op(aten.neg.default, x)])
    assert SettleNodes(1)(gm) == 0
    assert names(gm)[-1] == "neg"


def test_writes_and_random_ops_keep_their_place() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    first = sketch.op(aten.sin.default, x)
    out = sketch.chain(first, 3)
    noise = sketch.op(aten.bernoulli.p, first, 0.5)
    written = sketch.op(aten.copy_.default, x, first)
    gm = sketch.module([out, noise, written])
    assert SettleNodes(1)(gm) == 0
    assert names(gm)[-2:] == ["bernoulli", "copy_"]


def test_a_getitem_moves_behind_what_it_unpacks_in_any_graph() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 4)
    packed = sketch.op(aten.var_mean.correction, x, [1], correction=0)
    var = sketch.op(operator.getitem, packed, 0)
    out = sketch.chain(var, 3)
    mean = sketch.op(operator.getitem, packed, 1)
    gm = sketch.module([sketch.op(aten.add.Tensor, out, mean)])
    assert SettleNodes(None)(gm) == 1
    gm.graph.lint()
    assert names(gm)[:3] == ["var_mean", "getitem", "getitem_1"]
    assert glued(gm) == ["getitem", "getitem_1"]


def test_seed_lookups_move_behind_the_seeds() -> None:
    """A layer then takes its seed as an input, so that layers with dropout stay identical."""
    prims = torch.ops.prims
    sketch = Sketch()
    x = sketch.input("x", 4)
    seeds = sketch.op(prims.inductor_seeds.default, 2, torch.device("cpu"))
    out = sketch.chain(x, 3)
    late = [sketch.op(prims.inductor_lookup_seed.default, seeds, i) for i in range(2)]
    gm = sketch.module([out, *late])
    assert SettleNodes(3)(gm) == 2
    gm.graph.lint()
    assert names(gm)[:3] == ["inductor_seeds", "inductor_lookup_seed", "inductor_lookup_seed_1"]


def test_seeds_that_come_in_as_an_input_are_looked_up_at_the_top() -> None:
    prims = torch.ops.prims
    sketch = Sketch()
    seeds = sketch.input("seeds", 2, dtype=torch.int64)
    out = sketch.chain(sketch.input("x", 4), 3)
    look_up = sketch.op(prims.inductor_lookup_seed.default, seeds, 1)
    gm = sketch.module([out, look_up])
    assert SettleNodes(None)(gm) == 1
    gm.graph.lint()
    assert names(gm)[0] == "inductor_lookup_seed"
    assert not glued(gm)  # there is no op in front of it that it could be cut from


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_graph_stays_valid_and_gives_the_same_results(data: st.DataObject) -> None:
    """Ops of one or two inputs and packed ops, drawn at random; some of the results are the caller's, some saved."""
    sketch = Sketch()
    values = [sketch.input(f"x{i}", 3, 3) for i in range(2)]
    packed: list[Any] = []
    for _ in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["sin", "add", "pack", "unpack", "noise"]))
        if kind == "sin":
            values.append(sketch.op(aten.sin.default, data.draw(st.sampled_from(values))))
        elif kind == "pack":
            packed.append(sketch.op(aten.sort.default, data.draw(st.sampled_from(values))))
        elif kind == "unpack" and packed:
            values.append(sketch.op(operator.getitem, data.draw(st.sampled_from(packed)), 0))
        elif kind == "noise":
            values.append(sketch.op(aten.rand_like.default, data.draw(st.sampled_from(values))))
        else:
            one, two = (data.draw(st.sampled_from(values)) for _ in range(2))
            values.append(sketch.op(aten.add.Tensor, one, two))
    outputs = data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=6))
    gm = sketch.module(outputs)
    num_user_outputs = data.draw(st.sampled_from([None, *range(len(outputs) + 1)]))

    inputs = [torch.randn(3, 3) for _ in range(2)]
    before = run(gm, inputs)
    count = len(names(gm))
    moved = SettleNodes(num_user_outputs)(gm)
    gm.graph.lint()
    assert len(names(gm)) == count
    assert moved <= count
    assert all(torch.equal(a, b) for a, b in zip(run(gm, inputs), before, strict=True))
    assert SettleNodes(num_user_outputs)(gm) == 0, "settled nodes stay where they are"


def run(gm: fx.GraphModule, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return gm(*inputs)
