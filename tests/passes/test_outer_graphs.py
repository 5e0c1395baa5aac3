"""The outer graphs as text, and as programs: they run op by op, on fake tensors and on real ones."""

from __future__ import annotations

import operator
from textwrap import fill
from typing import Any

import expecttest
import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxoffload import ops
from fxoffload.ops import is_op
from tests.capture import Captured, Tower, bare_tower, capture, example_input, tiny_tower


def render(gm: fx.GraphModule) -> str:
    """One line for each op, with the values that are unpacked from it on the left and their shapes after it."""
    lines = [f"({', '.join(n.name for n in gm.graph.find_nodes(op='placeholder'))})"]
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
            continue
        taken = sorted((u.args[1], u) for u in node.users if u.target is operator.getitem)
        left = ", ".join(u.name for _, u in taken) or (node.name if node.users else "")
        name = "return" if node.op == "output" else str(node.target).removeprefix("fxoffload.").removesuffix(".default")
        args = ", ".join(map(text, node.args if node.op != "output" else node.args[0]))
        shapes = " ".join(shape(u) for _, u in taken if node.op == "call_module")
        lines.append(f"{left + ' = ' if left else ''}{name}({args}){'  # ' + shapes if shapes else ''}")
    return "\n".join(fill(line, 100, subsequent_indent="        ", break_long_words=False) for line in lines)


def text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text, value))}]"
    return str(value)


def shape(node: fx.Node) -> str:
    return "x".join(map(str, node.meta["val"].shape))


class TestSnapshots(expecttest.TestCase):
    """EXPECTTEST_ACCEPT=1 writes the new text."""

    def test_forward(self) -> None:
        self.assertExpectedInline(
            render(tiny_tower().outer_forward),
            """\
(primals_1, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, primals_8, primals_9,
        primals_10, primals_11, primals_12, primals_13, primals_14, primals_15, primals_16,
        primals_17)
view, addmm, view_1 = segment(primals_3, primals_1, primals_2)  # 32x16 32x16 4x8x16
view_copy = offload([view])
addmm_copy = offload([addmm])
release([view_copy])
getitem_1, rsqrt, view_2, addmm_1, view_4, add_3 = layers_0(view_1, primals_4, primals_5, primals_6,
        primals_7, primals_8, primals_9)  # 4x8x1 4x8x1 32x16 32x64 32x64 4x8x16
getitem_1_copy, rsqrt_copy, view_2_copy, addmm_1_copy, view_4_copy = offload([getitem_1, rsqrt,
        view_2, addmm_1, view_4])
release([addmm_copy, getitem_1_copy, rsqrt_copy, view_2_copy, addmm_1_copy, view_4_copy])
div, mul_5, view_6, addmm_3, view_8, add_7 = layers_1(add_3, primals_10, primals_11, primals_12,
        primals_13, primals_14, primals_15)  # 4x8x1 4x8x16 32x16 32x64 32x64 4x8x16
mul_5_copy, view_6_copy, addmm_3_copy, view_8_copy, div_copy = offload([mul_5, view_6, addmm_3,
        view_8, div])
release([mul_5_copy, view_6_copy, addmm_3_copy, view_8_copy, div_copy])
view_10, view_11 = segment_1(add_7, primals_16, primals_17)  # 32x16 4x8x8
view_10_copy = offload([view_10])
release([view_10_copy])
wait_offload([view_copy])
return(view_11, primals_4, primals_6, primals_8, primals_10, primals_12, primals_14, primals_16,
        view_copy, addmm_copy, getitem_1_copy, rsqrt_copy, view_2_copy, addmm_1_copy, view_4_copy,
        mul_5_copy, view_6_copy, addmm_3_copy, view_8_copy, view_10_copy, div_copy)""",
        )

    def test_backward(self) -> None:
        self.assertExpectedInline(
            render(tiny_tower().outer_backward),
            """\
(primals_4, primals_6, primals_8, primals_10, primals_12, primals_14, primals_16, view, addmm,
        getitem_1, rsqrt, view_2, addmm_1, view_4, mul_5, view_6, addmm_3, view_8, view_10, div,
        tangents_1)
reload_default = reload([view_10], cpu)
reload_default_1 = reload([mul_5, view_6, addmm_3, view_8, div], cpu)
reload_default_2 = reload([addmm, getitem_1, rsqrt, view_2, addmm_1, view_4], cpu)
reload_default_3 = reload([view], cpu)
prefetch()
view_10_value = wait_reload(reload_default)
prefetch()
mm_1, view_13, view_14 = segment(tangents_1, primals_16, view_10_value)  # 8x16 8 4x8x16
release([])
mul_5_value, view_6_value, addmm_3_value, view_8_value, div_value = wait_reload(reload_default_1)
prefetch()
mm_3, view_16, mm_5, view_19, sum_6, sum_7, add_10 = layers_1(view_14, primals_14, view_8_value,
        addmm_3_value, primals_12, view_6_value, primals_10, mul_5_value, div_value)  # 16x64 16
        64x16 64 16 16 4x8x16
addmm_value, getitem_1_value, rsqrt_value, view_2_value, addmm_1_value, view_4_value =
        wait_reload(reload_default_2)
prefetch()
mm_7, view_22, mm_9, view_25, mul_36, sum_12, sum_13 = layers_0(add_10, primals_8, view_4_value,
        addmm_1_value, primals_6, view_2_value, primals_4, addmm_value, getitem_1_value,
        rsqrt_value)  # 16x64 16 64x16 64 4x8x16 16 16
view_value = wait_reload(reload_default_3)
prefetch()
mm_10, view_28 = segment_1(add_10, mul_36, view_value)  # 16x16 16
return(mm_10, view_28, None, sum_12, sum_13, mm_9, view_25, mm_7, view_22, sum_6, sum_7, mm_5,
        view_19, mm_3, view_16, mm_1, view_13)""",
        )

    def test_forward_without_the_first_projection(self) -> None:
        """The graph input is copied at entry and waited for at the end."""
        self.assertExpectedInline(
            render(bare_tower().outer_forward),
            """\
(primals_1, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, primals_8, primals_9,
        primals_10, primals_11, primals_12, primals_13, primals_14, primals_15)
primals_3_copy = offload([primals_3])
getitem_1, rsqrt, view, addmm, view_2, addmm_1 = layers_0(primals_3, primals_1, primals_2,
        primals_4, primals_5, primals_6, primals_7)  # 4x8x1 4x8x1 32x16 32x64 32x64 32x16
getitem_1_copy, rsqrt_copy, view_copy, addmm_copy, view_2_copy, addmm_1_copy = offload([getitem_1,
        rsqrt, view, addmm, view_2, addmm_1])
getitem_3, rsqrt_1, view_4, addmm_2, view_6, add_7 = layers_1(addmm_1, primals_3, primals_8,
        primals_9, primals_10, primals_11, primals_12, primals_13)  # 4x8x1 4x8x1 32x16 32x64 32x64
        4x8x16
getitem_3_copy, rsqrt_1_copy, view_4_copy, addmm_2_copy, view_6_copy = offload([getitem_3, rsqrt_1,
        view_4, addmm_2, view_6])
release([primals_3_copy, getitem_1_copy, rsqrt_copy, view_copy, addmm_copy, view_2_copy,
        addmm_1_copy, getitem_3_copy, rsqrt_1_copy, view_4_copy, addmm_2_copy, view_6_copy])
view_8, view_9 = segment(add_7, primals_14, primals_15)  # 32x16 4x8x8
view_8_copy = offload([view_8])
release([view_8_copy])
wait_offload([primals_3_copy])
return(view_9, primals_3_copy, primals_4, primals_6, primals_8, primals_10, primals_12, primals_14,
        getitem_1_copy, rsqrt_copy, view_copy, addmm_copy, view_2_copy, addmm_1_copy,
        getitem_3_copy, rsqrt_1_copy, view_4_copy, addmm_2_copy, view_6_copy, view_8_copy)""",
        )


@pytest.mark.parametrize("find", [tiny_tower, bare_tower])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_run_op_by_op_they_compute_what_the_executor_computes(find: Any, direction: str) -> None:
    captured: Captured = find()
    place = ("forward", "backward").index(direction)
    outer = (captured.outer_forward, captured.outer_backward)[place]
    call = captured.calls[place]
    found = outer(*call.args)
    assert len(found) == len(call.results)
    for mine, theirs in zip(found, call.results, strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)
        if mine is not None:
            assert mine.stride() == theirs.stride()


def test_the_ops_really_copy() -> None:
    """What the eager forward returns for a copy is no alias of the input it was made of."""
    captured = bare_tower()
    names = [n.name for n in captured.forward.gm.graph.find_nodes(op="placeholder")]
    returned = captured.outer_forward.graph.output_node().args[0]
    place = next(i for i, v in enumerate(returned) if v.name == "primals_3_copy")
    call = captured.calls[0]
    source = call.args[names.index("primals_3")]
    found = captured.outer_forward(*call.args)[place]
    assert torch.equal(found, source)
    assert found.data_ptr() != source.data_ptr()
    assert call.results[place].data_ptr() == source.data_ptr()  # the executor kept it


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_fake_tensors_flow_through_them(direction: str) -> None:
    """Every op has a fake implementation, and it says what the inner graph says: shape, stride, dtype, device."""
    captured = tiny_tower()
    place = ("forward", "backward").index(direction)
    outer = (captured.outer_forward, captured.outer_backward)[place]
    before = {n: n.meta["val"] for n in outer.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    nodes: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(outer.graph, nodes))
    propagated = fx.GraphModule(outer, graph)

    with FakeTensorMode() as mode:
        FakeTensorProp(propagated, mode).propagate(*captured.calls[place].args)
    assert len(before) > 30
    for old, value in before.items():
        found = nodes[old].meta["val"]
        assert (found.shape, found.dtype, found.device) == (value.shape, value.dtype, value.device), old
        assert found.stride() == value.stride(), old
    for old, new in nodes.items():
        if is_op(old, ops.offload) or is_op(old, ops.wait_reload) or is_op(old, ops.reload):
            assert all(isinstance(v, torch.Tensor) for v in new.meta["val"])
            assert all(v.device.type == "cpu" for v in new.meta["val"])


def test_reloads_go_to_the_device_that_they_name() -> None:
    with FakeTensorMode():
        sources = [torch.empty(4, device="cuda"), torch.empty(3, 2, device="cuda").t()]
        copies = torch.ops.fxoffload.offload.default(sources)
        assert [c.device.type for c in copies] == ["cpu", "cpu"]
        assert copies[1].stride() == (1, 2)
        reloads = torch.ops.fxoffload.reload.default(copies, torch.device("cuda"))
        values = torch.ops.fxoffload.wait_reload.default(reloads)
        for found in (reloads, values):
            assert [v.device.type for v in found] == ["cuda", "cuda"]
            assert found[1].stride() == (1, 2)


def test_what_moves_keeps_its_layout() -> None:
    """Dense but not contiguous, expanded, and a gap between the rows."""
    base = torch.randn(4, 6)
    values = [base.t(), base[:1].expand(3, 6), base[:, :3]]
    copies = torch.ops.fxoffload.offload.default(values)
    reloads = torch.ops.fxoffload.wait_reload.default(torch.ops.fxoffload.reload.default(copies, torch.device("cpu")))
    assert [c.stride() for c in copies] == [v.stride() for v in values]
    for copied, back, value in zip(copies, reloads, values, strict=True):
        assert torch.equal(copied, value)
        assert torch.equal(back, value)
        assert back.data_ptr() not in (copied.data_ptr(), value.data_ptr())


@pytest.mark.slow
def test_dead_code_elimination_keeps_what_only_orders() -> None:
    gm = capture(Tower(2), example_input()).outer_forward
    before = len(gm.graph.nodes)
    gm.graph.eliminate_dead_code()
    assert len(gm.graph.nodes) == before
    assert {n.target for n in gm.graph.nodes if n.op == "call_function"} >= {ops.release, ops.wait_offload}


def test_they_print() -> None:
    code = tiny_tower().outer_backward.print_readable(print_output=False)
    assert "torch.ops.fxoffload.wait_reload.default(reload_default" in code
    assert "self.layers_1(" in code
