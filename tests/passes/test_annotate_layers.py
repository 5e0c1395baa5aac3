from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxoffload
from fxoffload.analysis.labels import LAYER_KEY
from fxoffload.passes.annotate_layers import AnnotateLayers
from tests.capture import WIDTH, Block, Captured, Sketch, Tower, capture, example_input, tiny_tower

aten = torch.ops.aten


def labels(gm: torch.fx.GraphModule, *, backward: bool | None = None) -> Counter[str | None]:
    """Label -> number of ops that carry it."""
    found: Counter[str | None] = Counter()
    for node in gm.graph.nodes:
        is_backward = node.meta.get("partitioner_tag") == "is_backward" or "fwd_nn_module_stack" in node.meta
        if node.op == "call_function" and backward in (None, is_backward):
            found[node.meta.get(LAYER_KEY)] += 1
    return found


# -- hand-made graphs ------------------------------------------------------------------------------------------------


def test_a_label_is_the_path_up_to_the_index() -> None:
    sketch = Sketch()
    x = sketch.chain(sketch.input("x", 4), 3, path="embed")
    x = sketch.chain(x, 4, path="model.layers.0.mlp.up")
    x = sketch.chain(x, 4, path="model.layers.1.mlp.up")
    gm = sketch.module([sketch.chain(x, 2, path="norm")])
    report = AnnotateLayers()(gm)
    assert report.layers == ("model.layers.0", "model.layers.1")
    assert report.source == "modules"
    assert labels(gm) == {"model.layers.0": 4, "model.layers.1": 4, None: 5}


@pytest.mark.parametrize("index", ["layers.{}", "transformer.h.{}", "blocks.{}", "encoder.layer.{}", "a.b.c.block.{}"])
def test_any_container_with_an_index_is_a_stack(index: str) -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    for i in range(3):
        x = sketch.chain(x, 4, path=index.format(i) + ".attention")
    assert AnnotateLayers()(sketch.module([x])).layers == tuple(index.format(i) for i in range(3))


def test_wrappers_are_no_part_of_a_path() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    for i in range(2):
        for path in (f"_orig_mod.layers.{i}._checkpoint_wrapped_module.mlp", f"layers.{i}._fsdp_wrapped_module"):
            x = sketch.chain(x, 3, path=path)
    assert AnnotateLayers()(sketch.module([x])).layers == ("layers.0", "layers.1")


def test_an_encoders_and_a_decoders_layers_are_two_stacks() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    for side in ("encoder", "decoder"):
        for i in range(2):
            x = sketch.chain(x, 4, path=f"{side}.block.{i}.layer.0.attention")
    report = AnnotateLayers()(sketch.module([x]))
    assert report.layers == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")


def test_experts_are_no_layers() -> None:
    """Two layers, so each is heavier than a third of the ops: the search for nested blocks looks inside."""
    sketch = Sketch()
    x = sketch.input("x", 4)
    for i in range(2):
        x = sketch.chain(x, 2, path=f"layers.{i}.attention")
        for expert in range(4):
            x = sketch.chain(x, 4, path=f"layers.{i}.mlp.experts.{expert}.up")
    gm = sketch.module([x])
    assert AnnotateLayers()(gm).layers == ("layers.0", "layers.1")
    assert labels(gm) == {"layers.0": 18, "layers.1": 18}


def test_a_stage_that_holds_the_blocks_is_no_layer() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    for stage, depth in enumerate((2, 6, 2)):
        for i in range(depth):
            x = sketch.chain(x, 4, path=f"stages.{stage}.blocks.{i}.mlp")
    report = AnnotateLayers()(sketch.module([x]))
    assert report.layers == tuple(f"stages.{s}.blocks.{i}" for s, d in enumerate((2, 6, 2)) for i in range(d))


def test_what_holds_all_layers_is_none() -> None:
    """Its own ops stand at both ends: a label of theirs would span all others, and the cuts would collapse."""
    sketch = Sketch()
    x = sketch.chain(sketch.input("x", 4), 2, path="models.0.embed")
    for i in range(3):
        x = sketch.chain(x, 4, path=f"models.0.layers.{i}.mlp")
    gm = sketch.module([sketch.chain(x, 2, path="models.0.norm")])
    assert AnnotateLayers()(gm).layers == tuple(f"models.0.layers.{i}" for i in range(3))
    assert labels(gm) == {**{f"models.0.layers.{i}": 4 for i in range(3)}, None: 4}


def test_the_rest_of_a_stage_is_a_layer() -> None:
    """Code that only some of the layers share keeps a label, and so may be recomputed."""
    sketch = Sketch()
    x = sketch.input("x", 4)
    for stage in range(2):
        for i in range(3):
            x = sketch.chain(x, 4, path=f"stages.{stage}.blocks.{i}.mlp")
        x = sketch.chain(x, 3, path=f"stages.{stage}.downsample")
    gm = sketch.module([x])
    AnnotateLayers()(gm)
    assert labels(gm)["stages.0"] == labels(gm)["stages.1"] == 3 and None not in labels(gm)


def test_layers_among_the_arguments_of_a_function() -> None:
    """``run(*layers)``: not all that is in ``args`` is in the first of them."""
    sketch = Sketch()
    x = sketch.input("x", 4)
    for i in range(2):
        node = sketch.chain(x, 1)
        for _ in range(4):
            node = sketch.op(aten.sin.default, node)
            node.meta["nn_module_stack"] = {"a": (f"L['args'][{i}]", "Block"), "b": (f"L['args'][{i}].up", "Linear")}
        x = node
    assert AnnotateLayers()(sketch.module([x])).layers == ("args.0", "args.1")


def test_two_heavy_layers_of_unlike_parts_stay_layers() -> None:
    """T5's ``block.N.layer.M`` are two sublayers, and they are of different classes."""
    sketch = Sketch()
    x = sketch.input("x", 4)
    for i in range(2):
        for part, name in enumerate(("SelfAttention", "FeedForward")):
            for _ in range(6):
                node = sketch.op(aten.sin.default, x)
                node.meta["nn_module_stack"] = {
                    "a": (f"block.{i}", "T5Block"),
                    "b": (f"block.{i}.layer.{part}", name),
                }
                x = node
    assert AnnotateLayers()(sketch.module([x])).layers == ("block.0", "block.1")


def test_the_backward_takes_the_forwards_labels() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    x = sketch.chain(x, 4, path="layers.0.mlp")
    x = sketch.chain(x, 4, path="layers.1.mlp")
    g = sketch.chain(sketch.input("tangents_1", 4), 4, path="layers.1.mlp", backward=True)
    g = sketch.chain(g, 4, path="layers.0.mlp", backward=True)
    gm = sketch.module([x, g])
    AnnotateLayers()(gm)
    assert labels(gm, backward=True) == {"layers.0": 4, "layers.1": 4}


def test_a_backward_op_without_a_path_takes_that_of_its_forward_op() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    forward = []
    for i in range(2):
        x = sketch.chain(x, 4, path=f"layers.{i}.mlp")
        x.meta["seq_nr"] = 10 + i
        forward.append(x)
    g = sketch.input("tangents_1", 4)
    backward = []
    for i in (1, 0, 7):  # no node of the forward has number 17
        g = sketch.op(aten.neg.default, g, backward=True)
        g.meta["seq_nr"] = 10 + i
        backward.append(g)
    AnnotateLayers()(sketch.module([x, g]))
    assert [n.meta.get(LAYER_KEY) for n in backward] == ["layers.1", "layers.0", None]


def test_repeats_where_modules_say_nothing() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 4)
    x = sketch.op(aten.exp.default, x)
    for _ in range(4):
        x = sketch.op(aten.mm.default, sketch.chain(x, 12), x)
    gm = sketch.module([sketch.op(aten.exp.default, x)])
    report = AnnotateLayers()(gm)
    assert report.source == "repeats"
    assert report.layers == tuple(f"repeat.{i}" for i in range(4))
    assert labels(gm) == {**{f"repeat.{i}": 13 for i in range(4)}, None: 2}


@pytest.mark.parametrize("repeats", [1, 2])
def test_too_few_repeats_are_no_stack(repeats: int) -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 4)
    for _ in range(repeats):
        x = sketch.op(aten.mm.default, sketch.chain(x, 12), x)
    gm = sketch.module([x])
    report = AnnotateLayers()(gm)
    assert (report.layers, report.source) == ((), "none")
    assert labels(gm) == {None: 13 * repeats}


def test_one_layer_is_no_stack() -> None:
    sketch = Sketch()
    gm = sketch.module([sketch.chain(sketch.input("x", 4), 5, path="layers.0.mlp")])
    assert AnnotateLayers()(gm).layers == ()
    assert labels(gm) == {None: 5}


# -- real joint graphs -----------------------------------------------------------------------------------------------


def decorated(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As transformers does it since 5.24: Dynamo finds the model in ``args``."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **kwargs)

    return wrapper


class Decorated(Tower):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Tower(2, "block")
        self.decoder = Tower(3, "block")
        self.between = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.between(self.encoder(x)))


class ExpertBlock(nn.Module):
    """Every expert runs on every token, so nothing depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + sum(F.gelu(expert(y)) for expert in self.experts)


class Looped(nn.Module):
    """One block, called again and again: its module path is the same each time."""

    def __init__(self, times: int = 4) -> None:
        super().__init__()
        self.times = times
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.block(x)
        return x


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*(Block() for _ in range(depth))) for depth in (1, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.slow_except(
    "<lambda>-expected0-modules",
    "<lambda>-expected3-modules",
    "EncoderDecoder-expected7-modules",
    "Looped-expected9-repeats",
    "Flat-expected10-none",
)
@pytest.mark.parametrize(
    ("make", "expected", "source"),
    [
        (lambda: Tower(3, "layers"), tuple(f"layers.{i}" for i in range(3)), "modules"),
        (lambda: Decorated(3), tuple(f"layers.{i}" for i in range(3)), "modules"),
        (lambda: nn.Sequential(Tower(3)), tuple(f"0.layers.{i}" for i in range(3)), "modules"),
        (lambda: nn.Sequential(*(Block() for _ in range(3))), ("0", "1", "2"), "modules"),
        (lambda: Tower(2, "h"), ("h.0", "h.1"), "modules"),
        (lambda: Tower(2, "blocks"), ("blocks.0", "blocks.1"), "modules"),
        (lambda: Tower(2, make=ExpertBlock), ("layers.0", "layers.1"), "modules"),
        (
            EncoderDecoder,
            (*(f"encoder.block.{i}" for i in range(2)), *(f"decoder.block.{i}" for i in range(3))),
            "modules",
        ),
        (Stages, ("stages.0.0", *(f"stages.1.{i}" for i in range(4)), "stages.2.0"), "modules"),
        (Looped, tuple(f"repeat.{i}" for i in range(4)), "repeats"),
        (Flat, (), "none"),
    ],
)
def test_real_joint_graphs(make: Callable[[], nn.Module], expected: tuple[str, ...], source: str) -> None:
    found = capture(make(), example_input())
    assert found.layers.layers == expected
    assert found.layers.source == source
    assert found.graph.layer_names == expected
    for states in (found.forward, found.backward):
        layers = [s.layer for s in states.segmentation.segments if s.layer]
        assert sorted(layers) == sorted(expected)
    if not expected:
        assert len(found.forward.segmentation.segments) == len(found.backward.segmentation.segments) == 1


def test_nearly_every_op_of_a_layer_is_labelled_in_both_directions() -> None:
    found = tiny_tower()
    forward, backward = labels(found.joint, backward=False), labels(found.joint, backward=True)
    assert forward["layers.0"] == forward["layers.1"] >= 15
    assert backward["layers.0"] == backward["layers.1"] >= 30
    # The projections at both ends, and the sums of gradients where a residual branch begins.
    assert backward[None] <= 20


def test_a_layer_compiled_on_its_own_is_one_segment() -> None:
    found: Captured = capture(Block(), example_input())
    assert found.layers.layers == ()
    assert [s.name for s in found.forward.segmentation.segments] == ["segment"]
    assert found.graph in fxoffload.graphs()
