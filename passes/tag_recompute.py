"""Pass on the joint graph, before it is partitioned: mark what the backward may compute again.

Before and after, for the ops of one layer (AOTAutograd's tags; untagged ops are left to its own judgement)::

    %mm   = mm(%view, %permute)         recompute: MUST_SAVE
    %silu = silu(%mm)                   recompute: PREFER_RECOMPUTE,  ac_graph_id: 1
    %mul  = mul(%silu, %mm_1)           recompute: PREFER_RECOMPUTE,  ac_graph_id: 1
    %out  = mm(%mul, %permute_2)        recompute: MUST_SAVE

Left alone, AOTAutograd saves every value that a backward kernel has to read from memory in any case. Marked so, norms,
rotary embeddings and activation functions are computed again from what the matrix products around them saved: a third
of the bytes of a decoder layer for about one percent of its time.

Never marked for recomputation: contractions, masks made of random numbers, collectives, sorts and scans, operators
that are not PyTorch's own, what reads a buffer that the graph writes, and whatever a user's policy has tagged already.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from fxoffload._torch_compat import aliased_args, free_unbacked_symbols, mutated_args
from fxoffload.passes.annotate_layers import LAYER_KEY

LEVELS = ("default", "cheap")

_aten = torch.ops.aten
# Cheap in FLOPs, but no work for a fused kernel.
_ORDERED = {
    _aten.sort.default,
    _aten.sort.stable,
    _aten.topk.default,
    _aten.cumsum.default,
    _aten.cumprod.default,
    _aten.logcumsumexp.default,
    _aten.scatter_add.default,
    _aten.index_put.default,
    _aten.embedding_dense_backward.default,
}
_NAMESPACES = {"aten", "prims"}


@dataclass(frozen=True)
class TagReport:
    """How many ops of the layers are marked for saving and for recomputation."""

    num_saved: int = 0
    num_recomputed: int = 0


class TagRecompute:
    """Mark the layers' ops for the partitioner.

    Args:
        level: "default": no tags. "cheap": everything that is cheap to compute again.
    """

    name = "tag_recompute"

    def __init__(self, level: str) -> None:
        if level not in LEVELS:
            raise ValueError(f"unknown recompute level {level!r}; the levels are {', '.join(LEVELS)}")
        self.level = level

    def __call__(self, gm: fx.GraphModule) -> TagReport:
        if self.level == "default":
            return TagReport()
        labelled = any(LAYER_KEY in n.meta for n in gm.graph.nodes)
        number: dict[str, int] = {}
        saved = recomputed = 0
        overwritten = _overwritten(gm.graph)
        behind_tangents = _behind_tangents(gm.graph)
        for node in gm.graph.nodes:
            # Without labels (a layer compiled on its own) the graph is one layer.
            layer = node.meta.get(LAYER_KEY) if labelled else ""
            if node in overwritten or _is_random(node):
                continue
            if node.op != "call_function" or layer is None or node in behind_tangents or "recompute" in node.meta:
                continue
            node.meta["ac_graph_id"] = number.setdefault(layer, len(number) + 1)
            if node.target is operator.getitem:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                if "recompute" in source.meta:  # a value has its producer's tag, or the partitioner refuses the graph
                    node.meta["recompute"] = source.meta["recompute"]
                else:
                    del node.meta["ac_graph_id"]
            elif _is_cheap(node) and not any(v in overwritten or _is_random(v) for v in node.all_input_nodes):
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                recomputed += 1
            else:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                saved += 1
        return TagReport(saved, recomputed)


def _is_cheap(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _NAMESPACES:
        return False
    if target in _ORDERED or target.overloadpacket in flop_registry or mutated_args(node):
        return False
    return not free_unbacked_symbols([v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)])


def _is_random(node: fx.Node) -> bool:
    """Whether it draws random numbers (or their seed). What is computed from them, a mask, is smaller and is saved."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or "random" in str(target) or "seed" in str(target)


def _overwritten(graph: fx.Graph) -> set[fx.Node]:
    """Graph inputs that the graph writes, and views of them: read again in the backward, they would hold other
    values."""
    found = {v for n in graph.nodes if n.op == "call_function" for v in mutated_args(n) if v.op == "placeholder"}
    for node in graph.nodes if found else ():
        if node.op == "call_function" and found.intersection(aliased_args(node)):
            found.add(node)
    return found


def _behind_tangents(graph: fx.Graph) -> set[fx.Node]:
    """Everything computed from an incoming gradient."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangent" in str(node.target)
        if is_tangent or (node.op == "call_function" and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found
