"""What checkpointing marks in joint graphs, and which of its regions a plan may replace."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fxoffload.analysis.labels import LAYER_KEY
from fxoffload.compiler import session
from fxoffload.passes.checkpointed import clear_plain_checkpointing, num_checkpointed
from fxoffload.torch_private.graphs import copy_graph
from tests.support import Block, Stack, batch, compiled

Policy = CheckpointPolicy


def joint_of(*blocks: type[Block], dropout: float = 0.0) -> fx.GraphModule:
    """Of two layers; labelled, and as AOTAutograd made it. ``blocks``: of each, or of both."""
    model = Stack(2, dropout=dropout, block=blocks[0])
    model.layers[1] = blocks[-1](dropout=dropout)
    found: list[fx.GraphModule] = []

    class Looking(session.CompileSession):
        def _tell_checkpointing(self, obeyed: fx.GraphModule) -> None:
            found.append(copy_graph(obeyed))

    torch.compiler.reset()
    with mock.patch.object(session, "CompileSession", Looking):
        compiled(model)(batch())
    (joint,) = found
    return joint


def selective(saved: Policy, other: Policy) -> Callable[..., Any]:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Policy:
        return saved if op is torch.ops.aten.addmm.default else other

    return functools.partial(create_selective_checkpoint_contexts, policy)


class Plain(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Reentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Nested(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Preferring(Block):
    """A policy that leaves everything to the compiler."""

    contexts = staticmethod(selective(Policy.PREFER_RECOMPUTE, Policy.PREFER_RECOMPUTE))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=self.contexts)


class Recomputing(Preferring):
    contexts = staticmethod(selective(Policy.MUST_RECOMPUTE, Policy.MUST_RECOMPUTE))


class Saving(Preferring):
    contexts = staticmethod(selective(Policy.MUST_SAVE, Policy.PREFER_RECOMPUTE))


def marks(joint: fx.GraphModule) -> dict[str, Counter[Policy | None]]:
    found: dict[str, Counter[Policy | None]] = {}
    for node in joint.graph.nodes:
        if "recompute" in node.meta:
            found.setdefault(node.meta[LAYER_KEY], Counter())[node.meta["recompute"]] += 1
    return found


@pytest.mark.parametrize("block", [Plain, Reentrant, Nested, Preferring])
def test_plain_regions_are_cleared(block: type[Block]) -> None:
    joint = joint_of(block)
    assert [set(m) for m in marks(joint).values()] == [{Policy.PREFER_RECOMPUTE}] * 2
    count = num_checkpointed(joint)
    assert clear_plain_checkpointing(joint) == count > 0
    assert not marks(joint) and num_checkpointed(joint) == 0
    assert not any("ac_graph_id" in n.meta for n in joint.graph.nodes)


@pytest.mark.slow_except("Recomputing")
@pytest.mark.parametrize("block", [Recomputing, Saving])
@pytest.mark.filterwarnings("ignore:.*context_fn")
def test_policies_stay(block: type[Block]) -> None:
    joint = joint_of(block)
    before = marks(joint)
    assert len(before) == 2
    assert clear_plain_checkpointing(joint) == 0
    assert marks(joint) == before


@pytest.mark.filterwarnings("ignore:.*context_fn")
def test_regions_are_told_apart() -> None:
    joint = joint_of(Plain, Saving)
    before = marks(joint)
    assert clear_plain_checkpointing(joint) == before["layers.0"].total()
    assert marks(joint) == {"layers.1": before["layers.1"]}


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_without_its_tags_a_graph_is_the_one_without_checkpointing(dropout: float) -> None:
    """Labels included."""

    def ops(block: type[Block]) -> list[tuple[str, Any]]:
        joint = joint_of(block, dropout=dropout)
        clear_plain_checkpointing(joint)
        return [(str(n.target), n.meta.get(LAYER_KEY)) for n in joint.graph.nodes]

    assert ops(Plain) == ops(Block)
