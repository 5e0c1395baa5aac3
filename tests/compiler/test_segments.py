from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.codecache import compiled_fx_graph_hash

import fxoffload
from fxoffload.analysis.segmentation import Segment
from fxoffload.compiler import segments
from fxoffload.compiler.segments import SegmentCall, SegmentCompiler, extract_segment
from fxoffload.errors import SegmentCompileError
from fxoffload.torch_private.aot_autograd import take_donated_placeholders
from fxoffload.torch_private.compile_context import segment_tracing_context
from fxoffload.torch_private.graphs import boxed_eager
from tests.capture import Block, Sketch, Tower, capture, example_input, rehearsal_options, tiny_tower

aten = torch.ops.aten


def compiled_counts(num_layers: int, **options: Any) -> tuple[int, int]:
    torch._dynamo.reset()
    fxoffload.reset_stats()
    capture(Tower(num_layers), example_input(), **options)
    found = fxoffload.stats()
    return found.num_segments_compiled, found.num_segments_reused


# -- reuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_number_of_compilations_does_not_grow_with_depth() -> None:
    at_4, at_12 = compiled_counts(4), compiled_counts(12)
    assert at_4[0] == at_12[0] <= 9
    assert sum(at_12) - sum(at_4) == at_12[1] - at_4[1] == 2 * 8


@pytest.mark.slow
def test_without_reuse_every_segment_is_compiled() -> None:
    compiled, reused = compiled_counts(4, disable=("segment_reuse",))
    assert (compiled, reused) == (2 * 6, 0)


def test_identical_segments_share_their_code() -> None:
    outer = tiny_tower(8).outer_forward
    fns = [outer.get_submodule(f"layers_{i}").fn for i in range(8)]
    assert len(set(map(id, fns[1:-1]))) == 1
    assert all(fn is not None for fn in fns)


def test_forward_and_backward_share_nothing() -> None:
    """They are compiled differently (donations, strides of the caller)."""
    sketch = Sketch()
    gm = sketch.module([sketch.op(aten.sin.default, sketch.input("x", 4))])
    segment = whole(gm)
    compiler = SegmentCompiler(inner="aot_eager", reuse=True)
    calls = [SegmentCall(segment) for _ in range(4)]
    for call, is_backward in zip(calls, (False, True, False, True), strict=True):
        compiler.compile(gm, segment, call, {"is_backward": is_backward})
    assert calls[0].fn is calls[2].fn is not calls[1].fn
    assert calls[1].fn is calls[3].fn


def test_what_is_donated_is_compiled_apart() -> None:
    sketch = Sketch()
    gm = sketch.module([sketch.op(aten.sin.default, sketch.input("x", 4))])
    segment = whole(gm)
    compiler = SegmentCompiler(inner="aot_eager", reuse=True)
    calls = [SegmentCall(segment), SegmentCall(segment, (0,)), SegmentCall(segment, (0,))]
    for call in calls:
        compiler.compile(gm, segment, call, {})
    assert calls[0].fn is not calls[1].fn is calls[2].fn


def whole(gm: fx.GraphModule, layer: str = "layers.7") -> Segment:
    nodes = tuple(n for n in gm.graph.nodes if n.op == "call_function")
    inputs = tuple(gm.graph.find_nodes(op="placeholder"))
    return Segment(layer.replace(".", "_"), layer, nodes, inputs, tuple(gm.graph.output_node().all_input_nodes))


# -- calls -----------------------------------------------------------------------------------------------------------


def test_a_call_says_what_it_writes() -> None:
    sketch = Sketch()
    x, buffer = sketch.input("x", 4), sketch.input("buffer", 4)
    sketch.op(aten.copy_.default, buffer, sketch.op(aten.sin.default, x))
    gm = sketch.module([])
    call = SegmentCall(whole(gm))
    assert (call.mutates, call.donates, call.num_ops) == ((1,), (), 2)
    assert "layer='layers.7', ops=2, mutates=(1,), donates=()" in repr(call)


def test_a_call_that_is_not_compiled_says_so() -> None:
    sketch = Sketch()
    gm = sketch.module([sketch.op(aten.sin.default, sketch.input("x", 4))])
    with pytest.raises(RuntimeError, match="not compiled yet"):
        SegmentCall(whole(gm))(torch.ones(4))


def test_compiled_segments_empty_their_inputs() -> None:
    outer = tiny_tower().outer_forward
    call = outer.get_submodule("segment_1")
    args: list[Any] = [torch.randn(4, 8, 16), torch.randn(8, 16), torch.randn(8)]
    results = call.fn(args)  # type: ignore[operator]
    assert args == []
    assert len(results) == 2


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_backward", "direction"), [(False, "forward"), (True, "backward")])
def test_a_failing_compile_names_the_layer(monkeypatch: pytest.MonkeyPatch, is_backward: bool, direction: str) -> None:
    def fail(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> None:
        raise NotImplementedError("no such op")

    monkeypatch.setattr(segments, "compile_fx_inner", fail)
    sketch = Sketch()
    gm = sketch.module([sketch.op(aten.sin.default, sketch.input("x", 4))])
    segment = whole(gm, "model.layers.7")
    compiler = SegmentCompiler(inner="inductor", reuse=True)
    with pytest.raises(SegmentCompileError) as caught:
        compiler.compile(gm, segment, SegmentCall(segment), {"is_backward": is_backward})
    assert caught.value.layer_name == "model.layers.7"
    text = str(caught.value)
    assert text.startswith(
        f"segment of model.layers.7: Inductor failed on the {direction} segment model_layers_7: NotImplementedError: "
        "no such op"
    )
    advice = text.split("no such op")[1]
    assert advice.index("FXOFFLOAD_DISABLE=1") < advice.index("on_error") < advice.index('disable"')
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_it_reaches_the_user_from_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_in_a_layer(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        if any(n.target is aten.var_mean.correction for n in gm.graph.nodes):
            raise AssertionError("out of registers")
        return boxed_eager(gm)

    monkeypatch.setattr(segments, "compile_fx_inner", fail_in_a_layer)
    model = torch.compile(Tower(2), backend="fxoffload", options=rehearsal_options(inner="inductor"))
    with pytest.raises(SegmentCompileError, match=r"segment of layers\.0: .* AssertionError: out of registers"):
        model(example_input())


def test_a_segment_without_a_layer_is_named_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(segments, "compile_fx_inner", fail)
    model = torch.compile(Block(), backend="fxoffload", options=rehearsal_options(inner="inductor"))
    with pytest.raises(SegmentCompileError, match="segment of segment: "):
        model(example_input())


# -- donation and the tracing context --------------------------------------------------------------------------------


def test_donation_reaches_inductors_cache_key() -> None:
    """Its key reads the generated code and ignores which inputs are donated: the names of the placeholders carry it."""
    state = tiny_tower().backward
    segment = next(s for s in state.segmentation.segments if s.layer)
    inputs = [v.meta["val"] for v in segment.inputs]
    donations = [(), (1,), (2,), (1, 2)]
    keys, codes = [], []
    for donated in donations:
        gm = extract_segment(state.gm, segment, donated)
        key, _ = compiled_fx_graph_hash(gm, inputs, {"is_backward": True}, [])
        keys.append(key)
        codes.append(gm.code)
    assert len(set(codes)) == len(donations)
    assert len(set(keys)) == len(donations)
    again, _ = compiled_fx_graph_hash(extract_segment(state.gm, segment, (1,)), inputs, {"is_backward": True}, [])
    assert again == keys[1]


def context(donated: list[int] | None) -> TracingContext:
    made = TracingContext(None)
    made.fw_metadata = SimpleNamespace(bw_donated_idxs=donated)  # type: ignore[assignment]
    made.output_strides = [(4, 1)]
    return made


@pytest.mark.parametrize("error", [False, True])
def test_the_tracing_context_is_as_before_after_a_segment(error: bool) -> None:
    whole_graph = [3, 5]
    made = context(whole_graph)
    with tracing(made), inductor_config.patch(custom_partitioner_fn="ours"):
        try:
            with segment_tracing_context((1,)):
                assert made.output_strides is None
                assert made.fw_metadata.bw_donated_idxs == [1]  # type: ignore[union-attr]
                assert inductor_config.custom_partitioner_fn is None
                made.output_strides = [(9, 9)]  # what compile_fx_inner leaves
                if error:
                    raise ValueError("compile failed")
        except ValueError:
            assert error
        assert made.output_strides == [(4, 1)]
        assert made.fw_metadata.bw_donated_idxs is whole_graph  # type: ignore[union-attr]
        assert inductor_config.custom_partitioner_fn == "ours"


def test_no_tracing_context_is_needed() -> None:
    with segment_tracing_context((1,)):
        assert TracingContext.try_get() is None


@pytest.mark.slow
def test_the_context_is_set_around_every_segment_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a real compile: each segment sees its own donated inputs, and AOTAutograd its strides afterwards."""
    seen: list[tuple[bool, list[int] | None, Any]] = []

    def look(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        found = TracingContext.get()
        assert found.fw_metadata is not None
        names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
        donated = [i for i, name in enumerate(names) if name.startswith("donated_")]
        assert donated == found.fw_metadata.bw_donated_idxs
        assert kwargs["static_input_idxs"] == ()
        seen.append((bool(kwargs.get("is_backward")), found.fw_metadata.bw_donated_idxs, found.output_strides))
        return boxed_eager(gm)

    monkeypatch.setattr(segments, "compile_fx_inner", look)
    found = capture(Tower(3), example_input(), inner="inductor")
    forward = [d for is_backward, d, _ in seen if not is_backward]
    backward = [d for is_backward, d, _ in seen if is_backward]
    assert forward and all(d == [] for d in forward)
    assert any(backward)
    assert all(strides is None for *_, strides in seen)
    assert any(found.backward.donations.values())


def test_aot_autograds_own_list_is_taken_and_emptied() -> None:
    """The list object is shared by all metadata of the graph, so it is emptied and not replaced."""
    idxs = [3, 5]
    with tracing(context(idxs)):
        assert take_donated_placeholders() == {3, 5}
        assert idxs == []
        assert take_donated_placeholders() == set()
    with tracing(context(None)):
        assert take_donated_placeholders() == set()
    assert take_donated_placeholders() == set()


def test_results_of_a_segment_are_those_of_its_ops() -> None:
    sketch = Sketch()
    x, y = sketch.input("x", 4), sketch.input("y", 4)
    a = sketch.op(aten.mul.Tensor, x, y)
    gm = sketch.module([sketch.op(aten.sin.default, a), a])
    segment = whole(gm)
    call = SegmentCall(segment)
    SegmentCompiler(inner="aot_eager", reuse=True).compile(gm, segment, call, {})
    one, two = torch.randn(4), torch.randn(4)
    expected: list[Tensor] = [(one * two).sin(), one * two]
    assert all(torch.equal(a, b) for a, b in zip(call(one, two), expected, strict=True))
