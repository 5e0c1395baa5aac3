"""Pass on the joint graph, before it is partitioned: mark the ops that the backward may recompute.

Before and after, for the ops of one layer (AOTAutograd's tags; untagged ops are left to its own judgement)::

    %mm   = mm(%view, %permute)         recompute: MUST_SAVE
    %silu = silu(%mm)                   recompute: PREFER_RECOMPUTE,  ac_graph_id: 1
    %mul  = mul(%silu, %mm_1)           recompute: PREFER_RECOMPUTE,  ac_graph_id: 1
    %out  = mm(%mul, %permute_2)        recompute: MUST_SAVE

Without tags, AOTAutograd saves every value that a backward kernel has to read from memory in any case. With them,
norms, rotary embeddings and activation functions are recomputed from the saved inputs and results of the matrix
products around them. That is a third of the bytes of a decoder layer for about one percent of its time.

A chosen point of a layer's frontier (``FindFrontier``) is marked so that nothing is left to judge. All ops that the
backward computes without an incoming gradient are MUST_RECOMPUTE, the rest of the layer is MUST_SAVE.

Never recomputed: masks made of random numbers, collectives, sorts and scans, operators that are not PyTorch's own, and
ops that read a buffer that the graph writes; by "cheap", contractions. Ops that a user's policy has tagged stay so.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from fxoffload.analysis.layer_classes import behind_tangents, is_random, layers_of
from fxoffload.analysis.op_costs import tensors_of
from fxoffload.analysis.recompute_rules import OFFLOADED, SAVED, _is_cheap, overwritten_inputs
from fxoffload.torch_private.op_schemas import mutated_args

if TYPE_CHECKING:
    from fxoffload.analysis.find_frontier import RecomputePoint

LEVELS = ("default", "cheap")


@dataclass(frozen=True)
class TagReport:
    """How many ops of the layers are marked for saving and for recomputation."""

    num_saved: int = 0
    num_recomputed: int = 0


class TagRecompute:
    """Mark the layers' ops for the partitioner.

    Args:
        recompute: "default": no tags. "cheap": everything that is cheap to recompute. Or layer -> the point of its
            frontier to realise (``FindFrontier``; the label of a graph without labels is ``""``); layers that are not
            named stay untagged. In any case ops that read an input that the graph writes are saved.
    """

    def __init__(self, recompute: str | Mapping[str, RecomputePoint]) -> None:
        if isinstance(recompute, str) and recompute not in LEVELS:
            raise ValueError(f"unknown recompute level {recompute!r}; the levels are {', '.join(LEVELS)}")
        self.recompute = recompute

    def __call__(self, gm: fx.GraphModule) -> TagReport:
        report = self._tag(gm)
        _save_what_is_made_of_overwritten(gm.graph)
        return report

    def _tag(self, gm: fx.GraphModule) -> TagReport:
        if not isinstance(self.recompute, str):
            return _tag_points(gm.graph, self.recompute)
        for node in gm.graph.nodes:
            if node.meta.get("recompute") in OFFLOADED:  # which says nothing to the partitioner
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return TagReport() if self.recompute == "default" else _tag_cheap(gm.graph)


def _tag_cheap(graph: fx.Graph) -> TagReport:
    saved = recomputed = 0
    overwritten = overwritten_inputs(graph)
    for number, nodes in enumerate(layers_of(graph, behind_tangents(graph)).values(), 1):
        for node in nodes:
            if node in overwritten or is_random(node) or "recompute" in node.meta:
                continue
            if node.target is operator.getitem:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                if "recompute" in source.meta:  # a value has its producer's tag, or the partitioner refuses the graph
                    _tag(node, source.meta["recompute"], number)
            elif _is_cheap(node) and not any(v in overwritten or is_random(v) for v in node.all_input_nodes):
                _tag(node, CheckpointPolicy.PREFER_RECOMPUTE, number)
                recomputed += 1
            else:
                _tag(node, CheckpointPolicy.MUST_SAVE, number)
                saved += 1
    return TagReport(saved, recomputed)


def _tag_points(graph: fx.Graph, points: Mapping[str, RecomputePoint]) -> TagReport:
    """Mark the ops that a point does not recompute as saved, whether the backward needs them or not.

    The partitioner then saves those that are needed, and has nothing left to decide.
    """
    layers = layers_of(graph, behind_tangents(graph))
    if unknown := points.keys() - layers.keys():
        raise ValueError(f"unknown layers {sorted(unknown)}; the graph has {', '.join(map(repr, layers))}")
    saved = recomputed = 0
    overwritten = overwritten_inputs(graph)
    for number, (label, nodes) in enumerate(layers.items(), 1):
        if label not in points:
            continue
        again = points[label].recomputed
        for position, node in enumerate(nodes):
            user = node.meta.get("recompute")
            if user in SAVED:
                # To the partitioner all but the first of these say nothing.
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif user is None and node not in overwritten and tensors_of(node):
                tag = CheckpointPolicy.MUST_RECOMPUTE if position in again else CheckpointPolicy.MUST_SAVE
                _tag(node, tag, number)
                recomputed += position in again
                saved += position not in again
    return TagReport(saved, recomputed)


def _save_what_is_made_of_overwritten(graph: fx.Graph) -> None:
    """Save the results that the forward makes of an input that it overwrites later.

    The partitioner alone would recompute them, from the overwritten input: it takes inputs for free (torch 2.13, plain
    Inductor). Activation checkpointing would do so too, and so would any caller that asks for it.
    """
    overwritten = overwritten_inputs(graph)
    backward = behind_tangents(graph) if overwritten else ()
    for node in graph.nodes if overwritten else ():
        is_saved = node.meta.get("recompute") in SAVED
        if node in backward or node in overwritten or node.op != "call_function" or is_saved:
            continue
        if tensors_of(node) and not mutated_args(node) and overwritten.intersection(node.all_input_nodes):
            for value in (node, *(u for u in node.users if u.target is operator.getitem)):
                _tag(value, CheckpointPolicy.MUST_SAVE, 0)


def _tag(node: fx.Node, policy: CheckpointPolicy, region: int) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = region
