"""What activation checkpointing has tagged in a joint graph, before we tag anything.

``torch.utils.checkpoint`` inside compiled code marks each op of its region with a recompute policy. The partitioner,
and so every plan, obeys: what is marked RECOMPUTE is not saved, and can be neither kept nor offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from fxoffload.passes.tag_recompute import OFFLOADED, RECOMPUTED


def num_checkpointed(joint: fx.GraphModule) -> int:
    """Ops that the user's checkpointing computes again, in nested regions too. None count where a policy of the user's
    offloads: that one was written for offloading."""
    policies = [n.meta["recompute"] for n in _nodes(joint) if "recompute" in n.meta]
    return 0 if OFFLOADED.intersection(policies) else sum(p in RECOMPUTED for p in policies)


def clear_checkpointing(joint: fx.GraphModule) -> None:
    """Remove the tags, as if nothing was checkpointed."""
    for node in _nodes(joint):
        node.meta.pop("recompute", None)
        node.meta.pop("ac_graph_id", None)


def _nodes(joint: fx.GraphModule) -> Iterator[fx.Node]:
    for module in joint.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes
