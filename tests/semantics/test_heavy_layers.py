"""Layers that are compiled one by one and save much: cut in the forward, so that copies begin in the middle of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.fx as fx

import fxoffload
from fxoffload import ops
from tests.support import (
    Observed,
    Stack,
    assert_close,
    assert_equal,
    assert_offloaded,
    batch,
    check_flip,
    heavy_layers,
    rehearsal,
    segment_calls,
    train_step,
)


@pytest.fixture(autouse=True)
def every_layer_is_heavy() -> Iterator[None]:
    with heavy_layers():
        yield


def order(outer: fx.GraphModule) -> str:
    """The segments (S) and offloads (o) of an outer graph, in order."""
    calls = [n for n in outer.graph.nodes if n.op == "call_module" or ops.is_op(n, ops.offload)]
    return "".join("S" if n.op == "call_module" else "o" for n in calls)


def layer_by_layer(model: Stack, **options: Any) -> Callable[[], Observed]:
    for layer in model.layers:
        layer.compile(backend="fxoffload", options=rehearsal(**options))
    return train_step(model, lambda: model(batch(length=64, width=32)).square().sum())


def test_copies_begin_in_the_middle_of_a_layer() -> None:
    model = Stack(3, width=32)
    expected = train_step(model, lambda: model(batch(length=64, width=32)).square().sum())()
    flip = check_flip(layer_by_layer(model), min_segments=1)
    assert_close(flip.observed, expected)
    assert flip.graphs
    for graph in flip.graphs:
        assert graph.backward is not None
        assert len(segment_calls(graph.forward)) > 1 == len(segment_calls(graph.backward))
        found = order(graph.forward)
        assert "o" in found[found.index("S") : found.rindex("S")]


@pytest.mark.slow_except("aot_eager")
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_plan_over_such_layers(inner: str) -> None:
    """The steps that follow it compute what those did that were watched."""
    run = layer_by_layer(Stack(4, width=32), policy="auto", max_slowdown=9.0, disable=("tape_recompute",), inner=inner)
    known = {p.graph for p in fxoffload.plans()}
    first = run()
    for _ in range(6):
        fxoffload.reset_stats()
        assert_equal(run(), first)
    (plan,) = (p for p in fxoffload.plans() if p.graph not in known)
    assert "over 4 calls" in plan.summary
    assert_offloaded(fxoffload.stats())
