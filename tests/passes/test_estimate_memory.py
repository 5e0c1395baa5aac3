"""The estimate against counts by hand, against what Inductor's own code holds line by line, and against an H200."""

from __future__ import annotations

import json
import operator
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from fxoffload.analysis import segment_kernels
from fxoffload.analysis.estimate_memory import dying_inputs, estimate_temp_bytes, segment_temp_bytes
from fxoffload.analysis.hidden_memory import hidden_bytes
from fxoffload.analysis.kernel_fusion import Fusion
from fxoffload.analysis.segmentation import Donations, Segment
from fxoffload.compiler import build
from fxoffload.compiler.segments import SegmentCompiler
from fxoffload.passes.cut_segments import CutSegments
from fxoffload.planner import ConstantRates, from_graphs, simulate
from tests.capture import Captured, Sketch, capture, tiny_tower
from tests.marks import slow
from tests.planner.chains import everywhere

aten = torch.ops.aten
KB = 1 << 10
MB = 1 << 20


def ops(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def returned(gm: fx.GraphModule) -> list[fx.Node]:
    return [v for v in tree_leaves(gm.graph.output_node().args) if isinstance(v, fx.Node)]


def estimate(gm: fx.GraphModule, dying: Collection[str] = (), donated: Collection[str] = ()) -> int:
    return estimate_temp_bytes(ops(gm), returned(gm), dying, donated=donated)


def square(sketch: Sketch, name: str) -> fx.Node:
    """A value of 4 KB."""
    return sketch.input(name, 32, 32)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_what_is_read_for_the_last_time_is_free_behind_the_kernel() -> None:
    sketch = Sketch()
    x, w = square(sketch, "x"), square(sketch, "w")
    product = x
    for _ in range(4):
        product = sketch.op(aten.mm.default, product, w)
    gm = sketch.module([product])
    assert estimate(gm) == 8 * KB  # two products at a time
    # The second product takes the room of the input.
    assert estimate(gm, {"x"}) == 4 * KB
    assert estimate(gm, {"x"}, donated={"x"}) == 4 * KB  # no matrix product writes in place


def test_values_in_registers_take_nothing() -> None:
    sketch = Sketch()
    x, w = square(sketch, "x"), square(sketch, "w")
    y = sketch.chain(sketch.op(aten.mm.default, x, w), 5)
    # In place over the product, which has no other reader.
    assert estimate(sketch.module([y])) == 4 * KB


def test_inputs_are_overwritten_only_where_they_are_donated() -> None:
    sketch = Sketch()
    gm = sketch.module([sketch.op(aten.sin.default, square(sketch, "x"))])
    assert estimate(gm) == estimate(gm, {"x"}) == 4 * KB
    assert estimate(gm, {"x"}, donated={"x"}) == 0


@pytest.mark.parametrize("other", ["transposed", "narrower", "sliced twice"])
def test_results_are_written_in_place_only_where_each_element_is_read_where_it_is_written(other: str) -> None:
    sketch = Sketch()
    x = square(sketch, "x")
    if other == "transposed":
        turned = sketch.op(aten.permute.default, x, [1, 0])
        y = sketch.op(aten.clone.default, turned, memory_format=torch.contiguous_format)
    elif other == "narrower":
        y = sketch.op(torch.ops.prims.convert_element_type.default, x, torch.bfloat16)
    else:
        halves = [sketch.op(aten.slice.Tensor, x, 1, *span) for span in ((16, 32), (0, 16))]
        y = sketch.op(aten.cat.default, halves, 1)
    gm = sketch.module([y])
    assert estimate(gm, {"x"}, donated={"x"}) == (2 if other == "narrower" else 4) * KB


def test_results_are_written_over_what_nothing_else_in_their_kernel_reads() -> None:
    sketch = Sketch()
    grad, gate, up = (square(sketch, name) for name in ("grad", "gate", "up"))
    first, second = sketch.op(aten.mul.Tensor, grad, gate), sketch.op(aten.mul.Tensor, grad, up)
    gm = sketch.module([first, second])
    names = {"grad", "gate", "up"}
    # The first may take the place of gate, which the second does not read; the second that of grad or up.
    assert estimate(gm, names, donated=names) == 0
    sketch = Sketch()
    grad, gate = square(sketch, "grad"), square(sketch, "gate")
    first, second = (sketch.op(op, grad, gate) for op in (aten.mul.Tensor, aten.add.Tensor))
    # Inductor does not look at the order inside a kernel: an input with two readers stays.
    assert estimate(sketch.module([first, second]), names, donated=names) == 8 * KB


@pytest.mark.parametrize("products", [False, True])
def test_a_recomputed_value_joins_a_later_kernel_that_reads_the_same(products: bool) -> None:
    sketch = Sketch()
    x, grad, w = square(sketch, "x"), square(sketch, "grad"), square(sketch, "w")
    gate, up = square(sketch, "gate"), square(sketch, "up")
    if products:
        gate, up = (sketch.op(aten.mm.default, x, value) for value in (gate, up))
    hidden = sketch.op(aten.mul.Tensor, gate, up)
    weight_grad = sketch.op(aten.mm.default, grad, hidden)
    hidden_grad = sketch.op(aten.mm.default, x, w)
    results = [sketch.op(aten.mul.Tensor, hidden_grad, value) for value in (gate, up)]
    gm = sketch.module([weight_grad, *results])
    names = set() if products else {"gate", "up"}
    assert len([a for a in Fusion(ops(gm)).accesses() if not a.alone]) == 1
    # The gradient of the recomputed value, this value itself and the two results; none is overwritten.
    assert estimate(gm, names, donated=names) == (24 if products else 16) * KB


def test_the_results_of_one_op_are_freed_one_by_one() -> None:
    sketch = Sketch()
    q, k, v = (sketch.input(name, 1, 2, 64, 8) for name in "qkv")  # 4 KB
    attended = sketch.op(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, True)
    out, _ = (sketch.graph.call_function(operator.getitem, (attended, i)) for i in range(2))
    out.meta["val"] = attended.meta["val"][0]
    matrix = sketch.op(aten.view.default, out, [32, 32])
    y = sketch.op(aten.mm.default, sketch.op(aten.mm.default, matrix, matrix), matrix)
    # Output and row sums (512 bytes, not read); then output and two products.
    assert estimate(sketch.module([y])) == 12 * KB


def test_items_of_a_split_are_views() -> None:
    sketch = Sketch()
    x, w = square(sketch, "x"), square(sketch, "w")
    split = sketch.op(aten.split.Tensor, sketch.op(aten.mm.default, x, w), 16, 1)
    halves = [sketch.graph.call_function(operator.getitem, (split, i)) for i in range(2)]
    for i, half in enumerate(halves):
        half.meta["val"] = split.meta["val"][i]
    y = sketch.op(aten.mul.Tensor, *halves)
    assert estimate(sketch.module([y])) == 6 * KB


def test_what_is_scattered_is_whole_before_it_is_read() -> None:
    def run(grad: Tensor, index: Tensor) -> Tensor:
        total = torch.zeros(256, 32, dtype=torch.float32).index_put([index], grad.float(), accumulate=True)
        return total.to(torch.bfloat16)

    grad = torch.empty(64, 32, dtype=torch.bfloat16)
    gm = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="fake")(
        grad, torch.zeros(64, dtype=torch.int64)
    )
    # The table in float32 and in bfloat16; the gradient has died in between.
    assert estimate(gm) == (32 + 16) * KB
    assert estimate(gm, {"grad_1"}) == (32 + 16 - 4) * KB


def test_of_the_orders_that_inductor_tries_the_best_is_taken() -> None:
    sketch = Sketch()
    x, w = square(sketch, "x"), sketch.input("w", 32, 256)
    back = sketch.input("back", 256, 32)
    wide = [sketch.op(aten.mm.default, x, w) for _ in range(3)]  # 32 KB each
    narrow = [sketch.op(aten.mm.default, value, back) for value in wide]
    # Depth first: one of the wide ones at a time, with three narrow results.
    assert estimate(sketch.module(narrow)) == (32 + 3 * 4) * KB


def test_copies_into_inputs_allocate_nothing_and_stay_behind_their_readers() -> None:
    sketch = Sketch()
    x, w = square(sketch, "x"), square(sketch, "w")
    product = sketch.op(aten.mm.default, x, w)
    copied = sketch.op(aten.copy_.default, x, sketch.op(aten.mm.default, product, w))
    gm = sketch.module([copied])
    assert estimate(gm) == 8 * KB


def flash_backward(kv_heads: int, sequence: int = 1024, *, batch: int = 1, rows_first: bool = True) -> fx.Node:
    def value(heads: int) -> Tensor:
        if not rows_first:
            return torch.empty(batch, heads, sequence, 128, dtype=torch.bfloat16, device="meta")
        return torch.empty(batch, sequence, heads, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    graph = fx.Graph()
    nodes = []
    for tensor in (value(32), value(32), value(kv_heads), value(kv_heads), value(32)):
        nodes.append(graph.placeholder("x"))
        nodes[-1].meta["val"] = tensor
    node = graph.call_function(aten._scaled_dot_product_flash_attention_backward.default, tuple(nodes))
    node.meta["val"] = tuple(n.meta["val"] for n in nodes[1:4])
    return node


def test_flash_attention_backward_sums_dq_in_float32_and_expands_heads() -> None:
    accumulated = 4 * 32 * 1024 * (128 + 1)
    assert hidden_bytes(flash_backward(32)) == accumulated
    assert hidden_bytes(flash_backward(8)) == accumulated + 2 * 2 * 32 * 1024 * 128
    assert hidden_bytes(flash_backward(32, 1000)) == 4 * 32 * 1024 * (128 + 1)  # rows are rounded up to 128
    copied = 2 * 2 * 32 * 1024 * 128  # dO and O
    assert hidden_bytes(flash_backward(32, rows_first=False)) == accumulated + copied
    node = flash_backward(8)
    results = sum(t.numel() * 2 for t in node.meta["val"])
    assert estimate_temp_bytes([node], [node]) == hidden_bytes(node) + results


def test_deterministic_flash_attention_backward_has_a_sum_of_dq_for_each_split() -> None:
    """Of 132 multiprocessors, as an H100 has."""
    with deterministic():
        assert hidden_bytes(flash_backward(32)) == 4 * 32 * 1024 * (5 * 128 + 1)
        assert hidden_bytes(flash_backward(32, batch=2)) == 2 * 4 * 32 * 1024 * (3 * 128 + 1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert hidden_bytes(flash_backward(32)) == 4 * 32 * 1024 * (128 + 1)


def test_varlen_flash_attention_backward_has_128_rows_more_for_each_sequence() -> None:
    out, key = (meta(n, h, 64, dtype=torch.bfloat16) for n, h in ((1000, 16), (1200, 4)))
    ends = meta(4, dtype=torch.int32)
    node = call(aten._flash_attention_backward.default, out, out, key, key, out, meta(16, 1000), ends, ends)
    expanded = 2 * 2 * 16 * 1200 * 64
    assert hidden_bytes(node) == 4 * 16 * (1000 + 3 * 128) * (64 + 1) + expanded


def call(target: Callable[..., object], *args: object, **kwargs: object) -> fx.Node:
    """A node whose tensors are placeholders."""
    graph = fx.Graph()

    def known(value: object) -> Any:
        if isinstance(value, list):
            return [known(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    return graph.call_function(target, tuple(map(known, args)), {k: known(v) for k, v in kwargs.items()})


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


PLACES = meta(8, 16, dtype=torch.int64)
EXPANDED = meta(8, 1, dtype=torch.int64).expand(8, 16)
MASK = meta(8, 16, dtype=torch.bool)


@pytest.mark.parametrize(
    ("node", "fast", "sorted_places"),
    [
        (call(aten.index_put.default, meta(99), [PLACES], meta(8, 16), True), 0, 128),
        (call(aten.index_put.default, meta(99), [PLACES], meta(8, 16)), 0, 128),
        (call(aten.index_put.default, meta(99, dtype=torch.bfloat16), [PLACES], meta(8, 16), True), 128, 128),
        (call(aten.index_put.default, meta(9, 9), [PLACES[:, :1], None, PLACES[:1]], meta(8, 16), True), 0, 128),
        (call(aten.index_put_.default, meta(8, 16), [MASK], meta()), 0, 0),  # Inductor fills masked elements
        (call(aten.index_put_.default, meta(8, 16), [MASK], meta(128)), 0, 128),
        (call(aten._unsafe_index_put.default, meta(99), [PLACES], meta(8, 16), True), 0, 128),
        (call(aten._unsafe_masked_index_put_accumulate.default, meta(99), MASK, [PLACES], meta(8, 16)), 0, 128),
        (call(aten.scatter_add.default, meta(8, 16), 1, PLACES, meta(8, 16)), 0, 128),
        (call(aten.scatter_add.default, meta(8, 16), -2, EXPANDED, meta(8, 16)), 0, 8),
        (call(aten.scatter_add.default, meta(8, 16), 1, EXPANDED, meta(8, 16)), 0, 128),
        (call(aten.scatter.src, meta(8, 16), 1, PLACES, meta(8, 16)), 0, 128),
        (call(aten.scatter.value, meta(8, 16), 1, PLACES, 0.0), 0, 0),
    ],
)
def test_scatters_sort_their_places_under_deterministic_algorithms(
    node: fx.Node, fast: int, sorted_places: int
) -> None:
    assert hidden_bytes(node) == 48 * fast
    with deterministic():
        assert hidden_bytes(node) == 48 * sorted_places


@pytest.mark.parametrize(
    ("shape", "dim", "nbytes"),
    [
        ((8192,), -1, 8192 * 20),
        ((1, 8192), 1, 8192 * 20),
        ((4096, 64), 0, 0),  # sorted where they are
        ((4, 1 << 20), 1, (1 << 20) * 20),  # one row at a time
        ((4, 8192), 1, 4 * 8192 * 32),
        ((128, 8192), -1, 128 * 8192 * 20),
        ((), -1, 0),
    ],
)
def test_a_sort_has_buffers_of_keys_and_places(shape: tuple[int, ...], dim: int, nbytes: int) -> None:
    assert hidden_bytes(call(aten.sort.stable, meta(*shape), stable=True, dim=dim)) == nbytes


def test_cudnn_attention_backward_takes_what_flash_attention_does_rows_first() -> None:
    def value(heads: int) -> Tensor:
        return meta(2, heads, 1000, 64, dtype=torch.bfloat16)

    target = aten._scaled_dot_product_cudnn_attention_backward.default
    summed, expanded = 4 * 2 * 32 * 1024 * (64 + 1), 2 * 2 * 2 * 32 * 1000 * 64
    assert hidden_bytes(call(target, *(value(32) for _ in range(5)))) == summed
    fewer = call(target, value(32), value(32), value(8), value(8), value(32))
    assert hidden_bytes(fewer) == summed + expanded
    with deterministic():
        assert hidden_bytes(fewer) == summed + expanded


def test_what_is_not_known_of_a_call_hides_nothing() -> None:
    q = meta(1, 4, 256, 64, dtype=torch.bfloat16)
    target = aten._scaled_dot_product_flash_attention_backward.default
    assert hidden_bytes(call(target, None, q, q, q, None)) == 0
    assert hidden_bytes(call(target, grad_out=q, query=q, key=q, value=q, out=q)) == 0


def test_symbolic_sizes_take_what_their_hints_do_and_no_guard_is_added() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        return F.softmax(F.silu(x @ w) @ w.t(), -1)

    x, w = torch.randn(6, 16), torch.randn(16, 24)
    table = select_decomp_table()
    graphs = [make_fx(run, decomposition_table=table, tracing_mode=mode)(x, w) for mode in ("symbolic", "fake")]
    shape_env = graphs[0].graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    before = (len(shape_env.guards), dict(shape_env.replacements), len(shape_env.axioms))
    found, expected = (estimate(gm, {"x_1"}) for gm in graphs)
    assert (len(shape_env.guards), dict(shape_env.replacements), len(shape_env.axioms)) == before
    assert found == expected > 0


def test_inputs_die_in_their_last_reader_unless_somebody_holds_them() -> None:
    captured = tiny_tower()
    forward, backward = captured.forward, captured.backward
    # Everything that segments hand on is saved too, but the first layer's output: the second one saves its sum.
    down = dying_inputs(forward.gm, forward.segmentation)
    assert {name: len(found) for name, found in down.items() if found} == {"layers_1": 1}
    saved = {n.name for c in forward.saved.candidates for n in c.nodes}
    dying = dying_inputs(backward.gm, backward.segmentation, saved)
    segments = backward.segmentation.segments
    for i, segment in enumerate(segments):
        later = {v.name for s in segments[i + 1 :] for v in s.inputs}
        inside = {v.name for v in segment.inputs if v.op == "call_function" or v.name in saved}
        assert dying[segment.name] <= inside - later
        assert dying[segment.name] & saved


# -- against Inductor --------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Compiled segments as they run: which storages the variables of the generated code hold at each of its lines."""

    inputs: dict[tuple[str, str], list[tuple[str, int, int]]] = field(default_factory=dict)
    lines: dict[tuple[str, str], list[dict[int, int]]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        compile_segment = SegmentCompiler.compile

        def watched(compiler: SegmentCompiler, gm: fx.GraphModule, segment: Segment, call: Any, kwargs: Any) -> None:
            compile_segment(compiler, gm, segment, call, kwargs)
            call.fn = self._wrap("backward" if kwargs.get("is_backward") else "forward", segment, call.fn)

        # What Inductor does on CPUs only: it concatenates in kernels of their own, and writes results of exp, tanh and
        # the like to memory that are read more than once.
        with (
            inductor_config.patch(force_pointwise_cat=True, fx_graph_cache=False),
            mock.patch.object(ir, "is_cpu", lambda _: False),
            mock.patch.object(SegmentCompiler, "compile", watched),
        ):
            yield

    def _wrap(self, what: str, segment: Segment, fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def run(args: list[Any]) -> Any:
            self.inputs[what, segment.name] = [
                (v.name, a.untyped_storage()._cdata, a.untyped_storage().nbytes())
                for v, a in zip(segment.inputs, args, strict=True)
                if isinstance(a, Tensor)
            ]
            seen = self.lines[what, segment.name] = []

            def line(frame: Any, event: str, _: Any) -> Any:
                seen.append(
                    {
                        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
                        for t in tree_leaves(list(frame.f_locals.values()))
                        if isinstance(t, Tensor)
                    }
                )
                return line

            def enter(frame: Any, event: str, _: Any) -> Any:
                generated = frame.f_code.co_name == "call" and "args" in frame.f_locals
                return line if generated and "torchinductor" in frame.f_code.co_filename else None

            before = sys.gettrace()
            sys.settrace(enter)
            try:
                return fn(args)
            finally:
                sys.settrace(before)

        return run

    def temp_bytes(self, what: str, name: str, dying: Collection[str]) -> int:
        """``SegmentStep.temp_bytes`` as it was seen."""
        inputs = self.inputs[what, name]
        held = {key for value, key, _ in inputs if value not in dying}
        before = {key: nbytes for value, key, nbytes in inputs if value in dying and key not in held}
        # The first line still holds the list of inputs.
        live = [sum(nbytes for key, nbytes in line.items() if key not in held) for line in self.lines[what, name][1:]]
        return max(live) - sum(before.values())


def of_segments(state: Any, handed_over: Collection[str] = (), donations: Donations | None = None) -> dict[str, int]:
    """Segment -> estimate."""
    dying = dying_inputs(state.gm, state.segmentation, handed_over)
    return {
        s.name: segment_temp_bytes(s, dying[s.name], (donations or {}).get(s.name, ()))
        for s in state.segmentation.segments
    }


def temp_bytes(captured: Captured) -> dict[tuple[str, str], tuple[int, frozenset[str]]]:
    """Segment -> estimate (without what GPU kernels hide), and what dies in it."""
    found = {}
    handed_over = {n.name for n in captured.backward.donatable}
    with mock.patch.object(segment_kernels, "hidden_bytes", lambda node: 0):
        for what, state, handed in (("forward", captured.forward, ()), ("backward", captured.backward, handed_over)):
            dying = dying_inputs(state.gm, state.segmentation, handed)
            donations = captured.backward.donations if what == "backward" else None
            for name, nbytes in of_segments(state, handed, donations).items():
                found[what, name] = (nbytes, dying[name])
    return found


def compare(module: nn.Module, *inputs: Tensor) -> dict[tuple[str, str], tuple[int, int]]:
    """Segment -> what Inductor's code took, and the estimate."""
    watch = Watch()
    with watch.watching():
        captured = capture(module, *inputs, inner="inductor", loss=lambda loss: loss)
    return {key: (watch.temp_bytes(*key, dying), nbytes) for key, (nbytes, dying) in temp_bytes(captured).items()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16"])
@pytest.mark.parametrize(("name", "pieces"), [("stack", 1), slow("stack", 2), ("causal_lm", 1)])
def test_estimates_are_what_the_code_of_inductor_takes(name: str, pieces: int, dtype: str) -> None:
    pytest.importorskip("transformers")
    from benchmarks import schema, workloads

    vocabulary = 16 if name == "stack" else 2000
    case = schema.Case(
        name, layers=2, seq=512, batch=1, hidden=128, ffn=384, heads=4, kv_heads=2, head_dim=32, vocab=vocabulary,
        dtype=dtype, device="cpu", seed=0,
    )  # fmt: skip
    job = workloads.build_job(case, torch.device("cpu"))
    moved = (1 << 30) if pieces == 1 else 2 * MB if dtype == "float32" else MB
    defaults = CutSegments.__init__.__kwdefaults__
    assert defaults is not None
    with mock.patch.dict(defaults, max_moved=moved):
        found = compare(job.module, *job.inputs)
    assert len(found) >= 8 + 4 * (pieces - 1)
    for segment, (seen, estimated) in found.items():
        least = 0.8 if (name, pieces, dtype, *segment) in _OTHER_KERNELS else 0.98
        # 2 KB: a float32 for each row. More for halves of layers, where Inductor reduces over two dimensions at once.
        assert least * seen - 4 * KB <= estimated <= (1.1 if pieces == 1 else 1.25) * seen + 4 * KB, (segment, found)


# Inductor makes one kernel where there are two here, and so frees later. It joins the columns of both norms that read
# the model's input (far apart). On CPUs it also joins the embedding's gradient and its conversion.
_OTHER_KERNELS = {
    ("stack", 2, "float32", "backward", "decoder_layers_0_1"),
    ("stack", 2, "bfloat16", "backward", "decoder_layers_0_1"),
    ("causal_lm", 1, "bfloat16", "backward", "segment_1"),
}


# -- against an H200 ---------------------------------------------------------------------------------------------------

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-21-h200-activations.json"


class _Traced(Exception):
    """Raised when the graphs are there: fake tensors cannot run them."""


def traced(case: Any, **options: Any) -> tuple[Any, Any, list[Any]]:
    """The states of forward and backward and the offload candidates of a benchmark's case, without any memory."""
    from benchmarks import workloads

    states: dict[str, Any] = {}
    offload_candidates: list[Any] = []
    run_passes, rank = build.run_passes, build.rank_offload_candidates

    def record_state(steps: Any, state: Any, what: str) -> Any:
        states[what] = state
        return run_passes(steps, state, what)

    def rank_and_leave(found: list[Any], *args: Any) -> None:
        rank(found, *args)
        offload_candidates.extend(found)
        raise _Traced

    with (
        mock.patch.object(workloads, "_fill_weights"),
        mock.patch.object(build, "run_passes", record_state),
        mock.patch.object(build, "rank_offload_candidates", rank_and_leave),
        mock.patch.object(SegmentCompiler, "compile"),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        job = workloads.build_job(case, torch.device("cpu"))
        options = {"device_types": ("cpu",), "inner": "inductor", "policy": "keep_all", **options}
        with pytest.raises(Exception, match="_Traced"):
            torch.compile(job.module, backend="fxoffload", options=options)(*job.inputs)
    for node in states["backward"].gm.graph.nodes:
        if node.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            node.target = aten._scaled_dot_product_flash_attention_backward.default
    return states["forward"], states["backward"], offload_candidates


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stack", "causal_lm"])
def test_predicted_peaks_are_what_an_h200_took(name: str) -> None:
    pytest.importorskip("transformers")
    from benchmarks import schema

    records = {
        r["variant"]["label"]: r for r in json.loads(RESULTS.read_text())["records"] if r["case"]["name"] == name
    }
    forward, backward, offload_candidates = traced(schema.Case(**records["inductor"]["case"] | {"device": "cpu"}))
    saved = {n.name for n in backward.donatable}
    step = from_graphs(
        forward.outer,
        backward.outer,
        offload_candidates,
        num_user_outputs=forward.num_user_outputs,
        forward_temp_bytes=of_segments(forward),
        backward_temp_bytes=of_segments(backward, saved, backward.donations),
    )
    # Without a plan, what the forward saved last stayed in those runs: of a model with a head, the head's. Windows
    # follow the largest segment of a layer.
    last = max(i for i, s in enumerate(step.forward) if s.layer)
    sizes = {c.name: c.moved_bytes or 0 for c in step.candidates}
    head = {n for s in step.forward[last + 1 :] for n in s.writes}
    of_last = {n for n in step.forward[last].writes if n in sizes}
    is_heavy = 2 * sum(sizes.get(n, 0) for n in head) >= sum(sizes[n] for n in of_last)
    stays = head if is_heavy else head | of_last
    nbytes = {c.name: c.moved_bytes or 0 for c in step.candidates}
    needs = Counter[int]()
    for take in step.takes or ():
        needs[take.before] += nbytes[take.storage]
    down = max(sum(nbytes.get(n, 0) for n in s.writes) for s in step.forward if s.layer)
    up = max(needs[i] for i, s in enumerate(step.backward) if s.layer)
    for label in ("keep_all", "offload_all"):
        simulation = simulate(
            step,
            [label == "offload_all" and name not in stays for name in nbytes],
            copies=ConstantRates(d2h_gb_per_s=55, h2d_gb_per_s=55),
            windows=everywhere(step, down, up * 3 // 2),
        )
        # Found: 0.1 %, in all four. Since then the stack's layers are cut elsewhere: offload_all takes 1.7 % less.
        measured = records[label]["result"]["memory"]["peak_bytes"]
        assert simulation.peak_bytes == pytest.approx(measured, rel=0.01 if label == "keep_all" else 0.02), label


# Rows of that run (2026-11-21, PyTorch 2.11, 16 layers of Qwen3-8B's shape at 16,384 tokens): MiB above the live bytes
# at the segment's beginning, of layers whose norms, rotary embedding and product with silu are recomputed. (The
# backward's first is left out: it began with another op then.)
_MEASURED = {
    **{f"decoder_layers_{i}": 1536 for i in (14, 13, 12, 11, 10, 7, 5, 4, 3, 2, 1, 0)},
    **{f"decoder_layers_{i}_1": 1026 for i in (14, 13, 12, 11, 10, 9, 7, 6, 5, 4, 3, 2, 1)},
    "decoder_layers_15_1": 998,
}


@pytest.mark.slow
def test_backward_segments_that_recompute_take_what_they_took_on_an_h200() -> None:
    pytest.importorskip("transformers")
    from benchmarks import schema

    case = schema.Case(device="cpu", name="stack", layers=16, seq=16384)
    _, backward, _ = traced(case, recompute="cheap")
    saved = {n.name for n in backward.donatable}
    found = of_segments(backward, saved, backward.donations)
    # Found: exact, and up to 4 % where constants are made.
    assert {name: found[name] / MB for name in _MEASURED} == pytest.approx(_MEASURED, rel=0.05)


# -- parts of a value --------------------------------------------------------------------------------------------------


def rotated(gradient: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """The backward of a rotary embedding, as AOTAutograd traces it."""
    part = gradient * sin
    low = aten.slice_scatter.default(torch.zeros_like(gradient), -part[..., :64], 3, 64, sys.maxsize)
    high = aten.slice_scatter.default(torch.zeros_like(gradient), part[..., 64:], 3, 0, 64)
    return low + high + gradient * cos


def normed(gradient: Tensor, value: Tensor, weight: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The backward of the RMSNorm of every head."""
    rows = gradient.permute(0, 2, 1, 3)
    inner, shown = (rows * weight).float(), value.view(rows.shape).float()
    scale = torch.rsqrt(mean + 1e-6)
    of_weight = (rows * (shown * scale).to(torch.bfloat16)).sum((0, 1, 2), keepdim=True)
    share = (inner * shown).sum(3, keepdim=True) * -0.5 * scale.pow(3)
    found = inner * scale + share.expand_as(inner) / 128 * (shown * 2.0)
    return found.to(torch.bfloat16).clone(memory_format=torch.contiguous_format).view(value.shape), of_weight


def projected(
    dk: Tensor,
    dq: Tensor,
    dv: Tensor,
    sin: Tensor,
    cos: Tensor,
    x: Tensor,
    wv: Tensor,
    wk: Tensor,
    wq: Tensor,
    gk: Tensor,
    gq: Tensor,
    k: Tensor,
    q: Tensor,
    mean_k: Tensor,
    mean_q: Tensor,
) -> tuple[Tensor, ...]:
    """From the gradients of attention's inputs to those of the projections."""
    turned_k, turned_q = rotated(dk, sin, cos), rotated(dq, sin, cos)
    v2 = dv.permute(0, 2, 1, 3).reshape(x.shape[0], -1)
    of_wv, from_v = v2.t() @ x, v2 @ wv
    k2, of_gk = normed(turned_k, k, gk, mean_k)
    of_wk, from_k = k2.t() @ x, k2 @ wk
    q2, of_gq = normed(turned_q, q, gq, mean_q)
    of_wq, from_q = q2.t() @ x, q2 @ wq
    return of_wv, of_gk, of_wk, of_gq, of_wq, from_v + from_k + from_q


def test_what_is_read_in_parts_is_written_when_it_is_read_twice() -> None:
    """Qwen3-8B's attention at 65,536 tokens on an H200 (2026-11-22, torch 2.11): the segment took 904 MiB. Inductor
    writes the rotated gradients, in kernels of their own, and takes first come first served as the order."""
    s, h, kv, d, e = 65_536, 32, 8, 128, 4096

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    with FakeTensorMode():
        heads = [of(1, s, n, d).transpose(1, 2) for n in (kv, h, kv)]
        weights = [of(n * d, e) for n in (kv, kv, h)]
        means = [of(1, s, n, 1, dtype=torch.float32) for n in (kv, h)]
        args = (*heads, of(1, 1, s, d), of(1, 1, s, d), of(s, e), *weights, of(d), of(d), of(s, kv * d), of(s, h * d))
        gm = make_fx(projected)(*args, *means)
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    dying = {names[i] for i in (0, 1, 2, 5, 11, 12, 13, 14)}
    assert estimate(gm, dying, dying) == 904 * MB
