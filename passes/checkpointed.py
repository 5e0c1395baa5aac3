"""Find, and clear, the tags that the user's activation checkpointing has left in a joint graph.

``torch.utils.checkpoint`` inside compiled code marks each op of its region with a recompute policy, which the
partitioner obeys. Plain ``checkpoint()`` and selective checkpointing mark differently (seen in torch 2.11 and 2.13)::

    checkpoint(f)                      every op PREFER_RECOMPUTE
    checkpoint(f, context_fn=...)      what the policy says op by op: MUST_SAVE, MUST_RECOMPUTE, ...

So a region (one ``ac_graph_id``) in which every op says PREFER_RECOMPUTE is plain: torch defines PREFER as what
torch.compile may override. A policy that says so of all ops asks for the same. One MUST, or one SAVE, makes the whole
region the user's own choice. Nested plain regions have the number of one of them, and are one region.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from fxoffload.analysis.recompute_rules import OFFLOADED, RECOMPUTED


def num_checkpointed(joint: fx.GraphModule) -> int:
    """Ops that the user's checkpointing recomputes, in nested regions too.

    Zero where a user's policy offloads: that policy was written for offloading.
    """
    policies = [n.meta["recompute"] for n in _nodes(joint) if "recompute" in n.meta]
    return 0 if OFFLOADED.intersection(policies) else sum(p in RECOMPUTED for p in policies)


def clear_plain_checkpointing(joint: fx.GraphModule) -> int:
    """Remove the tags of plain ``checkpoint()``. Those in nested graphs stay: these are partitioned already.

    Returns how many ops were tagged so.
    """
    regions: defaultdict[object, list[fx.Node]] = defaultdict(list)
    for node in joint.graph.nodes:
        if node.meta.get("recompute") is not None:
            regions[node.meta.get("ac_graph_id")].append(node)
    plain = [r for r in regions.values() if all(n.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE for n in r)]
    for node in (n for region in plain for n in region):
        _clear(node)
    return sum(map(len, plain))


def clear_checkpointing(joint: fx.GraphModule) -> None:
    """Remove all tags, as if nothing was checkpointed."""
    for node in _nodes(joint):
        _clear(node)


def _clear(node: fx.Node) -> None:
    node.meta.pop("recompute", None)
    node.meta.pop("ac_graph_id", None)


def _nodes(joint: fx.GraphModule) -> Iterator[fx.Node]:
    for module in joint.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes
