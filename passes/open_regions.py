"""Pass on the joint graph, before all others: where a nested region returns its inputs or views of them, take these
from outside the region.

``torch.compiler.nested_compile_region`` makes one graph of a layer, and a call of it for each layer. AOTAutograd lets
that graph return all that its backward needs, inputs of the layer and views of them too. It describes the results of
all calls by the same fake tensors, so nothing says which values share memory. Inductor then reuses an input's memory
and overwrites a saved value (torch 2.13: gradients wrong by as much as they are large). The values that two layers
save look like one storage. An example, where a region returns its first input and a view of it, before and after::

    %call  = invoke_subgraph(%region, 'fw_0', %x, %w)      %call  = invoke_subgraph(%region, 'fw_0', %x, %w)
    %out   = getitem(%call, 0)                             %out   = getitem(%call, 0)
    %saved = getitem(%call, 1)                        ->   (readers of %saved read %x)
    %flat  = getitem(%call, 2)                             %flat  = view(%x, [128, 64])

Of results that share memory with each other, one is handed out, and the others are made of it outside. The results of
each call get fake tensors of their own.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.values import output_values, tensor_of
from fxoffload.torch_private.fake_tensors import fakes_over_new_memory, run_on_fakes
from fxoffload.torch_private.op_schemas import aliased_args


class OpenRegions:
    """See the module docstring."""

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
    items = [node for node in gm.graph.find_nodes(op="call_function", target=operator.getitem) if node.args[0] is call]
    items += _hand_out_shared(gm, call, region, [item.args[1] for item in items])
    if not items:
        return 0
    for item in reversed(items):
        call.append(item)  # results made of an item come after all items
    results: list[Any] = output_values(region.graph)
    own: list[fx.Node] = []
    taken = 0
    for views in (False, True):
        for item in [one for one in items if bool(_shares_with(results[one.args[1]])) is views]:  # type: ignore[index]
            result = results[item.args[1]]  # type: ignore[index]
            with gm.graph.inserting_before(items[-1].next):
                found = _from_outside(gm.graph, result, outside, item) if isinstance(result, fx.Node) else None
            if isinstance(found, fx.Node):
                item.replace_all_uses_with(found)
                taken += 1
            elif tensor_of(item) is not None:
                outside[result] = item
                own.append(item)
    for item in items:
        if item not in own and not item.users:
            gm.graph.erase_node(item)
    for item, value in zip(own, fakes_over_new_memory([item.meta["val"] for item in own]), strict=True):
        item.meta = {**item.meta, "val": value}
    return taken


def _hand_out_shared(gm: fx.GraphModule, call: fx.Node, region: fx.GraphModule, used: list[Any]) -> list[fx.Node]:
    """Make a region also return values of which several of its results are views. Returns the new items of the call."""
    results: list[Any] = output_values(region.graph)
    views = {results[i] for i in used if _shares_with(results[i])}
    shared = [root for root, count in Counter(map(_root, views)).items() if count > 1 and root.op != "placeholder"]
    new = [root for root in shared if root not in results]
    if new:
        results += new
        region.graph.output_node().args = (tuple(results),)
        region.recompile()
    values = call.meta["val"]
    call.meta["val"] = (*values, *(result.meta["val"] for result in results[len(values) :]))
    items = []
    for root in shared:
        if (index := results.index(root)) not in used:
            with gm.graph.inserting_after(call):
                item = gm.graph.call_function(operator.getitem, (call, index))
            item.meta["val"] = root.meta["val"]
            items.append(item)
    return items


def _shares_with(value: Any) -> list[fx.Node]:
    """The values that a value of a graph may share memory with."""
    if not isinstance(value, fx.Node):
        return []
    source = value.args[0] if value.target is operator.getitem else None
    return [source] if isinstance(source, fx.Node) and aliased_args(source) else aliased_args(value)


def _root(value: fx.Node) -> fx.Node:
    while sources := _shares_with(value):
        value = sources[0]
    return value


def _from_outside(graph: fx.Graph, value: fx.Node, outside: dict[fx.Node, Any], item: fx.Node) -> Any:
    """The node in the graph around a region that has ``value``, of the region's graph.

    It is an operand of the call, another result, or a view of one, made there. None for a value that only the region
    has.

    Args:
        outside: values of the region -> values outside; more are added.
        item: the node that stands for ``value`` outside, if only a copy would do.
    """
    if value in outside:
        return outside[value]
    if not _shares_with(value) or any(_from_outside(graph, v, outside, item) is None for v in value.all_input_nodes):
        return None
    made = graph.node_copy(value, lambda v: outside[v])
    made.meta = {k: v for k, v in item.meta.items() if k != "eager_input_vals"}
    made.meta["val"] = run_on_fakes(made)
    outside[value] = made
    return made
