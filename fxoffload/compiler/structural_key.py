"""When are two segments the same code? A key that is equal for identical layers and for nothing else."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.argument_key import Same, argument_key


def structural_key(gm: fx.GraphModule, donated: Sequence[int]) -> tuple[Any, ...]:
    """A hashable description of a segment: ops, constants, edges, and the inputs' layouts.

    Names do not enter, nor do values that the segment takes as inputs. Subgraphs (``get_attr`` of a GraphModule) enter
    by content. Symbolic sizes enter as text, which identifies them within one ``ShapeEnv`` only: a cache of compiled
    segments must not outlive it. Donated inputs enter because Inductor's own cache key ignores them.
    """
    number: dict[fx.Node, int] = {}
    rows: list[Any] = []
    for node in gm.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder":
            rows.append(("in", _layout(node.meta.get("val"))))
        elif node.op == "get_attr":
            rows.append(("attr", _attribute_key(gm, str(node.target))))
        elif node.op == "output":
            rows.append(("out", argument_key(node.args, number.__getitem__), _layouts(node)))
        else:
            arguments = argument_key((node.args, node.kwargs), number.__getitem__)
            rows.append((node.target, arguments, _layout(node.meta.get("val"))))
    return (tuple(donated), *rows)


def _layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            tuple(str(s) for s in value.shape),
            tuple(str(s) for s in value.stride()) if value.layout is torch.strided else str(value.layout),
            str(value.storage_offset()) if value.layout is torch.strided else "",
            value.dtype,
            str(value.device),
        )
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ("sym", str(value.node.expr))
    if isinstance(value, (list, tuple)):
        return tuple(_layout(v) for v in value)
    return type(value).__name__


def _layouts(node: fx.Node) -> tuple[Any, ...]:
    return tuple(_layout(n.meta.get("val")) for n in node.all_input_nodes)


def _attribute_key(gm: fx.GraphModule, path: str) -> Any:
    value: Any = operator.attrgetter(path)(gm)
    return structural_key(value, ()) if isinstance(value, fx.GraphModule) else Same(value)
