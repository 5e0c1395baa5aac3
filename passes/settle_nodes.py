"""Pass 2, on the forward and the backward graph: move nodes that stand far from their inputs next to them.

The partitioner appends saved views and comparisons at the end of the forward. Left there, they drag the end of every
layer to the end of the graph, and the cuts collapse (gpt2: segments of 10, 526, 3, 3, 7, 3 nodes). Each moves right
after its last input::

    %view   = view(%mm)                     %view    = view(%mm)
    ... 500 nodes ...                       %permute = permute(%view)
    %permute = permute(%view)       ->      ... 500 nodes ...
    return (..., %permute)                  return (..., %permute)

A getitem moves right after the op whose result it unpacks: a cut between the two breaks Inductor. A dropout seed
look-up moves right after the seeds. So a layer takes its seed as an input, and identical layers stay identical.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from fxoffload.analysis.values import output_values
from fxoffload.torch_private.op_schemas import mutated_args

GLUE_KEY = "fxoffload_glued"


class SettleNodes:
    """Reorder a partitioned graph as the module docstring says. Data flow and results stay the same.

    ``num_user_outputs``: how many of the leading outputs the caller sees. Nodes that only later outputs (saved values)
    need may move. None for a backward graph, where every output is seen.
    """

    def __init__(self, num_user_outputs: int | None = None) -> None:
        self.num_user_outputs = num_user_outputs

    def __call__(self, gm: fx.GraphModule) -> int:
        """Returns the number of nodes moved."""
        graph = gm.graph
        late = _needed_by_saved_only(graph, self.num_user_outputs)
        # Order of a node: (its root's place in the old order, its place in the chain that follows the root).
        order = {n: (i, 0) for i, n in enumerate(graph.nodes)}
        root = {n: n for n in graph.nodes}
        chain: dict[fx.Node, list[fx.Node]] = {}
        head = _last_head(graph)
        moved = 0
        for node in list(graph.nodes):
            anchor = _anchor(node, order, late)
            if anchor is None:
                continue
            if anchor.op != "call_function":
                if head is None:
                    continue
                anchor = head
            base = root[anchor]
            behind = chain.setdefault(base, [base])
            if behind[-1].next is not node:
                behind[-1].append(node)
                moved += 1
            root[node], order[node] = base, (order[base][0], len(behind))
            behind.append(node)
            if base.op == "call_function":
                node.meta[GLUE_KEY] = True
        if moved:
            gm.recompile()
        return moved


def _anchor(node: fx.Node, order: dict[fx.Node, tuple[int, int]], late: set[fx.Node]) -> fx.Node | None:
    """The node that ``node`` should follow, or None where it stays."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0]
    if node.target is torch.ops.prims.inductor_lookup_seed.default:
        seeds = node.args[0]
        return seeds if isinstance(seeds, fx.Node) else None
    if node not in late:
        return None
    inputs = [i for i in node.all_input_nodes if i.op == "call_function"]
    return max(inputs, key=lambda i: order[i]) if inputs else None


def _needed_by_saved_only(graph: fx.Graph, num_user_outputs: int | None) -> set[fx.Node]:
    """Pure nodes that no output which the caller sees depends on."""
    if num_user_outputs is None:
        return set()
    seen = {v for v in output_values(graph)[:num_user_outputs] if isinstance(v, fx.Node)}
    late: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        if node in seen or mutated_args(node) or _is_random(node):
            seen.add(node)
            seen.update(node.all_input_nodes)
        else:
            late.add(node)
    return late


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _last_head(graph: fx.Graph) -> fx.Node | None:
    """The last of the placeholders and get_attrs that open the graph."""
    last = None
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr"):
            break
        last = node
    return last
