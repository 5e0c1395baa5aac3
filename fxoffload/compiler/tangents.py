"""Tangents: the gradients of a graph's outputs, which its backward is given.

[Note: Gradients that nothing comes from] Stock models return logits and caches together with the loss, and most loops
use the loss alone. Autograd then makes zeros for the others and holds them until the backward has ended: 2.3 GiB for
8,192 tokens and 151,936 words. Our graphs have autograd pass None instead (``fxoffload.backend``). Where one of the
outputs is a loss, segments are compiled without these gradients (``without_tangents``); else the graph makes zeros.
"""

from __future__ import annotations

import re

import torch
import torch.fx as fx
from torch import Tensor

from fxoffload.analysis.values import output_values, tensor_of
from fxoffload.passes.leave_out_zeros import can_be_left_out
from fxoffload.runtime.tracker.outputs import Zeros
from fxoffload.torch_private.op_schemas import mutated_args
from fxoffload.torch_private.symbolic_sizes import hint
from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass


def tangents_of(backward: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a backward graph that are tangents."""
    return [n for n in backward.graph.find_nodes(op="placeholder") if _is_tangent(n)]


def _is_tangent(node: fx.Node) -> bool:
    """As AOTAutograd names them. Saved values have the names of the nodes that made them."""
    return re.fullmatch(r"tangents_\d+", str(node.target)) is not None


def zeros_of(backward: fx.GraphModule) -> tuple[Zeros, ...]:
    """Zeros for all tangents of a backward graph; none where one of them is no plain tensor, or of unknown size."""
    found: list[Zeros] = []
    for position, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        if not _is_tangent(node):
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
            return ()
        sizes = (*value.shape, *value.stride())
        hints = [h for n in sizes if (h := hint(n)) is not None]
        if len(hints) < len(sizes):
            return ()
        shape, stride = tuple(hints[: value.dim()]), tuple(hints[value.dim() :])
        is_fixed = all(type(n) is int for n in sizes)
        found.append(Zeros(position, shape, stride, value.dtype, value.device, is_fixed))
    return tuple(found)


def left_out(backward: fx.GraphModule) -> frozenset[str]:
    """Names of the tangents that a backward can be compiled without: all of tensors, or none."""
    if not zeros_of(backward):
        return frozenset()
    found = [n for n in tangents_of(backward) if (value := tensor_of(n)) is not None and value.dim()]
    kept = {*output_values(backward.graph), *(v for n in backward.graph.nodes for v in mutated_args(n))}
    are_zeros = all(n not in kept and can_be_left_out(n) for n in found)
    return frozenset(n.name for n in found) if are_zeros else frozenset()


def is_loss(value: object) -> bool:
    """Whether an output of a forward graph is a number that training may go on with alone."""
    found = tensor_of(value) if isinstance(value, fx.Node) else None
    return found is not None and found.dim() == 0 and found.dtype.is_floating_point
