"""Pass on a forward and a backward graph that were just partitioned: unwrap ops that draw no random numbers.

Attention may draw random numbers (dropout), so the partitioner keeps its random state where it is recomputed. Before,
in the two forms that it has for that, and after::

    forward:   %pair = run_and_save_rng_state(sdpa, %q, ...)           %sdpa = sdpa(%q, ...)
               return (..., %pair[0])                                  return (...)
    backward:  %sdpa = run_with_rng_state(%state, sdpa, %q, ...)  ->   %sdpa = sdpa(%q, ...)

    %sdpa = graphsafe_run_with_rng_state(sdpa, %q, ..., rng_state=%fwd_rng_state_0)

The states are more outputs and inputs, which AOTAutograd's runtime feeds only where the graph that it compiled had
them. Without dropout nothing is drawn, and the op may stand by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import torch.fx as fx

from fxoffload.analysis.op_costs import call_of, kwargs_of, sets_random_state
from fxoffload.analysis.recompute_rules import never_drops
from fxoffload.analysis.values import output_values
from fxoffload.torch_private.partitioner import saves_rng_state


class UnwrapRandom:
    """See the module docstring.

    Args:
        joint: that the graphs were partitioned from, after it was.
    """

    def __init__(self, joint: fx.GraphModule) -> None:
        self._originals: dict[Hashable, list[fx.Node]] = defaultdict(list)
        for node in (n for n in joint.graph.nodes if n.op == "call_function"):
            self._originals[_signature(node)].append(node)

    def __call__(self, gm: fx.GraphModule) -> bool:
        """Whether no random state is left in ``gm``."""
        originals = {key: list(nodes) for key, nodes in self._originals.items()}
        for node in [n for n in gm.graph.nodes if sets_random_state(n)]:
            found = originals.get(_signature(node))
            # A wrapper has no metadata: without the op that it came from, nothing is known of its result.
            if not found or not never_drops(node):
                return False
            _unwrap(gm.graph, node, found.pop(0))
        gm.graph.lint()
        gm.recompile()
        graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
        return not any(sets_random_state(n) for graph in graphs for n in graph.nodes)


def _signature(node: fx.Node) -> Hashable:
    target, args = call_of(node)
    # Nodes are written by name, and a partitioned graph keeps the names.
    return str(target), repr(args), repr(sorted(kwargs_of(node).items()))


def _unwrap(graph: fx.Graph, node: fx.Node, original: fx.Node) -> None:
    target, args = call_of(node)
    states = [a for a in (*node.args[:1], node.kwargs.get("rng_state")) if isinstance(a, fx.Node)]
    with graph.inserting_before(node):
        plain = graph.create_node("call_function", target, args, kwargs_of(node), name=original.name)
    plain.meta = dict(original.meta)
    if saves_rng_state(node):
        for item in list(node.users):
            if item.args[1] == 1:
                item.replace_all_uses_with(plain)
            else:
                graph.output_node().args = (tuple(v for v in output_values(graph) if v is not item),)  # type: ignore[assignment]
            graph.erase_node(item)
    else:
        node.replace_all_uses_with(plain)
    graph.erase_node(node)
    for state in states:
        if not state.users:
            graph.erase_node(state)
