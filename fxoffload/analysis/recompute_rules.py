"""Which ops may run once more in the backward, and what the user's checkpointing policies say."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from fxoffload.analysis.layer_classes import is_random
from fxoffload.analysis.op_costs import call_of, node_kind
from fxoffload.torch_private.op_schemas import OpOverload, aliased_args, mutated_args
from fxoffload.torch_private.pytree import tree_leaves
from fxoffload.torch_private.symbolic_sizes import free_unbacked_symbols

# Policies of a user's selective checkpointing that ask for offloading. They exist in newer torch only.
OFFLOADED = frozenset(
    getattr(CheckpointPolicy, name)
    for name in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
    if hasattr(CheckpointPolicy, name)
)
SAVED = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE}) | OFFLOADED
RECOMPUTED = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})
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


def may_recompute(node: fx.Node, overwritten: set[fx.Node]) -> bool:
    """Whether ``node``, run in the backward, gives the forward's result, and whether we may decide on it.

    Args:
        node: an op of a joint graph.
        overwritten: see ``overwritten_inputs``.
    """
    if not _is_repeatable(node) or (is_random(node) and not never_drops(node)):
        return False
    # A mask is smaller than the random numbers that it is made of: they are not saved to recompute it.
    return not any(v in overwritten or is_random(v) for v in node.all_input_nodes)


def _is_cheap(node: fx.Node) -> bool:
    return _is_repeatable(node) and node.target.overloadpacket not in flop_registry  # type: ignore[union-attr]


def _is_repeatable(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in _NAMESPACES:
        return False
    if target in _ORDERED or mutated_args(node):
        return False
    return not free_unbacked_symbols([v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)])


def never_drops(node: fx.Node) -> bool:
    """Whether ``node`` is an attention without dropout: it could draw random numbers, but draws none."""
    target, args = call_of(node)
    if node_kind(node) != "attention" or not isinstance(target, OpOverload):
        return False
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = args[i] if i < len(args) else node.kwargs.get("dropout_p", argument.default_value)
            return isinstance(value, float) and value == 0.0
    return False


def overwritten_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Graph inputs that the graph writes, and views of them: in the backward, they would hold other values."""
    found = {v for n in graph.nodes if n.op == "call_function" for v in mutated_args(n) if v.op == "placeholder"}
    for node in graph.nodes if found else ():
        if node.op == "call_function" and found.intersection(aliased_args(node)):
            found.add(node)
    return found
