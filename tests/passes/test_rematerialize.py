from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from fxoffload.analysis.op_costs import base_of
from fxoffload.analysis.repeatable import Repeatable
from fxoffload.analysis.segmentation import Segmentation
from fxoffload.analysis.values import Storages, output_values
from fxoffload.passes.annotate_layers import AnnotateLayers
from fxoffload.passes.choose_donations import ChooseDonations
from fxoffload.passes.cut_segments import CutSegments, segments_of
from fxoffload.passes.rematerialize import REPEATS_KEY, Rematerialize
from tests.capture import Sketch, rehearsal_options

aten = torch.ops.aten
prims = torch.ops.prims


def cut(gm: fx.GraphModule, *at: fx.Node) -> Segmentation:
    """Segments that begin with these nodes, and one before."""
    ranges: list[list[fx.Node]] = [[]]
    for node in gm.graph.nodes:
        if node.op == "call_function":
            if node in at:
                ranges.append([])
            ranges[-1].append(node)
    return segments_of(gm, ranges)


def run(gm: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    return [v for v in fx.Interpreter(gm).run(*(i.clone() for i in inputs)) if isinstance(v, Tensor)]


def values_of(gm: fx.GraphModule) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(n.meta["val"].shape, dtype=torch.float32).to(n.meta["val"].dtype)
        for n in gm.graph.find_nodes(op="placeholder")
    ]


def rematerialized(gm: fx.GraphModule, before: Segmentation, moved: dict[str, int] | None = None) -> Segmentation:
    """What the pass makes of it; results, segments and fakes are checked."""
    inputs = values_of(gm)
    expected = run(gm, inputs)
    after = Rematerialize(before, moved=moved)(gm)
    gm.graph.lint()
    for a, b in zip(expected, run(gm, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert [n for s in after.segments for n in s.nodes] == [n for n in gm.graph.nodes if n.op == "call_function"]
    assert {s.name for s in after.segments} <= {s.name for s in before.segments}
    storages = Storages(gm.graph.nodes)
    for node in gm.graph.nodes:
        if REPEATS_KEY in node.meta:
            value = node.meta["val"]
            made = node.target(*fake_args(node), **node.kwargs)
            assert (value.shape, value.stride(), value.dtype) == (made.shape, made.stride(), made.dtype)
            for original in (n for n in gm.graph.nodes if n.name == node.meta[REPEATS_KEY]):
                if torch.Tag.pointwise in node.target.tags:
                    assert storages.root(node) is not storages.root(original)
    return after


def fake_args(node: fx.Node) -> tuple[object, ...]:
    return tuple(fx.map_arg(node.args, lambda n: n.meta["val"]))  # type: ignore[arg-type]


def names(nodes: tuple[fx.Node, ...]) -> list[str]:
    return [n.name for n in nodes]


class Gated:
    """``silu(gate)`` in float32, on both sides of a cut, as in the backward of a bfloat16 MLP."""

    def __init__(self) -> None:
        self.sketch = s = Sketch()
        self.gate = s.input("gate", 64, 32, dtype=torch.bfloat16)
        weight = s.input("weight", 32, 32, dtype=torch.bfloat16)
        self.wide = s.op(prims.convert_element_type.default, self.gate, torch.float32)
        silu = s.op(prims.convert_element_type.default, s.op(aten.mul.Tensor, self.wide, self.sig(s)), torch.bfloat16)
        first = s.op(aten.mm.default, silu, weight)
        self.second = s.op(aten.mm.default, first, weight)
        up = s.op(prims.convert_element_type.default, self.second, torch.float32)
        last = s.op(aten.mul.Tensor, up, self.wide)
        self.gm = s.module([s.op(aten.mm.default, last, last_weight(s, weight)), first])

    def sig(self, s: Sketch) -> fx.Node:
        self.sigmoid = s.op(aten.sigmoid.default, self.wide)
        return self.sigmoid


def last_weight(s: Sketch, weight: fx.Node) -> fx.Node:
    return s.op(prims.convert_element_type.default, weight, torch.float32)


def test_a_wide_value_is_made_again_from_the_narrow_one_that_is_there() -> None:
    made = Gated()
    before = cut(made.gm, made.second)
    assert made.wide in before.segments[1].inputs
    after = rematerialized(made.gm, before, {"gate": 64 * 32 * 2})
    first, second = after.segments
    assert made.wide not in second.inputs and made.wide not in first.outputs
    assert made.gate in second.inputs
    (again,) = [n for n in second.nodes if REPEATS_KEY in n.meta]
    assert (again.target, again.args[0]) == (made.wide.target, made.gate)
    assert again.next.name == "mul_1"  # right before it is read


def test_what_nobody_reads_any_more_is_dropped() -> None:
    sketch = Sketch()
    x = sketch.input("x", 64, 32)
    weight = sketch.input("weight", 32, 32)
    mask = sketch.op(aten.full.default, [64, 32], 0.5)
    mask = sketch.op(aten.add.Tensor, mask, 1.0)
    early = sketch.op(aten.mm.default, x, weight)
    late = sketch.op(aten.mm.default, early, weight)
    gm = sketch.module([sketch.op(aten.mul.Tensor, late, mask)])
    after = rematerialized(gm, cut(gm, late))
    assert [len(s.nodes) for s in after.segments] == [1, 4]
    assert names(after.segments[0].outputs) == ["mm"]


def test_a_segment_of_which_nothing_is_left_is_gone() -> None:
    sketch = Sketch()
    x = sketch.input("x", 64, 32)
    ones = sketch.op(aten.full.default, [64, 32], 1.0)
    total = sketch.op(aten.add.Tensor, x, ones)
    gm = sketch.module([sketch.op(aten.sum.default, total)])
    before = cut(gm, total)
    after = rematerialized(gm, before)
    assert [s.name for s in after.segments] == [before.segments[1].name]


def _random(s: Sketch, x: fx.Node) -> fx.Node:
    return s.op(aten.rand_like.default, x)


def _reduced(s: Sketch, x: fx.Node) -> fx.Node:
    return s.op(aten.expand.default, s.op(aten.sum.dim_IntList, x, [1], True), [64, 32])


def _two_that_die(s: Sketch, x: fx.Node) -> fx.Node:
    weight = s.input("more", 32, 32)
    return s.op(aten.add.Tensor, s.op(aten.mm.default, x, weight), s.op(aten.mm.default, x, weight))


def _many_ops(s: Sketch, x: fx.Node) -> fx.Node:
    return s.chain(x, 40)


@pytest.mark.parametrize("make", [_random, _two_that_die, _many_ops])
def test_what_is_not_repeated(make: Callable[[Sketch, fx.Node], fx.Node]) -> None:
    sketch = Sketch()
    x = sketch.input("x", 64, 32)
    value = make(sketch, x)
    weight = sketch.op(aten.cumsum.default, x, 0)
    late = sketch.op(aten.mul.Tensor, weight, value)
    gm = sketch.module([sketch.op(aten.cumsum.default, late, 0)])
    before = cut(gm, late)
    assert Rematerialize(before)(gm) is before
    assert not any(REPEATS_KEY in n.meta for n in gm.graph.nodes)


def test_a_reduction_is_read_and_what_is_made_of_it_repeated() -> None:
    sketch = Sketch()
    x = sketch.input("x", 64, 32)
    total = sketch.op(aten.sum.dim_IntList, x, [1], True)
    wide = sketch.op(aten.add.Tensor, sketch.op(aten.expand.default, total, [64, 32]), 1.0)
    near = sketch.op(aten.cumsum.default, wide, 0)
    late = sketch.op(aten.cumsum.default, sketch.op(aten.mul.Tensor, near, wide), 0)
    gm = sketch.module([late])
    after = rematerialized(gm, cut(gm, near.next))
    assert total in after.segments[1].inputs and wide not in after.segments[1].inputs


def test_what_is_written_to_is_not_repeated() -> None:
    sketch = Sketch()
    x = sketch.input("x", 64, 32)
    weight = sketch.op(aten.cumsum.default, x, 0)
    ones = sketch.op(aten.full.default, [64, 32], 1.0)
    sketch.op(aten.add_.Tensor, ones, weight)
    late = sketch.op(aten.mul.Tensor, weight, ones)
    gm = sketch.module([late])
    before = cut(gm, late)
    assert Rematerialize(before)(gm) is before


def test_what_is_made_of_something_that_is_written_to_is_not_repeated() -> None:
    """After the write it would be another value."""
    sketch = Sketch()
    gate = sketch.input("gate", 64, 32, dtype=torch.bfloat16)
    wide = sketch.op(prims.convert_element_type.default, gate, torch.float32)
    sketch.op(aten.copy_.default, gate, sketch.op(aten.cumsum.default, gate, 0))
    late = sketch.op(aten.cumsum.default, wide, 0)
    gm = sketch.module([late])
    before = cut(gm, late)
    assert Rematerialize(before, moved={"gate": 4096})(gm) is before


def test_a_copy_between_devices_is_not_repeated() -> None:
    sketch = Sketch()
    gate = sketch.input("gate", 64, 32, dtype=torch.bfloat16)
    wide = sketch.op(aten._to_copy.default, gate, dtype=torch.float32, device=torch.device("meta"))
    assert wide not in Repeatable(sketch.module([]), {}).cheap


def test_what_the_graph_returns_is_read_not_repeated() -> None:
    """It is in memory anyway."""
    made = Gated()
    results = output_values(made.gm.graph)
    made.gm.graph.output_node().args = ((*results, made.wide),)
    before = cut(made.gm, made.second)
    assert Rematerialize(before, moved={"gate": 64 * 32 * 2})(made.gm) is before


def test_several_segments_make_it_again_each_for_itself() -> None:
    sketch = Sketch()
    gate = sketch.input("gate", 64, 32, dtype=torch.bfloat16)
    wide = sketch.op(prims.convert_element_type.default, gate, torch.float32)
    x = sketch.op(aten.cumsum.default, wide, 0)
    starts = []
    for _ in range(3):
        starts.append(x := sketch.op(aten.cumsum.default, x, 0))
        x = sketch.op(aten.mul.Tensor, sketch.op(aten.add.Tensor, x, wide), wide)
    gm = sketch.module([sketch.op(aten.sum.default, x)])
    after = rematerialized(gm, cut(gm, *starts), {"gate": 64 * 32 * 2})
    assert [sum(REPEATS_KEY in n.meta for n in s.nodes) for s in after.segments] == [0, 1, 1, 1]
    assert all(gate in s.inputs for s in after.segments)


def crossing_bytes(gm: fx.GraphModule, found: Segmentation, moved: dict[str, int]) -> int:
    """Most bytes that are held between two segments."""
    at = {n: i for i, s in enumerate(found.segments) for n in s.nodes}
    until: dict[fx.Node, int] = {}
    for i, segment in enumerate(found.segments):
        until.update({base_of(v): i for v in segment.inputs})
    returned = {base_of(v) for v in gm.graph.output_node().all_input_nodes}

    def size(n: fx.Node) -> int:
        return moved.get(n.name, 0) if n.op == "placeholder" else n.meta["val"].nbytes

    return max(
        sum(size(v) for v, last in until.items() if v not in returned and at.get(v, -1) < i <= last)
        for i in range(1, len(found.segments))
    )


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_keep_their_results_and_hold_no_more(seed: int) -> None:
    rng = random.Random(seed)
    sketch = Sketch()
    values = [sketch.input(f"x{i}", 16, 16, dtype=rng.choice((torch.float32, torch.bfloat16))) for i in range(3)]
    moved = {"x0": values[0].meta["val"].numel() * values[0].meta["val"].element_size()}
    for _ in range(60):
        a, b = (rng.choice(values[-12:]) for _ in range(2))
        kind = rng.randrange(8)
        if kind < 2:
            values.append(sketch.op(aten.mul.Tensor, a, b))
        elif kind == 2:
            values.append(sketch.op(prims.convert_element_type.default, a, rng.choice((torch.float32, torch.bfloat16))))
        elif kind == 3:
            values.append(sketch.op(aten.view.default, a, [16, 16]))
        elif kind == 4:
            total = sketch.op(aten.sum.dim_IntList, a, [1], True)
            values.append(sketch.op(aten.expand.default, total, [16, 16]))
        elif kind == 5:
            values.append(sketch.op(aten.cumsum.default, a, 0))
        elif kind == 6:
            values.append(sketch.op(aten.tanh.default, a))
        else:
            values.append(sketch.op(aten.full.default, [16, 16], 0.5))
    gm = sketch.module(rng.sample(values[-20:], 6))
    gm.graph.eliminate_dead_code()
    ops = [n for n in gm.graph.nodes if n.op == "call_function"]
    before = cut(gm, *rng.sample(ops[1:], 3))
    held = crossing_bytes(gm, before, moved)
    after = rematerialized(gm, before, moved)
    if len(after.segments) == len(before.segments):
        assert crossing_bytes(gm, after, moved) <= held


def test_dynamic_sizes_are_not_guarded() -> None:
    """A copy's fake value has the symbolic sizes of the repeated value, and making it guards nothing."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.nn.functional.silu(self.up(x).float()).to(x.dtype))

    model = torch.nn.Sequential(*(Layer() for _ in range(4))).to(torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="fxoffload", dynamic=True, options=rehearsal_options())
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in (3, 5, 9, 17):
        compiled(torch.randn(length, 8, dtype=torch.bfloat16)).float().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_a_real_layer_holds_no_wide_copy_between_its_halves() -> None:
    """Labels and all: the backward of two gated bfloat16 layers, each cut in pieces."""
    sketch = Sketch()
    moved: dict[str, int] = {}
    x = sketch.input("x", 64, 32, dtype=torch.bfloat16)
    for i in range(2):
        weight = sketch.input(f"weight_{i}", 32, 32, dtype=torch.bfloat16)
        gate = sketch.input(f"gate_{i}", 64, 32, dtype=torch.bfloat16)
        other = sketch.input(f"other_{i}", 64, 32, dtype=torch.bfloat16)
        moved |= {gate.name: 4096, other.name: 4096}
        path = f"layers.{i}"
        wide = sketch.op(prims.convert_element_type.default, gate, torch.float32, path=path)
        silu = sketch.op(aten.mul.Tensor, wide, sketch.op(aten.sigmoid.default, wide, path=path), path=path)
        narrow = sketch.op(prims.convert_element_type.default, silu, torch.bfloat16, path=path)
        x = sketch.op(aten.mm.default, sketch.op(aten.mul.Tensor, narrow, x, path=path), weight, path=path)
        x = sketch.op(aten.mul.Tensor, x, narrow, path=path)
        x = sketch.op(aten.mm.default, x, weight, path=path)
        x = sketch.op(aten.mul.Tensor, x, other, path=path)
        x = sketch.op(aten.mm.default, x, weight, path=path)
    gm = sketch.module([x])
    AnnotateLayers()(gm)
    before = CutSegments(moved=moved, max_moved=4096)(gm)
    assert len(before.segments) > 2
    after = rematerialized(gm, before, moved)
    for segment in after.segments:
        wide_inputs = [v for v in segment.inputs if v.op == "call_function" and v.meta["val"].dtype == torch.float32]
        assert not wide_inputs


def test_checks_sizes_and_waits_are_not_had_twice() -> None:
    """They look like views of their inputs. A check has no readers, and stays; a wait is the collective's memory."""
    sketch = Sketch()
    x = sketch.input("x", 64, 32)
    total = sketch.op(aten.sum.default, x)
    is_more = sketch.op(aten.gt.Scalar, total, 0.0)
    sketch.op(aten._assert_async.msg, is_more, "expected more than 0")
    far = sketch.op(aten.cumsum.default, x, 0)
    gm = sketch.module([sketch.op(aten.where.self, is_more, far, sketch.op(aten.add.Tensor, far, total))])
    after = Rematerialize(cut(gm, far))(gm)
    assert any(REPEATS_KEY in n.meta for n in after.segments[1].nodes)
    assert any(n.target is aten._assert_async.msg for n in gm.graph.nodes)


def test_a_collective_and_its_wait_stay_together() -> None:
    import torch.distributed._functional_collectives  # registers the ops

    ops = torch.ops._c10d_functional
    sketch = Sketch()
    x, weight = sketch.input("x", 64, 32), sketch.input("weight", 32, 32)
    reduced = sketch.op(ops.all_reduce.default, sketch.op(aten.mm.default, x, weight), "sum", "0")
    waited = sketch.op(ops.wait_tensor.default, reduced)
    near = sketch.op(aten.tanh.default, waited)
    second = sketch.op(aten.mm.default, near, weight)
    both = sketch.op(aten.mul.Tensor, second, near)
    third = sketch.op(aten.cumsum.default, waited, 0)
    gm = sketch.module([sketch.op(aten.mm.default, sketch.op(aten.add.Tensor, third, both), weight)])
    after = Rematerialize(cut(gm, second, third))(gm)
    assert [n for n in gm.graph.nodes if n.target is ops.wait_tensor.default] == [waited]
    assert not any(reduced in s.inputs for s in after.segments)
    storages = Storages(gm.graph.nodes)
    assert storages.root(reduced) is storages.root(waited)  # so none of the two is donated while the other is needed
    given = ChooseDonations(after, ())(gm)
    assert waited not in {s.inputs[i] for s in after.segments[:2] for i in given[s.name]}


def test_segments_keep_their_layers() -> None:
    """However many copies of something without a layer, or of another one, they get."""
    sketch = Sketch()
    x, weight = sketch.input("x", 64, 32), sketch.input("weight", 32, 32)
    mask = sketch.chain(sketch.op(aten.full.default, [64, 32], 0.5), 14)
    starts = []
    for i in range(3):
        starts.append(x := sketch.op(aten.mm.default, x, weight, path=f"layers.{i}"))
        x = sketch.op(aten.mul.Tensor, x, mask, path=f"layers.{i}")
        x = sketch.op(aten.mm.default, x, weight, path=f"layers.{i}")
    gm = sketch.module([x])
    AnnotateLayers()(gm)
    before = cut(gm, *starts)
    layers = {s.name: s.layer for s in before.segments}
    after = Rematerialize(before)(gm)
    assert sum(REPEATS_KEY in n.meta for n in gm.graph.nodes) > 14
    assert {s.name: s.layer for s in after.segments}.items() <= layers.items()


class Counted(torch.nn.Module):
    """A number of elements that is read off a tensor, which each layer uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        count = torch.relu(k * 2 + 1)
        number = count.item()
        torch._check(number >= 0)
        for layer in self.layers:
            x = torch.tanh(layer(layer(x) + count)) + torch.ones(number).cumsum(0).sum() + number
        return x


def test_a_number_read_off_a_repeated_value() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x, k = Counted(), torch.randn(4, 16), torch.tensor(3)
    expected = torch.autograd.grad(model(x, k).sum(), list(model.parameters()))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(model, backend="fxoffload", options=rehearsal_options())
        found = torch.autograd.grad(compiled(x, k).sum(), list(model.parameters()))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)
