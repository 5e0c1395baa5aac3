"""Tangents: the gradients of a graph's outputs, which its backward is given.

[Note: Gradients that nothing comes from] Stock models return logits and caches together with the loss, and most loops
use the loss alone. Autograd then makes zeros for the others and holds them until the backward has ended: 2.3 GiB for
8,192 tokens and 151,936 words. Our graphs have autograd pass None instead (``fxoffload.backend``). Where one of the
outputs is a loss, segments that would only add these gradients are compiled without them (``without_tangents``). For
others the graph makes zeros. Where those are of sizes that vary, autograd makes all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from fxoffload.analysis.op_costs import node_kind
from fxoffload.analysis.segmentation import Segment, Segmentation
from fxoffload.analysis.values import extent_bytes, output_values, tensor_of
from fxoffload.passes.leave_out_zeros import can_be_left_out
from fxoffload.runtime.tracker.outputs import Zeros
from fxoffload.torch_private.op_schemas import mutated_args
from fxoffload.torch_private.symbolic_sizes import hint, told_symbols
from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass


def tangents_of(backward: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a backward graph that are tangents."""
    return [n for n in backward.graph.find_nodes(op="placeholder") if _is_tangent(n)]


def _is_tangent(node: fx.Node) -> bool:
    """As AOTAutograd names them. Saved values have the names of the nodes that made them."""
    return re.fullmatch(r"tangents_\d+", str(node.target)) is not None


def zeros_of(backward: fx.GraphModule, left_out: Collection[str] = ()) -> tuple[Zeros, ...]:
    """Zeros for all tangents of a backward graph. None, where one of them is no plain tensor, or is of a size that
    varies and not among ``left_out`` (names)."""
    found: list[Zeros] = []
    for position, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        if not _is_tangent(node):
            continue
        zeros = zeros_like(position, node.meta.get("val"))
        if zeros is None or not (zeros.is_fixed or node.name in left_out):
            return ()
        found.append(zeros)
    return tuple(found)


def zeros_like(position: int, value: object) -> Zeros | None:
    """Zeros of a traced value's form, for the argument at ``position``. None: it is no plain tensor, or of unknown
    size."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
        return None
    sizes = (*value.shape, *value.stride())
    hints = [h for n in sizes if (h := hint(n)) is not None]
    if len(hints) < len(sizes):
        return None
    shape, stride = tuple(hints[: value.dim()]), tuple(hints[value.dim() :])
    return Zeros(position, shape, stride, value.dtype, value.device, all(type(n) is int for n in sizes))


def left_out(backward: fx.GraphModule, segmentation: Segmentation) -> frozenset[str]:
    """Names of the tangents that the segments of a backward can be compiled without. None, where autograd has to make
    zeros for others: it makes all then."""
    every = frozenset(tangents_of(backward))
    kept = {*output_values(backward.graph), *(v for n in backward.graph.nodes for v in mutated_args(n))}
    found = {n for n in every - kept if (value := tensor_of(n)) is not None and value.dim()}
    for segment in segmentation.segments:
        mine = found.intersection(segment.inputs)
        found -= {n for n in mine if not can_be_left_out(segment, n, every)}
        if not _tells_its_sizes(segment, found):
            found -= mine
    names = frozenset(n.name for n in found)
    return names if zeros_of(backward, names) else frozenset()


def _tells_its_sizes(segment: Segment, left_out: Collection[fx.Node]) -> bool:
    """Whether the other inputs of a segment tell all sizes that those which are left out tell."""
    values: dict[bool, list[object]] = {True: [], False: []}
    for node in segment.inputs:
        values[node in left_out].append(node.meta.get("val"))
    return told_symbols(values[True]) <= told_symbols(values[False])


def losses_of(returned: Sequence[object]) -> frozenset[fx.Node]:
    """Outputs of a forward graph that training may go on with alone: numbers made of the same products as the largest
    other output.

    The products tell, since that output may be a cast of its own: Accelerate's are. A MoE's router has a loss that is
    not made of the logits' product. Returned with logits, in RL, it is no loss of theirs, nor is a number that is
    logged.
    """
    tensors = {v: t for v in returned if isinstance(v, fx.Node) and (t := tensor_of(v)) is not None}
    floats = {v: t for v, t in tensors.items() if t.dtype.is_floating_point}
    numbers = frozenset(v for v, t in floats.items() if not t.dim())
    sizes = {v: extent_bytes(t) or 0 for v, t in floats.items() if v not in numbers}
    for other in sorted(sizes, key=lambda v: -sizes[v]):
        if products := _last_products(other):
            return frozenset(n for n in numbers if products & _made_of(n))
    return numbers


def _last_products(node: fx.Node) -> set[fx.Node]:
    """The products, convolutions and attentions that ``node`` is made of, without those that they are made of."""
    return {n for n in _made_of(node, _is_product) if _is_product(n)}


def _is_product(node: fx.Node) -> bool:
    return node_kind(node) in ("matmul", "convolution", "attention")


def _made_of(node: fx.Node, ends: Callable[[fx.Node], bool] = lambda _: False) -> set[fx.Node]:
    """``node``, and all values that it is made of. ``ends``: of which no more is to be known."""
    found, to_come = {node}, [node]
    while to_come:
        now = to_come.pop()
        new = [] if ends(now) else [n for n in now.all_input_nodes if n not in found]
        found.update(new)
        to_come += new
    return found
