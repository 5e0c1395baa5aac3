"""Large values that are read next to contiguous ones become contiguous copies. Results are equal; others stay."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import fxoffload
from fxoffload.passes.match_layouts import MatchLayouts
from tests.capture import Sketch, rehearsal_options

aten = torch.ops.aten
SHAPE = (8, 256, 256)  # 2 MiB in float32


def bias_of(sketch: Sketch, shape: tuple[int, ...] = SHAPE) -> fx.Node:
    """A bias that is looked up by place, so that its heads are last in memory."""
    heads, rows, columns = shape
    looked_up = sketch.op(aten.permute.default, sketch.input("places", rows, columns, heads), [2, 0, 1])
    bias = sketch.op(aten.mul.Tensor, looked_up, 2.0)
    assert not bias.meta["val"].is_contiguous()
    return bias


def clones(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=aten.clone.default)


def strides(gm: fx.GraphModule) -> dict[str, tuple[int, ...]]:
    return {n.name: n.meta["val"].stride() for n in gm.graph.nodes if n.op != "output"}


def ran_as_described(gm: fx.GraphModule) -> list[Tensor]:
    """The results; every value on the way must lie as its fake one says."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n.meta["val"].shape, generator=generator) for n in gm.graph.find_nodes(op="placeholder")]

    class Checking(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            found = super().run_node(n)
            if isinstance(found, Tensor):
                assert found.stride() == n.meta["val"].stride(), n.name
            return found

    return Checking(gm).run(*inputs)


def test_a_bias_is_copied_and_results_are_equal() -> None:
    sketch = Sketch()
    bias, scores = bias_of(sketch), sketch.input("scores", *SHAPE)
    gm = sketch.module([sketch.op(aten.add.Tensor, scores, bias)])
    (expected,) = ran_as_described(gm)
    before = strides(gm)
    assert MatchLayouts()(gm) == 1
    gm.graph.lint()
    (found,) = ran_as_described(gm)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    (clone,) = clones(gm)
    assert clone.args == (bias,) and list(bias.users) == [clone]
    assert {k: v for k, v in strides(gm).items() if k in before} == before
    assert MatchLayouts()(gm) == 0


def test_a_result_that_would_lie_otherwise_stays() -> None:
    """It lies as the bias does, which comes first; as Whisper's hidden states do, whose positions are a bias."""
    sketch = Sketch()
    bias, states = bias_of(sketch), sketch.input("states", *SHAPE)
    gm = sketch.module([sketch.op(aten.add.Tensor, bias, states)])
    before = strides(gm)
    assert MatchLayouts()(gm) == 0
    gm.graph.lint()
    assert strides(gm) == before and not clones(gm)


@pytest.mark.parametrize("why", ["small", "a product", "alone", "backward", "checkpointed"])
def test_values_that_are_not_read_so_stay(why: str) -> None:
    sketch = Sketch()
    shape = (8, 64, 64) if why == "small" else SHAPE
    if why == "backward":
        places = sketch.op(aten.permute.default, sketch.input("tangents_1", 256, 256, 8), [2, 0, 1])
        bias = sketch.op(aten.mul.Tensor, places, 2.0)
    else:
        bias = bias_of(sketch, shape)
    if why == "checkpointed":
        bias.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    other = 1.0 if why == "alone" else sketch.input("other", *shape)
    results = [sketch.op(aten.add.Tensor, *((bias, other) if why == "alone" else (other, bias)))]
    if why == "a product":
        results.append(sketch.op(aten.bmm.default, bias, sketch.input("w", 8, 256, 4)))
    gm = sketch.module(results)
    assert MatchLayouts()(gm) == 0
    assert not clones(gm)


class Biased(nn.Module):
    """As in T5: the first layer looks a bias up, which all add to their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 8)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        bias = self.table(places).permute(2, 0, 1) * 2
        for layer in self.layers:
            x = torch.softmax(layer(x) + bias, -1)
        return x.square().sum()


def test_a_step_with_a_bias_is_bit_equal_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, match = [], MatchLayouts.__call__
    monkeypatch.setattr(MatchLayouts, "__call__", lambda self, gm: counts.append(match(self, gm)))
    torch.manual_seed(0)
    model, x = Biased(), torch.randn(SHAPE)
    places = torch.randint(0, 512, (256, 256))
    found = []
    run = torch.compile(model, backend="fxoffload", options=rehearsal_options(inner="inductor"))
    for call, policy in ((model, "keep_all"), (run, "keep_all"), (run, "offload_all")):
        model.zero_grad()
        with fxoffload.override_policy(policy):
            call(x, places).backward()
        found.append([p.grad for p in model.parameters()])
    expected, kept, offloaded = found
    assert counts == [1]
    assert all(torch.equal(a, b) for a, b in zip(kept, offloaded, strict=True))
    for a, b in zip(offloaded, expected, strict=True):
        torch.testing.assert_close(a, b)
