"""Tangents: the gradients of a graph's outputs, which its backward is given.

[Note: Gradients that nothing comes from] Stock models return logits and caches together with the loss, and most loops
use the loss alone. Autograd then makes zeros for the others and holds them until the backward has ended: 2.3 GiB for
8,192 tokens and 151,936 words. Our graphs have autograd pass None instead (``fxoffload.backend``), make the zeros
themselves, and free them with their last reader.
"""

from __future__ import annotations

import re

import torch
import torch.fx as fx
from torch import Tensor

from fxoffload.analysis.values import tensor_of
from fxoffload.runtime.tracker.outputs import Zeros
from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass


def tangents_of(backward: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a backward graph that are tangents."""
    return [n for n in backward.graph.find_nodes(op="placeholder") if _is_tangent(n)]


def _is_tangent(node: fx.Node) -> bool:
    """As AOTAutograd names them. Saved values have the names of the nodes that made them."""
    return re.fullmatch(r"tangents_\d+", str(node.target)) is not None


def zeros_of(backward: fx.GraphModule) -> tuple[Zeros, ...]:
    """Zeros for all tangents of a backward graph; none where one of them is no plain tensor of a fixed size."""
    found: list[Zeros] = []
    for position, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        if not _is_tangent(node):
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
            return ()
        shape, stride = tuple(value.shape), tuple(value.stride())
        if not all(type(n) is int for n in (*shape, *stride)):
            return ()
        found.append(Zeros(position, shape, stride, value.dtype, value.device))
    return tuple(found)


def is_loss(value: object) -> bool:
    """Whether an output of a forward graph is a number that training may go on with alone."""
    found = tensor_of(value) if isinstance(value, fx.Node) else None
    return found is not None and found.dim() == 0 and found.dtype.is_floating_point
