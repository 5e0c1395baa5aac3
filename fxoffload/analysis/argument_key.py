"""Arguments of nodes in a form that compares by content and type."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import op_name

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def argument_key(value: Any, of_node: Callable[[fx.Node], Hashable]) -> Hashable:
    """Equal for arguments of the same content and type. ``of_node``: a node's own form.

    Symbolic sizes are compared as text, which identifies them within one ``ShapeEnv`` only.
    """
    if isinstance(value, fx.Node):
        return of_node(value)
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(argument_key(v, of_node) for v in value))
    if isinstance(value, dict):
        return tuple((k, argument_key(v, of_node)) for k, v in value.items())
    if isinstance(value, float):
        return ("float", value.hex())  # tells 0.0 from -0.0, and nan equals itself
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ("sym", str(value.node.expr))
    if isinstance(value, slice):
        return ("slice", *(argument_key(v, of_node) for v in (value.start, value.stop, value.step)))
    return (type(value).__name__, value) if isinstance(value, _PLAIN) else Same(value)


def cost_arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments on which time and memory of ``node`` depend. Layers with dropout look up a seed each, one number
    apart: which one does not matter."""
    is_lookup = op_name(node.target) == "prims.inductor_lookup_seed"
    return node.args[:1] if is_lookup else (node.args, node.kwargs)


class Same:
    """Compares by identity and keeps the object alive, so that its address is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value
