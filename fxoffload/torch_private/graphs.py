"""Private torch APIs of FX graphs and of the modules around them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose code is generated at its first call.

    Graphs that are only looked at, or compiled, never need it. torch makes such modules itself, but only while it
    compiles, and plans are also made at other times.

    Needed by torch 2.11 to 2.14: ``torch.fx._lazy_graph_module._LazyGraphModule``.
    """
    return _LazyGraphModule(root, graph)


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The same code over the same attributes, as a graph of its own, and so are graphs that it runs (of higher-order
    ops): Inductor changes those too. Node metadata is shared value by value.

    Needed by torch 2.11 to 2.14: ``fx.Graph._tracer_cls`` and ``_codegen``; as ``graph_module``.
    """
    # ``copy.deepcopy(graph)`` copies the codegen's tree specs too, which takes time and warns of their class.
    graph = fx.Graph(tracer_cls=gm.graph._tracer_cls)
    result, before = graph.graph_copy(gm.graph, {}), gm.graph.output_node()
    graph._codegen = copy.copy(gm.graph._codegen)
    graph.output(result, before.type).meta = dict(before.meta)
    copied = graph_module(gm, graph)
    copied.meta = dict(gm.meta)
    for name, child in list(copied.named_modules(remove_duplicate=False)):
        if name and isinstance(child, fx.GraphModule):
            copied.set_submodule(name, copy_graph(child))
    return copied


def calls_graph(node: fx.Node) -> bool:
    """Whether ``node`` calls a graph that Inductor lowers as it does a whole one: a nested region, a branch, a loop.

    It then reads ``bw_donated_idxs`` of the graph around as positions of that graph's inputs.

    Needed by torch 2.11 to 2.14: ``torch._ops.HigherOrderOperator``.
    """
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name().startswith("flex_attention"):
        return False
    fetched = [value for value in node.all_input_nodes if value.op == "get_attr"]
    return any(not isinstance(value.meta.get("val"), torch.Tensor) for value in fetched)


def boxed_eager(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Run ``gm`` op by op; the callable takes one list, which it clears.

    Needed by torch 2.11 to 2.14: ``torch.fx.graph._BoxedCodeGen``.
    """
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def run(args: list[Any]) -> Sequence[Any]:
        return gm(args)

    return boxed(run)


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark ``fn`` as following AOTAutograd's boxed convention (one list argument, cleared by the callee).

    Needed by torch 2.11 to 2.14: ``_boxed_call``.
    """
    fn._boxed_call = True  # type: ignore[attr-defined]
    return fn
