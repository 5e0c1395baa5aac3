"""Pass on the joint graph, before all others: what a nested region hands out and has from outside is taken from there.

``torch.compiler.nested_compile_region`` makes one graph of a layer, and a call of it for each layer. AOTAutograd lets
that graph return all that its backward needs, inputs of the layer and views of them too, and describes the results of
all its calls by the same fake tensors. Then nothing says which values share memory: Inductor reuses an input's and so
overwrites what was saved (torch 2.13: gradients wrong by as much as they are large), and what two layers save looks
like one storage. Before and after, where a region returns its first input and a view of it::

    %call  = invoke_subgraph(%region, 'fw_0', %x, %w)      %call  = invoke_subgraph(%region, 'fw_0', %x, %w)
    %out   = getitem(%call, 0)                             %out   = getitem(%call, 0)
    %saved = getitem(%call, 1)                        ->   (readers of %saved read %x)
    %flat  = getitem(%call, 2)                             %flat  = view(%x, [128, 64])

The other results of each call get fake tensors of their own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from fxoffload._torch_compat import aliased_args
from fxoffload._torch_sizes import fakes_over_new_memory, run_on_fakes
from fxoffload.passes.values import output_values, tensor_of


class OpenRegions:
    """See the module docstring."""

    name = "open_regions"

    def __call__(self, gm: fx.GraphModule) -> int:
        """Returns how many values are taken from outside."""
        calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
        taken = sum(_open(gm, call) for call in calls)
        if calls:
            gm.graph.lint()
            gm.recompile()
        return taken


def _open(gm: fx.GraphModule, call: fx.Node) -> int:
    region: Any = gm.get_submodule(str(call.args[0].target))  # type: ignore[union-attr]
    outside: dict[fx.Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    results = output_values(region.graph)
    own: list[fx.Node] = []
    taken = 0
    for item in [u for u in call.users if u.target is operator.getitem]:
        result: Any = results[item.args[1]]  # type: ignore[index]
        with gm.graph.inserting_before(item):
            found = _from_outside(gm.graph, result, outside, item) if isinstance(result, fx.Node) else None
        if isinstance(found, fx.Node):
            item.replace_all_uses_with(found)
            gm.graph.erase_node(item)
            taken += 1
        elif tensor_of(item) is not None:
            own.append(item)
    for item, value in zip(own, fakes_over_new_memory([item.meta["val"] for item in own]), strict=True):
        item.meta = {**item.meta, "val": value}
    return taken


def _from_outside(graph: fx.Graph, value: fx.Node, outside: dict[fx.Node, Any], item: fx.Node) -> Any:
    """What ``value``, of a region's graph, is in the graph around it: an operand of the call, or a view of one, made
    there. None for what the region computes.

    Args:
        outside: what values of the region are outside; more are added.
        item: the node that stands for ``value`` outside, if only a copy would do.
    """
    if value in outside:
        return outside[value]
    sources = aliased_args(value)
    if not sources or any(_from_outside(graph, v, outside, item) is None for v in value.all_input_nodes):
        return None
    made = graph.node_copy(value, lambda v: outside[v])
    made.meta = {k: v for k, v in item.meta.items() if k != "eager_input_vals"}
    made.meta["val"] = run_on_fakes(made)
    outside[value] = made
    return made
