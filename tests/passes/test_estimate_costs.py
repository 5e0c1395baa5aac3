from __future__ import annotations

import dataclasses
import graphlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fxoffload.analysis.estimate_costs import Rates, estimate_segment
from fxoffload.analysis.kernel_fusion import Fusion
from fxoffload.analysis.op_costs import base_of, compute_dtype, is_grouped, node_kind, op_flops
from fxoffload.compiler import build
from fxoffload.machine.profile import grouped_name
from fxoffload.machine.shelf import load_profile
from fxoffload.passes.cut_segments import Segmentation
from fxoffload.planner.rates import ProfileRates
from tests.capture import Sketch, tiny_tower
from tests.marks import examples

aten, prims = torch.ops.aten, torch.ops.prims
bf16 = torch.bfloat16


@dataclass
class Machine:
    """Milliseconds for each million of the argument; the methods remember the dtypes. ``measured``: by target."""

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    launch_us: float = 0.0
    measured: dict[Any, float] = field(default_factory=dict)
    dtypes: list[torch.dtype] = field(default_factory=list)

    def op_ms(self, node: fx.Node) -> float | None:
        return self.measured.get(node.target)

    def matmul_ms(self, flops: float, dtype: torch.dtype) -> float:
        self.dtypes.append(dtype)
        return self.matmul * flops / 1e6

    grouped_matmul_ms = matmul_ms

    def attention_ms(self, flops: float, dtype: torch.dtype, backward: bool) -> float:
        self.dtypes.append(dtype)
        return self.attention * flops / 1e6 * (2 if backward else 1)

    def memory_ms(self, nbytes: float) -> float:
        return self.memory * nbytes / 1e6


def value(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(target: Any, *args: Any, out: Any, **kwargs: Any) -> fx.Node:
    """A node as it would stand in a graph for a GPU: tensors among the arguments become its inputs. Nothing is run."""
    graph = fx.Graph()

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        node = graph.placeholder("x")
        node.meta["val"] = x
        return node

    inputs, keywords = torch.utils._pytree.tree_map(placed, (args, kwargs))
    node = graph.call_function(target, inputs, keywords)
    node.meta["val"] = out
    return node


def ops(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def traced(fn: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> fx.GraphModule:
    """The aten graph of ``fn``, decomposed as for Inductor."""
    return make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode=mode)(*inputs)


def kernels(nodes: Sequence[fx.Node]) -> dict[str, list[int]]:
    """Kind of kernel -> bytes that each kernel of it moves, the fewest first."""
    found: dict[str, list[int]] = defaultdict(list)
    for node, nbytes in Fusion(nodes).traffic():
        found["fused" if node is None else node_kind(node)].append(nbytes)
    return {kind: sorted(moved) for kind, moved in found.items()}


def moved_bytes(nodes: Sequence[fx.Node]) -> int:
    return sum(map(sum, kernels(nodes).values()))


def kernels_of(fn: Callable[..., Any], *inputs: Tensor) -> dict[str, list[int]]:
    return kernels(ops(traced(fn, *inputs)))


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# -- FLOPs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "flops"),
    [
        (call(aten.mm.default, value(5, 7), value(7, 11), out=value(5, 11)), 2 * 5 * 7 * 11),
        (call(aten.bmm.default, value(3, 5, 7), value(3, 7, 11), out=value(3, 5, 11)), 2 * 3 * 5 * 7 * 11),
        (call(aten.addmm.default, value(11), value(5, 7), value(7, 11), out=value(5, 11)), 2 * 5 * 7 * 11),
        (
            call(aten.baddbmm.default, value(3, 5, 11), value(3, 5, 7), value(3, 7, 11), out=value(3, 5, 11)),
            2 * 3 * 5 * 7 * 11,
        ),
        (call(aten.mv.default, value(5, 7), value(7), out=value(5)), 2 * 5 * 7),
        (call(aten.dot.default, value(7), value(7), out=value()), 2 * 7),
        (
            call(
                aten._scaled_mm.default,
                value(5, 7, dtype=torch.float8_e4m3fn),
                value(7, 11, dtype=torch.float8_e4m3fn),
                value(1, dtype=torch.float32),
                value(1, dtype=torch.float32),
                None,
                None,
                bf16,
                out=value(5, 11),
            ),
            2 * 5 * 7 * 11,
        ),
    ],
    ids=lambda x: str(x.target) if isinstance(x, fx.Node) else "",
)
def test_flops_of_matrix_products(node: fx.Node, flops: int) -> None:
    assert node_kind(node) == "matmul"
    assert op_flops(node) == flops


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ((40, 7), (3, 7, 11), 2 * 40 * 7 * 11),  # tokens of three experts, one after another
        ((3, 5, 7), (7, 40), 2 * 5 * 7 * 40),  # the columns are shared out
        ((5, 40), (40, 11), 2 * 5 * 40 * 11),  # the contraction is shared out: the weight gradients
        ((3, 5, 7), (3, 7, 11), 2 * 3 * 5 * 7 * 11),
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_flops_of_grouped_products(a: tuple[int, ...], b: tuple[int, ...], flops: int, scaled: bool) -> None:
    offsets, scale = value(3, dtype=torch.int32), value(1, dtype=torch.float32)
    if scaled:
        node = call(aten._scaled_grouped_mm.default, value(*a), value(*b), scale, scale, offsets, out=value(1))
    else:
        node = call(aten._grouped_mm.default, value(*a), value(*b), offsets, out=value(1))
    assert (node_kind(node), op_flops(node)) == ("matmul", flops)


def test_grouped_products_have_a_rate_of_their_own_where_it_was_measured() -> None:
    profile = load_profile("h200")
    dense = {k: v for k, v in profile.matmul_tflop_per_s.items() if "grouped" not in k}
    products = [
        call(aten._grouped_mm.default, value(4096, 2048), value(8, 2048, 1536), value(8), out=value(4096, 1536)),
        call(aten.mm.default, value(4096, 2048), value(2048, 1536), out=value(4096, 1536)),
    ]
    assert [is_grouped(p) for p in products] == [True, False]
    (dtype,) = {compute_dtype(p) for p in products}

    def times(rates: dict[str, float]) -> list[float]:
        machine = ProfileRates(dataclasses.replace(profile, matmul_tflop_per_s=rates))
        return [estimate_segment([p], machine) for p in products]

    unknown, known = times(dense), times({**dense, grouped_name(dtype): 1.0})
    assert unknown[0] == pytest.approx(unknown[1], rel=0.3)
    assert known[0] == pytest.approx(2 * 4096 * 2048 * 1536 / 1e9, rel=0.01)
    assert known[1] == unknown[1]


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_flops_of_convolutions(groups: int, transposed: bool) -> None:
    sketch = Sketch()
    x = sketch.input("x", 2, 8, 16, 12)
    weight = sketch.input("weight", 8, 8 // groups, 3, 5)
    rest = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)
    out = sketch.op(aten.convolution.default, x, weight, None, *rest)
    # Of each position of the smaller side: 8 channels from 8 / groups, over the filter.
    positions = 16 * 12 if transposed else 14 * 8
    flops = 2 * 2 * positions * 8 * (8 // groups) * 15
    assert (node_kind(out), op_flops(out)) == ("convolution", flops)

    for mask, factor in (([True, True, False], 2), ([False, True, True], 1)):
        backward = sketch.op(aten.convolution_backward.default, out, x, weight, [0], *rest, mask)
        assert op_flops(backward) == factor * flops


B, H, KV, S, D = 2, 8, 2, 64, 16
Q, K, V = value(B, H, S, D), value(B, KV, S, D), value(B, KV, S, D)
LSE, SEED = value(B, H, S, dtype=torch.float32), value(dtype=torch.int64)


def attention(backend: str, causal: bool, q: Tensor = Q, k: Tensor = K, v: Tensor = V) -> tuple[fx.Node, fx.Node]:
    """Forward and backward of one of ATen's attention operators."""
    none: Any = None
    if backend == "cpu":
        name = "_scaled_dot_product_flash_attention_for_cpu"
        forward, backward = (q, k, v, 0.0, causal), (q, q, k, v, q, LSE, 0.0, causal)
    elif backend == "flash":
        name = "_scaled_dot_product_flash_attention"
        forward = (q, k, v, 0.0, causal)
        offsets = value(0, dtype=torch.int32)  # the forward's, which has none
        backward = (q, q, k, v, q, LSE, offsets, offsets, S, S, 0.0, causal, SEED, SEED)
    elif backend == "efficient":
        name = "_scaled_dot_product_efficient_attention"
        forward = (q, k, v, none, True, 0.0, causal)
        backward = (q, q, k, v, none, q, LSE, SEED, SEED, 0.0, [True, True, True, False], causal)
    elif backend == "cudnn":
        name = "_scaled_dot_product_cudnn_attention"
        forward = (q, k, v, none, True, 0.0, causal)
        backward = (q, q, k, v, q, LSE, SEED, SEED, none, none, none, S, S, 0.0, causal)
    else:
        name = "_scaled_dot_product_fused_attention_overrideable"
        forward = (q, k, v, none, 0.0, causal)
        backward = (q, q, k, v, none, [True] * 4, q, LSE, none, none, S, S, 0.0, causal, SEED, SEED)
    return (
        call(getattr(aten, name).default, *forward, out=(q, LSE)),
        call(getattr(aten, f"{name}_backward").default, *backward, out=(q, k, v)),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "flash", "efficient", "cudnn", "overrideable"])
def test_flops_of_attention(backend: str, causal: bool) -> None:
    # Two products over all pairs forward, five backward; the heads are the queries' (K and V have a quarter of them).
    pair = 2 * B * H * S * S * D // (2 if causal else 1)
    forward, backward = attention(backend, causal)
    assert (node_kind(forward), node_kind(backward)) == ("attention", "attention")
    assert (op_flops(forward), op_flops(backward)) == (2 * pair, 5 * pair)


def test_attention_gets_causality_as_a_keyword_too_and_values_may_be_wider() -> None:
    node = call(aten._scaled_dot_product_flash_attention.default, Q, K, V, is_causal=True, out=(Q, LSE))
    assert op_flops(node) == 2 * B * H * S * S * D
    forward, backward = attention("flash", False, v=value(B, KV, S, 3 * D))
    assert op_flops(forward) == 2 * B * H * S * S * (D + 3 * D)
    assert op_flops(backward) == 2 * B * H * S * S * (3 * D + 2 * 3 * D)


@pytest.mark.parametrize(("size_q", "size_k"), [(4, 16), (16, 4), (32, 32), (1, 9)])
def test_a_causal_mask_over_unequal_lengths_leaves_its_area(size_q: int, size_k: int) -> None:
    q, k = value(1, 1, size_q, D), value(1, 1, size_k, D)
    node, _ = attention("efficient", True, q, k, k)
    mask = torch.ones(size_q, size_k).tril()
    area = mask.sum().item() - min(size_q, size_k) / 2  # the line through the diagonal halves its elements
    assert op_flops(node) == pytest.approx(4 * D * area)


def test_attention_kernels_with_the_sequence_before_the_heads() -> None:
    q, k = value(B, S, H, D), value(B, S, KV, D)
    flash = call(aten._flash_attention_forward.default, q, k, k, None, None, S, S, 0.0, True, False, out=(q, LSE))
    efficient = call(
        aten._efficient_attention_forward.default, q, k, k, None, None, None, S, S, 0.0, 1, True, out=(q, LSE)
    )
    assert op_flops(flash) == op_flops(efficient) == 2 * B * H * S * S * D


def test_packed_sequences_count_as_equally_long() -> None:
    q, k, offsets = value(4 * S, H, D), value(4 * S, KV, D), value(5, dtype=torch.int32)
    node = call(aten._flash_attention_forward.default, q, k, k, offsets, offsets, S, S, 0.0, True, False, out=(q, LSE))
    assert op_flops(node) == 4 * (2 * H * S * S * D)


def test_flex_attention_counts_as_dense() -> None:
    forward = call(torch.ops.higher_order.flex_attention, Q, K, V, None, (), 0.25, {}, (), (), out=(Q, LSE, LSE))
    backward = call(
        torch.ops.higher_order.flex_attention_backward, Q, K, V, Q, LSE, Q, LSE, None, None, (), 0.25, {}, (), (),
        out=(Q, K, V),
    )  # fmt: skip
    assert op_flops(forward) == 4 * B * H * S * S * D
    assert op_flops(backward) == 10 * B * H * S * S * D
    machine = Machine(memory=0.0)
    assert estimate_segment([forward], machine) == pytest.approx(op_flops(forward) / 1e6)
    assert estimate_segment([backward], machine) == pytest.approx(2 * op_flops(backward) / 1e6)


def test_an_op_under_the_wrapper_of_random_state_is_itself() -> None:
    flash = aten._scaled_dot_product_flash_attention.default
    higher = torch.ops.higher_order
    saving = call(higher.run_and_save_rng_state, flash, Q, K, V, 0.1, True, out=(SEED, (Q, LSE)))
    setting = call(higher.run_with_rng_state, SEED, flash, Q, K, V, 0.1, True, out=(Q, LSE))
    # On a GPU, in the forward and in the backward; the state is a keyword.
    safe = call(torch._prims.rng_prims.graphsafe_run_with_rng_state, flash, Q, K, V, 0.1, True, out=(Q, LSE))
    for node in (saving, setting, safe):
        assert (node_kind(node), op_flops(node)) == ("attention", 2 * B * H * S * S * D)


def test_a_custom_op_is_opaque_until_it_has_a_formula() -> None:
    library = torch.library.Library("fxoffload_test_costs", "FRAGMENT")
    library.define("multiply(Tensor a, Tensor b) -> Tensor")
    node = call(torch.ops.fxoffload_test_costs.multiply.default, value(4, 5), value(5, 6), out=value(4, 6))
    assert (node_kind(node), op_flops(node)) == ("opaque", 0.0)
    assert kernels([node]) == {"opaque": [2 * (20 + 30 + 24)]}
    assert estimate_segment([node], Machine()) == pytest.approx(2 * (20 + 30 + 24) / 1e6)
    packet = torch.ops.fxoffload_test_costs.multiply

    @register_flop_formula(packet)
    def formula(a: Sequence[int], b: Sequence[int], *, out_shape: Sequence[int]) -> int:
        return 3 * a[0] * a[1] * out_shape[1]

    try:
        assert (node_kind(node), op_flops(node)) == ("matmul", 3 * 4 * 5 * 6)
    finally:
        flop_registry.pop(packet)


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        (call(aten.add.Tensor, value(4), value(4), out=value(4)), "fused"),
        (call(aten.sum.dim_IntList, value(4, 4), [1], out=value(4)), "fused"),
        (call(prims.convert_element_type.default, value(4), bf16, out=value(4)), "fused"),
        (call(aten.cat.default, [value(4), value(4)], out=value(8)), "fused"),
        (call(aten.index_put.default, value(4), [value(2, dtype=torch.int64)], value(2), out=value(4)), "fused"),
        (call(aten.sort.default, value(4), out=(value(4), value(4, dtype=torch.int64))), "opaque"),
        (call(aten.cumsum.default, value(4), 0, out=value(4)), "opaque"),
        (call(aten.permute.default, value(4, 5), [1, 0], out=value(5, 4)), "view"),
        (call(aten._unsafe_view.default, value(4, 5), [20], out=value(20)), "view"),
        (call(aten.split.Tensor, value(4, 5), 2, out=[value(2, 5), value(2, 5)]), "view"),
        (call(aten.sym_size.int, value(4, 5), 0, out=4), "view"),
        (call(aten.copy_.default, value(4), value(4), out=value(4)), "fused"),
    ],
    ids=lambda x: str(x.target) if isinstance(x, fx.Node) else x,
)
def test_kinds_without_flops(node: fx.Node, kind: str) -> None:
    assert (node_kind(node), op_flops(node)) == (kind, 0.0)


def test_the_rate_is_that_of_the_factors_dtype() -> None:
    half, eight = value(4, 4, dtype=torch.float16), value(4, 4, dtype=torch.float8_e4m3fn)
    scale = value(1, dtype=torch.float32)
    nodes = [
        call(aten.addmm.default, value(4, dtype=torch.float32), half, half, out=half),
        call(aten._scaled_mm.default, eight, eight, scale, scale, None, None, bf16, out=value(4, 4)),
        attention("flash", False)[1],
    ]
    machine = Machine()
    estimate_segment(nodes, machine)
    assert machine.dtypes == [compute_dtype(n) for n in nodes] == [torch.float16, torch.float8_e4m3fn, bf16]


# -- bytes and kernels -------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def bfloat(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=bf16)


@pytest.mark.parametrize(
    ("fn", "inputs", "moved"),
    [
        # x read once for the mean and once for the product, but by one kernel; float32 is never in memory.
        (rms_norm, (bfloat(6, 32), bfloat(32)), 2 * (6 * 32 + 32 + 6 * 32)),
        # Two halves and the whole are one read.
        (rope, (bfloat(2, 5, 16), bfloat(5, 16), bfloat(5, 16)), 2 * (160 + 80 + 80 + 160)),
        (lambda gate, up: F.silu(gate) * up, (bfloat(6, 32), bfloat(6, 32)), 2 * 3 * 192),
        (lambda x: F.softmax(x, -1), (bfloat(6, 32),), 2 * 2 * 192),
        # Of a table, the rows that are taken.
        (lambda w, i: F.embedding(i, w), (bfloat(1000, 8), torch.zeros(5, dtype=torch.int64)), 2 * 2 * 40 + 5 * 8),
        # Of an expanded value, its different elements.
        (lambda x: x[:, None, :].expand(6, 7, 32) + 1, (bfloat(6, 32),), 2 * (192 + 7 * 192)),
        # Of a slice, the slice.
        (lambda x: x[:2] + 1, (bfloat(100, 8),), 2 * 2 * 16),
        # Constants are not read.
        (lambda x: x * torch.ones(6, 32, dtype=bf16) + torch.arange(32), (bfloat(6, 32),), 2 * 192 + 2 * 192),
    ],
    ids=["norm", "rope", "silu", "softmax", "embedding", "expand", "slice", "constants"],
)
def test_one_fused_kernel_reads_and_writes_once(fn: Callable[..., Any], inputs: tuple[Tensor, ...], moved: int) -> None:
    nodes = ops(traced(fn, *inputs))
    assert kernels(nodes) == {"fused": [moved]}
    assert estimate_segment(nodes, Machine(launch_us=7000.0)) == pytest.approx(moved / 1e6 + 7.0)


def test_views_are_free() -> None:
    gm = traced(lambda x: x.transpose(0, 1).reshape(32, 3, 2)[:, 1].unsqueeze(0).split(16, dim=1), bfloat(6, 32))
    assert kernels(ops(gm)) == {}
    assert estimate_segment(ops(gm), Machine(launch_us=1000.0)) == 0.0


def test_a_matrix_product_splits_what_is_around_it() -> None:
    x, weight = bfloat(6, 32), bfloat(32, 64)
    nodes = ops(traced(lambda x, w: F.silu(torch.mm(F.relu(x) + 1, w)), x, weight))
    out = nbytes(bfloat(6, 64))
    assert kernels(nodes) == {"fused": [2 * nbytes(x), 2 * out], "matmul": [nbytes(x, weight) + out]}
    # The product takes as long as its arithmetic, the others as their memory.
    expected = (2 * 6 * 32 * 64 + 2 * nbytes(x) + 2 * out) / 1e6 + 3 * 5.0
    assert estimate_segment(nodes, Machine(launch_us=5000.0)) == pytest.approx(expected)


@pytest.mark.parametrize("slow", ["matmul", "memory"])
def test_a_matrix_product_takes_the_longer_of_arithmetic_and_memory(slow: str) -> None:
    rates = Machine(launch_us=1000.0, **{slow: 1000.0})
    nodes = ops(traced(torch.mm, bfloat(64, 64), bfloat(64, 64)))
    expected = 1000 * 2 * 64**3 / 1e6 if slow == "matmul" else 1000 * 3 * 2 * 64**2 / 1e6
    assert estimate_segment(nodes, rates) == pytest.approx(expected + 1.0)


def test_a_measured_time_counts_instead_of_the_estimate() -> None:
    nodes = ops(traced(lambda x, w: torch.relu(x @ w).cumsum(0) @ w, bfloat(64, 64), bfloat(64, 64)))
    assert kernels(nodes).keys() == {"matmul", "fused", "opaque"}
    rates = Machine(
        launch_us=1000.0, measured={aten.mm.default: 30.0, aten.cumsum.default: 0.5, aten.relu.default: 9e9}
    )
    # Launches are within the measured times. That of an op in a fused kernel does not count.
    assert estimate_segment(nodes, rates) == pytest.approx(2 * 30.0 + 0.5 + 2 * nbytes(bfloat(64, 64)) / 1e6 + 1.0)


def test_a_residual_sum_and_the_norm_behind_it_are_one_kernel() -> None:
    x, weight, matrix = bfloat(6, 32), bfloat(32), bfloat(32, 32)

    def layer(x: Tensor, weight: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        total = x + x @ matrix
        return total, rms_norm(total, weight) @ matrix

    # Reads both summands and the weight; writes the sum, which leaves, and the normalised, which the product reads.
    assert kernels_of(layer, x, weight, matrix)["fused"] == [4 * nbytes(x) + nbytes(weight)]


def test_reductions_over_different_dimensions_are_different_kernels() -> None:
    x = bfloat(6, 32)
    row, column = 2 * 6, 2 * 32
    both = kernels_of(lambda x: (x.exp().sum(1), x.exp().sum(0)), x)
    assert both == {"fused": [nbytes(x) + row, nbytes(x) + column]}
    # As many elements either way: the dimensions still differ.
    square = kernels_of(lambda x: (x.sum(1), x.sum(0)), bfloat(32, 32))
    assert square == {"fused": [2 * (32 * 32 + 32)] * 2}
    assert kernels_of(lambda x: (x.sum(1), x.amax(1)), x) == {"fused": [nbytes(x) + 2 * row]}


def test_a_scalar_behind_a_row_reduction_is_a_second_kernel() -> None:
    x = bfloat(64, 32)
    # The rows' maxima and sums are written and read; their logarithms are taken by the second kernel.
    rows = 2 * 4 * 64
    assert kernels_of(lambda x: torch.logsumexp(x.float(), 1).sum(), x) == {"fused": [rows + 4, nbytes(x) + rows]}


def test_gathering_from_what_is_only_in_registers_reads_what_it_takes() -> None:
    logits, labels = bfloat(64, 1000), torch.zeros(64, 1, dtype=torch.int64)
    found = kernels_of(lambda x, i: (x.float() * 2).gather(1, i), logits, labels)
    assert found == {"fused": [64 * 2 + nbytes(labels) + 64 * 4]}


def test_a_sum_that_two_kernels_would_read_five_values_for_is_written() -> None:
    inputs = [bfloat(6, 32) for _ in range(5)]

    def twice(num: int) -> Callable[..., Any]:
        def run(*values: Tensor) -> tuple[Tensor, Tensor]:
            total = sum(values[:num]) * 2
            return total.sum(0), total.sum(1)  # type: ignore[union-attr]

        return run

    size, sums = nbytes(inputs[0]), 2 * (6 + 32)
    assert sum(kernels_of(twice(4), *inputs)["fused"]) == 2 * 4 * size + sums  # computed in both kernels
    # Read, written, and read by the second kernel.
    assert sum(kernels_of(twice(5), *inputs)["fused"]) == 5 * size + size + size + sums


@pytest.mark.parametrize("reads", ["a view, later", "a view, before", "the result itself"])
def test_until_a_product_reads_a_view_of_a_result_others_recompute_it(reads: str) -> None:
    """As T5's bias, whose gradient is a sum over the batch: one H200, torch 2.11, 2026-11-30."""
    x, y, weight = bfloat(4, 6, 32), bfloat(4, 6, 32), bfloat(4, 32, 8)

    def run(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scores = x * y
        seen = scores if reads == "the result itself" else scores.view(4, 6, 32)
        if reads == "a view, before":
            product = torch.bmm(seen, weight)
            return scores.sum(0), product
        return scores.sum(0), torch.bmm(seen, weight)

    size, total = nbytes(x), 2 * 6 * 32
    summed = (2 if reads == "a view, later" else 1) * size + total
    assert kernels_of(run, x, y, weight)["fused"] == sorted([3 * size, summed])


def test_an_input_that_is_overwritten_is_written_not_read() -> None:
    sketch = Sketch()
    buffer, x = sketch.input("buffer", 6, 32), sketch.input("x", 6, 32)
    copy = sketch.op(aten.copy_.default, buffer, sketch.op(aten.neg.default, x))
    gm = sketch.module([])
    assert copy in ops(gm)
    assert kernels(ops(gm)) == {"fused": [2 * 4 * 192]}


def test_an_opaque_op_reads_and_writes_what_it_modifies() -> None:
    library = torch.library.Library("fxoffload_test_costs", "FRAGMENT")
    library.define("append(Tensor(a!) cache, Tensor x) -> ()")
    node = call(torch.ops.fxoffload_test_costs.append.default, value(64), value(8), out=None)
    assert kernels([node]) == {"opaque": [2 * (2 * 64 + 8)]}
    assert estimate_segment([node], Machine()) == pytest.approx(2 * (2 * 64 + 8) / 1e6)


def test_what_nobody_reads_costs_nothing() -> None:
    sketch = Sketch()
    x = sketch.input("x", 6, 32)
    sketch.op(aten.neg.default, x)
    shown = sketch.op(aten.exp.default, x)
    sketch.op(aten.view.default, shown, [-1])
    nodes = ops(sketch.module([x]))
    assert kernels(nodes) == kernels([shown]) == {}


# -- sizes that change -------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.gate, self.down = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        heads = hidden.unflatten(-1, (2, 8)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.silu(self.gate(mixed)) * self.up(mixed))


def test_symbolic_sizes_cost_what_their_hints_do_and_no_guard_is_added() -> None:
    torch.manual_seed(0)
    model = Layer().requires_grad_(False)
    names, weights = zip(*model.named_parameters(), strict=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x,))

    x = torch.randn(3, 10, 16)
    symbolic, fixed = traced(run, x, *weights, mode="symbolic"), traced(run, x, *weights)
    first = symbolic.graph.find_nodes(op="placeholder")[0]
    shape_env = first.meta["val"].fake_mode.shape_env
    assert any(isinstance(s, torch.SymInt) for s in first.meta["val"].shape)
    before = (len(shape_env.guards), dict(shape_env.replacements), len(shape_env.axioms))
    rates = Machine(launch_us=5.0)
    found, expected = ops(symbolic), ops(fixed)
    assert estimate_segment(found, rates) == estimate_segment(expected, rates)
    assert sum(map(op_flops, found)) == sum(map(op_flops, expected)) > 0
    assert kernels(found) == kernels(expected)
    assert kernels(expected).keys() >= {"matmul", "fused"}
    assert (len(shape_env.guards), dict(shape_env.replacements), len(shape_env.axioms)) == before


def test_a_size_without_a_hint_is_skipped() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        rows = shape_env.create_unbacked_symint()
        a, b, out = torch.empty(rows, 7), torch.empty(7, 11), torch.empty(rows, 11)
    node = call(aten.mm.default, a, b, out=out)
    before = len(shape_env.guards)
    assert (op_flops(node), kernels([node])) == (0.0, {"matmul": [nbytes(b)]})
    assert estimate_segment([node], Machine()) == pytest.approx(nbytes(b) / 1e6)
    assert len(shape_env.guards) == before


# -- collectives -------------------------------------------------------------------------------------------------------


def gathered() -> tuple[fx.GraphModule, int, int]:
    """A sharded weight is gathered and multiplied with: the graph, the bytes of the weight, and of input and result."""
    c10d = torch.ops._c10d_functional
    sketch = Sketch()
    shard, x = sketch.input("shard", 8, 32), sketch.input("x", 6, 32)
    half = sketch.op(aten.mul.Tensor, shard, 2)
    weight = sketch.graph.call_function(c10d.all_gather_into_tensor.default, (half, 4, "0"))
    waited = sketch.graph.call_function(c10d.wait_tensor.default, (weight,))
    with sketch.mode:
        weight.meta["val"] = waited.meta["val"] = torch.empty(32, 32)
    product = sketch.op(aten.mm.default, x, waited)
    return sketch.module([product]), 4 * 32 * 32, 4 * 6 * 32


def test_collectives_take_no_time_of_the_compute_stream() -> None:
    gm, weight, x = gathered()
    kinds = [node_kind(n) for n in ops(gm)]
    assert kinds == ["fused", "collective", "collective", "matmul"]
    shard = 4 * 8 * 32
    # A collective's input is written for it, and the product reads the gathered result. The wait is no kernel.
    assert kernels(ops(gm)) == {"fused": [2 * shard], "collective": [shard + weight], "matmul": [weight + 2 * x]}
    rates = Machine(launch_us=1000.0, measured={n.target: 9e9 for n in ops(gm) if node_kind(n) == "collective"})
    assert estimate_segment(ops(gm), rates) == pytest.approx((2 * shard + 2 * 6 * 32 * 32) / 1e6 + 2 * 1.0)


# -- parts of a graph --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", ["fused", "matmul", "output"])
def test_what_is_read_outside_is_written(reader: str) -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        hidden = (F.relu(x) + 1).view(3, 64)
        if reader == "fused":
            return torch.tanh(hidden)
        return hidden @ w if reader == "matmul" else hidden

    gm = traced(run, bfloat(6, 32), bfloat(64, 4))
    relu, add, view, *_ = ops(gm)
    assert [n.target for n in (relu, add, view)] == [aten.relu.default, aten.add.Tensor, aten.view.default]
    assert kernels([relu, add]) == kernels([relu, add, view]) == {"fused": [4 * 192]}


def test_a_product_alone_costs_the_product() -> None:
    gm = traced(lambda x, w: torch.relu((x + 1) @ w), bfloat(6, 32), bfloat(32, 64))
    product = [n for n in ops(gm) if node_kind(n) == "matmul"]
    assert estimate_segment(product, Machine()) == pytest.approx(2 * 6 * 32 * 64 / 1e6)


# -- properties --------------------------------------------------------------------------------------------------------

UNARY = (aten.neg.default, aten.exp.default, aten.tanh.default)
SIZE = 32


@st.composite
def random_graphs(draw: st.DrawFn) -> fx.GraphModule:
    """Pointwise ops, reductions over either dimension, products and transposes over square values, wired at random."""
    sketch = Sketch()
    values = [sketch.input(f"x{i}", SIZE, SIZE) for i in range(2)]
    for _ in range(draw(st.integers(1, 24))):
        a, b = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        kind = draw(st.sampled_from(("unary", "add", "mm", "sum0", "sum1", "permute")))
        if kind == "unary":
            values.append(sketch.op(draw(st.sampled_from(UNARY)), a))
        elif kind == "add":
            values.append(sketch.op(aten.add.Tensor, a, b))
        elif kind == "mm":
            values.append(sketch.op(aten.mm.default, a, b))
        elif kind == "permute":
            values.append(sketch.op(aten.permute.default, a, [1, 0]))
        else:
            dim = int(kind[-1])
            total = sketch.op(aten.sum.dim_IntList, a, [dim], True)
            values.append(sketch.op(aten.expand.default, total, [SIZE, SIZE]))
    unread = [v for v in values[2:] if not v.users]
    return sketch.module(unread)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(random_graphs(), st.data())
def test_costs_are_sums_over_kernels_and_products_are_the_same_however_it_is_cut(gm: fx.GraphModule, data: Any) -> None:
    nodes = ops(gm)
    cut = data.draw(st.integers(0, len(nodes)))
    pieces = [nodes, nodes[:cut], nodes[cut:]]
    found = [kernels(piece) for piece in pieces]
    for piece, of_kind in zip(pieces, found, strict=True):
        moved = list(itertools.chain(*of_kind.values()))
        rates = Machine(matmul=0.0, launch_us=3.0)
        assert estimate_segment(piece, rates) == pytest.approx(sum(moved) / 1e6 + 3e-3 * len(moved))
    whole, *parts = (of_kind.get("matmul", []) for of_kind in found)
    assert whole == sorted(itertools.chain(*parts))
    assert len(whole) == sum(n.target is aten.mm.default for n in nodes)
    arithmetic = [estimate_segment(piece, Machine(memory=0.0)) for piece in pieces]
    assert arithmetic[0] == pytest.approx(arithmetic[1] + arithmetic[2])
    assert arithmetic[0] == pytest.approx(2 * SIZE**3 * len(whole) / 1e6)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(random_graphs(), st.floats(0, 3), st.floats(0, 3), st.floats(0, 9))
def test_a_slower_machine_is_never_faster(gm: fx.GraphModule, matmul: float, memory: float, launch: float) -> None:
    fast, slow = Machine(launch_us=1.0), Machine(1.0 + matmul, 1.0, 1.0 + memory, 1.0 + launch)
    assert estimate_segment(ops(gm), slow) >= estimate_segment(ops(gm), fast)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.sampled_from(("unary", "add", "mm", "norm")), min_size=1, max_size=12), st.data())
def test_cutting_a_chain_never_saves(kinds: list[str], data: Any) -> None:
    sketch = Sketch()
    x, other = sketch.input("x", SIZE, SIZE), sketch.input("other", SIZE, SIZE)
    for kind in kinds:
        if kind == "norm":
            x = sketch.op(aten.div.Tensor, x, sketch.op(aten.sum.dim_IntList, x, [1], True))
        elif kind == "unary":
            x = sketch.op(aten.neg.default, x)
        else:
            x = sketch.op(aten.mm.default if kind == "mm" else aten.add.Tensor, x, other)
    nodes = ops(sketch.module([x]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(nodes)), max_size=3)))
    rates = Machine(launch_us=1.0)
    parts = [nodes[a:b] for a, b in itertools.pairwise([0, *cuts, len(nodes)])]
    assert sum(estimate_segment(p, rates) for p in parts) >= estimate_segment(nodes, rates) - 1e-12
    assert sum(map(moved_bytes, parts)) >= moved_bytes(nodes)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(random_graphs())
def test_no_two_kernels_wait_for_each_other(gm: fx.GraphModule) -> None:
    fusion = Fusion(ops(gm))
    waits: dict[object, set[object]] = {}
    maker: dict[fx.Node, object] = {n: n for n in ops(gm) if node_kind(n) == "matmul"}
    maker |= fusion._kernel_of
    for kernel in fusion._kernels:
        waits[kernel] = {maker[b] for b in kernel.reads if b in maker and maker[b] is not kernel}
    for node in ops(gm):
        if node_kind(node) == "matmul":
            inputs = (base_of(i) for i in node.all_input_nodes)
            waits[node] = {maker[i] for i in inputs if i in maker}
    graphlib.TopologicalSorter(waits).prepare()  # raises on a circle


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 6), st.integers(1, 6))
def test_more_of_the_same_costs_as_much_more(times: int, rows: int) -> None:
    """Parts that share nothing add up; a chain's FLOPs and bytes grow with its rows as their sizes do."""

    def chain(num: int, rows: int) -> list[fx.Node]:
        sketch = Sketch()
        results = []
        for i in range(num):
            x = sketch.op(aten.neg.default, sketch.input(f"x{i}", rows, SIZE))
            results.append(
                sketch.op(aten.exp.default, sketch.op(aten.mm.default, x, sketch.input(f"w{i}", SIZE, SIZE)))
            )
        return ops(sketch.module(results))

    one, many, taller = chain(1, rows), chain(times, rows), chain(1, rows + 1)
    for rates in (Machine(launch_us=2.0), Machine(memory=0.0)):
        assert estimate_segment(many, rates) == pytest.approx(times * estimate_segment(one, rates))
    assert kernels(many) == {kind: sorted(times * moved) for kind, moved in kernels(one).items()}
    assert sum(map(len, kernels(many).values())) == 3 * times
    assert sum(map(op_flops, taller)) == sum(map(op_flops, one)) * (rows + 1) / rows
    assert moved_bytes(taller) - moved_bytes(one) == 6 * 4 * SIZE


# -- captured models ---------------------------------------------------------------------------------------------------


def times_of(segmentation: Segmentation, rates: Rates) -> list[float]:
    return [estimate_segment(s.nodes, rates) for s in segmentation.segments]


def test_every_segment_of_a_captured_model_has_a_cost() -> None:
    captured = tiny_tower()
    for state in (captured.forward, captured.backward):
        assert min(times_of(state.segmentation, Machine(launch_us=3.0))) > 0
        assert {kind for s in state.segmentation.segments for kind in kernels(s.nodes)} == {"matmul", "fused"}
    # 4 x 8 rows of width 16: two projections (16 to 16, 16 to 8) and, twice, 16 to 64 and back.
    flops = 2 * 32 * (16 * 16 + 16 * 8 + 2 * 2 * 16 * 64)
    arithmetic = Machine(memory=0.0)
    assert sum(times_of(captured.forward.segmentation, arithmetic)) == pytest.approx(flops / 1e6)
    # Two products backward for each forward; the model's input wants no gradient.
    backward = 2 * flops - 2 * 32 * 16 * 16
    assert sum(times_of(captured.backward.segmentation, arithmetic)) == pytest.approx(backward / 1e6)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-21-h200-activations.json"


class H200:
    """What the machine of the measurement achieves, rounded: none of it was fitted to the two cases."""

    launch_us = 3.0

    def op_ms(self, node: fx.Node) -> None:
        return None

    def matmul_ms(self, flops: float, dtype: torch.dtype) -> float:
        return flops / 700e9

    grouped_matmul_ms = matmul_ms

    def attention_ms(self, flops: float, dtype: torch.dtype, backward: bool) -> float:
        return flops / (450e9 if backward else 550e9)

    def memory_ms(self, nbytes: float) -> float:
        return nbytes / 4e9


class _Traced(Exception):
    """Raised when the graphs are there: fake tensors cannot run them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stack", "causal_lm"])
def test_estimates_are_near_what_an_h200_took(name: str) -> None:
    pytest.importorskip("transformers")
    from benchmarks import schema, workloads

    records = json.loads(RESULTS.read_text())["records"]
    (record,) = (r for r in records if r["case"]["name"] == name and r["variant"]["label"] == "inductor")
    case = schema.Case(**record["case"] | {"device": "cpu"})
    states: dict[str, Any] = {}
    run_passes = build.run_passes

    def record_state(steps: Any, state: Any, what: str) -> Any:
        states[what] = state
        result = run_passes(steps, state, what)
        if what == "backward":
            raise _Traced
        return result

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with mock.patch.object(workloads, "_fill_weights"), mock.patch.object(build, "run_passes", record_state), fake:
        job = workloads.build_job(case, torch.device("cpu"))
        options = {"device_types": ("cpu",), "inner": "aot_eager", "policy": "keep_all"}
        with pytest.raises(Exception, match="_Traced"):
            torch.compile(job.module, backend="fxoffload", options=options)(*job.inputs)
    for what in ("forward", "backward"):
        estimated = math.fsum(times_of(states[what].segmentation, H200()))
        measured = record["result"][f"{what}_ms"]["median"]
        assert estimated == pytest.approx(measured, rel=0.15), what
