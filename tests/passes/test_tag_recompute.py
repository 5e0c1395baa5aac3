from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from fxoffload.analysis.labels import LAYER_KEY
from fxoffload.options import Recompute
from fxoffload.passes.tag_recompute import LEVELS, TagRecompute
from tests.capture import Block, Captured, Sketch, Tower, capture, example_input, rehearsal_options, tiny_tower
from tests.support import assert_equal

aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def cheap(model: nn.Module, *inputs: Tensor, **options: object) -> Captured:
    return capture(model, *inputs, recompute="cheap", **options)


def tags(captured: Captured) -> dict[str, set[object]]:
    """Op -> the tags of its nodes in the joint graph."""
    found: dict[str, set[object]] = {}
    for node in captured.joint.graph.nodes:
        if "recompute" in node.meta:
            found.setdefault(str(node.target), set()).add(node.meta["recompute"])
    return found


def saved_names(captured: Captured) -> Counter[str]:
    """Ops whose results the forward saves."""
    return Counter(c.producer for c in captured.forward.saved.candidates)


def test_the_default_tags_nothing() -> None:
    assert tags(tiny_tower()) == {}
    assert TagRecompute("default")(tiny_tower().joint).num_recomputed == 0
    assert set(LEVELS) <= set(Recompute.__args__)


@pytest.mark.slow
def test_products_are_saved_and_the_rest_of_a_layer_is_not() -> None:
    captured = cheap(Tower(3), example_input())
    found = tags(captured)
    assert found["aten.addmm.default"] == {SAVE}
    assert RECOMPUTE in found["aten.mul.Tensor"]
    saved = saved_names(captured)
    assert not any("mul" in op or "gelu" in op or "erf" in op for op in saved), saved
    assert sum(saved.values()) < len(tiny_tower(3).forward.saved.candidates)


def test_what_is_computed_from_gradients_is_not_tagged() -> None:
    captured = cheap(Tower(2), example_input())
    behind: set[torch.fx.Node] = set()
    for node in captured.joint.graph.nodes:
        if "tangent" in node.name or behind.intersection(node.all_input_nodes):
            behind.add(node)
    assert behind
    assert not any("ac_graph_id" in n.meta for n in behind)


def test_layers_are_regions_of_their_own() -> None:
    """What one hands to the next is saved: otherwise the backward would start from the first layer again."""
    captured = cheap(Tower(3), example_input())
    regions = {n.meta[LAYER_KEY]: n.meta["ac_graph_id"] for n in captured.joint.graph.nodes if "ac_graph_id" in n.meta}
    assert regions == {"layers.0": 1, "layers.1": 2, "layers.2": 3}
    backward = [m.num_ops for m in captured.outer_backward.children() if getattr(m, "layer", "")]
    assert max(backward) < 1.5 * min(backward), "the work of a layer does not grow with its depth"


def test_a_layer_on_its_own_is_one_region() -> None:
    captured = cheap(Block(), example_input())
    assert {n.meta["ac_graph_id"] for n in captured.joint.graph.nodes if "ac_graph_id" in n.meta} == {1}
    assert len(captured.forward.saved.candidates) < len(capture(Block(), example_input()).forward.saved.candidates)


class Mixed(nn.Module):
    """Dropout, a sort, BatchNorm's buffers, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(x.transpose(1, 2)).transpose(1, 2), 0.3)
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + torch.tanh(attended) * attended.sort(dim=-1).values.exp()


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["model", "layer"])
def test_random_numbers_sorts_attention_and_buffers(whole: bool) -> None:
    model: nn.Module = Tower(3, make=Mixed) if whole else Mixed()
    x = example_input()
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def observe(**options: str) -> dict[str, Tensor]:
        torch.compiler.reset()
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
        model.zero_grad()
        torch.manual_seed(3)
        module = torch.compile(model, backend="fxoffload", options=rehearsal_options(**options))
        loss = module(x).square().sum()
        loss.backward()
        seen = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **seen, **{n: b.clone() for n, b in model.named_buffers()}}

    assert_equal(observe(recompute="cheap"), observe(recompute="default"))


def test_a_users_policy_stands() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    first = sketch.op(aten.sin.default, x)
    second = sketch.op(aten.cos.default, first)
    gm = sketch.module([second])
    first.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    report = TagRecompute("cheap")(gm)
    assert first.meta["recompute"] is SAVE
    assert "ac_graph_id" not in first.meta
    assert second.meta["recompute"] is RECOMPUTE
    assert (report.num_saved, report.num_recomputed) == (0, 1)


def test_parts_follow_their_producer() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 4)
    pair = sketch.op(aten.sort.default, x)
    part = sketch.op(operator.getitem, pair, 0)
    gm = sketch.module([part])
    TagRecompute("cheap")(gm)
    assert pair.meta["recompute"] is part.meta["recompute"] is SAVE
    assert pair.meta["ac_graph_id"] == part.meta["ac_graph_id"]


def test_what_reads_an_overwritten_buffer_is_saved() -> None:
    sketch = Sketch()
    x, buffer = sketch.input("x", 4), sketch.input("buffer", 4)
    view = sketch.op(aten.view.default, buffer, [2, 2])
    read = sketch.op(aten.sin.default, view)
    free = sketch.op(aten.sin.default, x)
    sketch.op(aten.copy_.default, buffer, free)
    gm = sketch.module([read, free])
    TagRecompute("cheap")(gm)
    assert "recompute" not in view.meta
    assert read.meta["recompute"] is SAVE
    assert free.meta["recompute"] is RECOMPUTE


def test_an_unknown_level_lists_the_known() -> None:
    with pytest.raises(ValueError, match="unknown recompute level 'all'; the levels are default, cheap"):
        TagRecompute("all")
