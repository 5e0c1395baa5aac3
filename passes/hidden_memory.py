"""What operators allocate besides their results and free themselves: workspaces, sums in a wider type, partial results.

Read off the sources of the libraries and of Inductor. What is neither listed nor a reduction hides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from fxoffload.passes.op_costs import call_of, fused_form, op_name, reduced_dims, shape_of, tensors_of


def hidden_bytes(node: fx.Node) -> int:
    """What running ``node`` allocates besides its results, and has freed when it ends."""
    target, args = call_of(node)
    name = op_name(target)
    try:
        if name in _HIDDEN:
            return _HIDDEN[name](node, args)
        if fused_form(node) == "reduction":
            return _split_reduction(node)
    except _UnknownSizeError:
        pass
    return 0


class _UnknownSizeError(Exception):
    """A size has no hint."""


def _shape(value: Any) -> tuple[int, ...]:
    found = tensors_of(value) if isinstance(value, fx.Node) else []
    shape = shape_of(found[0]) if found else None
    if shape is None:
        raise _UnknownSizeError
    return shape


def _element(value: fx.Node) -> int:
    return tensors_of(value)[0].element_size()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _flash_backward(node: fx.Node, args: Sequence[Any], head_axis: int = 1) -> int:
    """flash_attn/flash_api.cpp, mha_bwd: dq is summed up in float32 and the row sums of dO * O are kept, both for rows
    and heads rounded up; with fewer heads of keys than of queries, dk and dv are made per query head and then summed.
    """
    query, key = _shape(args[1]), _shape(args[2])
    if len(query) == 3:
        query, key = (1, *query), (1, *key)
        head_axis = 2
    batch, heads, depth = query[0], query[head_axis], _round_up(query[-1], 32)
    rows = _round_up(query[3 - head_axis], 128)
    accumulated = 4 * batch * heads * rows * (depth + 1)
    if key[head_axis] == heads:
        return accumulated
    return accumulated + 2 * _element(args[2]) * batch * heads * key[3 - head_axis] * query[-1]


def _flash_rows_first(node: fx.Node, args: Sequence[Any]) -> int:
    """The same for (batch, sequence, head, depth)."""
    return _flash_backward(node, args, head_axis=2)


def _efficient_backward(node: fx.Node, args: Sequence[Any]) -> int:
    """attention_backward.cu: the workspace holds float32 sums of dq, dk and dv for narrower types, and delta the row
    sums of dO * O."""
    query, key, value = (_shape(a) for a in args[1:4])
    delta = 4 * math.prod(query[:-1])
    if _element(args[1]) == 4:
        return delta
    return delta + 4 * sum(math.prod(s) for s in (query, key, value))


def _flex_backward(node: fx.Node, args: Sequence[Any]) -> int:
    """torch/_inductor/kernel/flex/flex_attention.py: delta, the row sums of dO * O in float32."""
    return 4 * math.prod(_shape(args[0])[:-1])


def _sort(node: fx.Node, args: Sequence[Any]) -> int:
    """aten/native/cuda/Sort.cpp and cub: a second buffer of keys and of int64 places."""
    return math.prod(_shape(args[0])) * (_element(args[0]) + 8)


def _index_put(node: fx.Node, args: Sequence[Any]) -> int:
    """aten/native/cuda/Indexing.cu, index_put_with_sort_kernel: linear, sorted and original places, int64, with cub's
    buffers as much again. Only where Inductor falls back to it: accumulation in a type without fast atomics."""
    accumulate = len(args) > 3 and args[3]
    if not accumulate or tensors_of(args[0])[0].dtype != torch.bfloat16:
        return 0
    places = [_shape(i) for i in args[1] if isinstance(i, fx.Node)]
    return 6 * 8 * max((math.prod(s) for s in places), default=0)


def _embedding_backward(node: fx.Node, args: Sequence[Any]) -> int:
    """aten/native/cuda/Embedding.cu: the places sorted, with their origins and counts. (Inductor decomposes the op into
    an index_put in float32, which is in the graph.)"""
    return 6 * 8 * math.prod(_shape(args[1]))


# How many partial results Inductor makes of one at most, about: it splits a reduction to fill the device.
_MAX_SPLITS = 256


def _split_reduction(node: fx.Node) -> int:
    """torch/_inductor/ir.py, Reduction.num_splits: where too few results are made of too much (the gradient of a norm's
    weight), partial results are written first, in float32."""
    kept, source = _new_elements(node), node.all_input_nodes[0]
    shape = _shape(source)
    dims = reduced_dims(node, len(shape))
    reduced = math.prod(shape[d] for d in dims)
    outer = any(i not in dims and shape[i] != 1 for i in range(max(dims, default=0), len(shape)))
    # Of the rows or columns that stay, there are enough to fill a device.
    if reduced < _MAX_SPLITS or (not outer and kept >= 1024):
        return 0
    return 4 * kept * min(_MAX_SPLITS, reduced // 8)


def _new_elements(node: fx.Node) -> int:
    return math.prod(_shape(node))


_HIDDEN: dict[str, Callable[[fx.Node, Sequence[Any]], int]] = {
    "aten._scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten._flash_attention_backward": _flash_rows_first,
    "torch_attn._varlen_attn_backward": _flash_rows_first,
    # cuDNN does not say what its workspace holds; its Hopper backward sums dq up in float32 too.
    "aten._scaled_dot_product_cudnn_attention_backward": _flash_backward,
    "aten._cudnn_attention_backward": _flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten._efficient_attention_backward": _efficient_backward,
    "flex_attention_backward": _flex_backward,
    "aten.sort": _sort,
    "aten.argsort": _sort,
    "aten.index_put": _index_put,
    "aten.index_put_": _index_put,
    "aten.embedding_dense_backward": _embedding_backward,
}
