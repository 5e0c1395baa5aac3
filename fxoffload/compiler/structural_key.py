"""When are two segments the same code? A key that is equal for identical layers and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from fxoffload.torch_private.pytree import tree_flatten


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
            rows.append(("out", _arguments(node, number), _layouts(node)))
        else:
            rows.append((node.target, _arguments(node, number), _layout(node.meta.get("val"))))
    return (tuple(donated), *rows)


def _arguments(node: fx.Node, number: dict[fx.Node, int]) -> tuple[Any, ...]:
    leaves, spec = tree_flatten((node.args, node.kwargs))
    return (str(spec), *(_leaf(x, number) for x in leaves))


def _leaf(value: Any, number: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return ("node", number[value])
    if isinstance(value, float):
        return ("float", value.hex())  # tells 0.0 from -0.0, and nan equals itself
    if isinstance(value, (bool, int, str, type(None))):
        return (type(value).__name__, value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, slice)):
        return ("torch", str(value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ("sym", str(value.node.expr))
    return ("object", _Same(value))


class _Same:
    """Compares by identity and keeps the object alive, so that its address is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


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
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    if isinstance(value, fx.GraphModule):
        return structural_key(value, ())
    return _Same(value)
