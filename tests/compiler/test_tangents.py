"""Which tangents segments are compiled without, and what a backward owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxoffload.analysis.segmentation import Segment, Segmentation
from fxoffload.analysis.values import output_values
from fxoffload.compiler.tangents import left_out, losses_of
from fxoffload.passes.cut_segments import CutSegments
from tests.capture import WIDTH, capture, example_input


def traced(fn: Callable[[Tensor, Tensor], Any], *, varies: bool = False) -> tuple[fx.GraphModule, list[fx.Node]]:
    """A backward of a saved value and a tangent, and its ops."""
    gm = make_fx(fn, tracing_mode="symbolic" if varies else "fake")(torch.ones(4, 6), torch.ones(4, 6))
    saved, tangent = (n for n in gm.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], Tensor))
    saved.name, tangent.name, tangent.target = "saved", "tangents_1", "tangents_1"
    return gm, [n for n in gm.graph.nodes if n.op == "call_function"]


def test_a_tangent_that_is_returned_stays() -> None:
    """Nothing else could be returned in its place."""
    for fn, expected in (
        (lambda x, t: (x * 2 + t,), {"tangents_1"}),
        (lambda x, t: (x * 2 + t, t), set()),
        (lambda x, t: (x * 2, t), set()),
    ):
        gm, _ = traced(fn)
        assert left_out(gm, CutSegments(whole=True)(gm)) == expected


def test_a_tangent_that_alone_tells_a_size_stays() -> None:
    gm, ops = traced(lambda x, t: (x.view(-1) + t.view(-1),), varies=True)
    assert left_out(gm, CutSegments(whole=True)(gm)) == {"tangents_1"}
    saved, tangent = (n for n in gm.graph.find_nodes(op="placeholder") if n.name in ("saved", "tangents_1"))
    views = {n.args[0].name: n for n in ops if n.target is torch.ops.aten.view.default}  # type: ignore[union-attr]
    flat, total = views["saved"], ops[-1]
    first = Segment("first", "", (flat,), (saved,), (flat,))
    rest = Segment("rest", "", tuple(n for n in ops if n is not flat), (flat, tangent), (total,))
    assert left_out(gm, Segmentation((first, rest))) == frozenset(), "products of sizes tell none"


def test_a_loss_is_a_number_made_of_the_same_products_as_the_largest_other_output() -> None:
    for forward, expected in (
        (lambda x, w: (x.mean(),), [0]),
        (lambda x, w: (x.mean(), w.mean()), [0, 1]),
        (lambda x, w: ((y := x @ w).mean(), y), [0]),
        (lambda x, w: ((y := x @ w)[1:].mean(), y.double(), x.sum(-1)), [0]),  # a cast of its own
        (lambda x, w: (x.mean(), x @ w), []),  # logged
        (lambda x, w: ((p := (x @ w).softmax(-1)).square().mean(), (x * p) @ w), []),  # of a router
        (lambda x, w: (x @ w, x.sum(-1)), []),
        (lambda x, w: ((x @ w).mean(), x.expand(3, 6, 6) * 2), [0]),  # a buffer, say
    ):
        returned = output_values(make_fx(forward, tracing_mode="fake")(torch.ones(6, 6), torch.ones(6, 6)).graph)
        assert losses_of(returned) == {returned[at] for at in expected}


def test_outputs_that_the_caller_lets_go_of_end_with_their_last_reader() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            logits = self.head(x)
            return logits.logsumexp(-1).mean(), logits, self.head.weight.view(-1)

    captured = capture(Returning(), example_input(), loss=lambda out: out[0], policy="offload_all")
    backward, names = captured.backward, {n.name for n in captured.forward.gm.graph.find_nodes(op="placeholder")}
    logits = captured.forward.returned[1]
    assert isinstance(logits, fx.Node) and logits.name in backward.owned - backward.copies
    assert backward.owned.isdisjoint(names), "inputs and parameters are the caller's"
