"""Memory that operators allocate and free themselves: workspaces, sums in a wider type, partial results.

Read off the sources of the libraries and of Inductor. An op that is neither listed nor a reduction hides nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import (
    UnknownSizeError,
    call_of,
    fused_form,
    op_name,
    reduced_dims,
    shape_of,
    tensors_of,
)
from fxoffload.torch_private.symbolic_sizes import hint


def hidden_bytes(node: fx.Node) -> int:
    """Bytes that running ``node`` allocates in addition to its results, and has freed when it ends."""
    target, args = call_of(node)
    name = op_name(target)
    try:
        if name in _HIDDEN:
            return _HIDDEN[name](node, args)
        if fused_form(node) == "reduction":
            return _split_reduction(node)
    except (UnknownSizeError, IndexError):  # IndexError: arguments by name, where they are given by place as a rule
        pass
    return 0


def _shape(value: Any) -> tuple[int, ...]:
    found = tensors_of(value) if isinstance(value, fx.Node) else []
    shape = shape_of(found[0]) if found else None
    if shape is None:
        raise UnknownSizeError
    return shape


def _element(value: fx.Node) -> int:
    return tensors_of(value)[0].element_size()


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _flash_backward(node: fx.Node, args: Sequence[Any], head_axis: int = 1) -> int:
    """flash_attn/flash_api.cpp, mha_bwd and mha_varlen_bwd.

    They sum dq in float32 and keep the row sums of dO * O, both with rows and heads rounded up. With fewer heads of
    keys than of queries, they make dk and dv per query head and then sum them. The deterministic kernel has as many
    sums of dq as it takes to fill the device. Before it, attention_backward.cu copies dO and O where their rows are
    not contiguous.
    """
    query, key = _shape(args[1]), _shape(args[2])
    if len(query) == 3:  # of several lengths: (rows of all, head, depth)
        batch, heads = _shape(args[6])[0] - 1, query[1]
        rows, order = query[0] + 128 * batch, (0, 1, 2)
        kv_heads, kv_rows = key[1], key[0]
    else:
        batch, heads = query[0], query[head_axis]
        rows, order = batch * _round_up(query[3 - head_axis], 128), (0, 3 - head_axis, head_axis, 3)
        kv_heads, kv_rows = key[head_axis], batch * key[3 - head_axis]
    splits = -(-_multiprocessors(args[1]) // max(batch * heads, 1)) if _is_deterministic() else 1
    summed = _sums_of_dq(rows, heads, query[-1], splits)
    expanded = 0 if kv_heads == heads else 2 * _element(args[2]) * heads * kv_rows * query[-1]
    return summed + expanded + sum(_bytes_to_lay_out(a, order) for a in (args[0], args[4]))


def _sums_of_dq(rows: int, heads: int, depth: int, splits: int = 1) -> int:
    """With the row sums of dO * O, in float32."""
    return 4 * heads * rows * (splits * _round_up(depth, 32 if depth <= 128 else 64) + 1)


def _cudnn_backward(node: fx.Node, args: Sequence[Any]) -> int:
    """As much as flash attention's backward takes for sums of dq and for dk and dv per query head.

    That was seen of cuDNN's Hopper backward (H100, torch 2.11); cuDNN does not tell what its workspace holds. It is not
    chosen where algorithms have to be deterministic.
    """
    (batch, heads, rows, depth), key = _shape(args[1]), _shape(args[2])
    expanded = 0 if key[1] == heads else 2 * _element(args[2]) * batch * heads * key[2] * depth
    return _sums_of_dq(batch * _round_up(rows, 128), heads, depth) + expanded


def _bytes_to_lay_out(value: fx.Node, order: Sequence[int]) -> int:
    """Bytes of a contiguous copy of it, its dimensions in this order; none where it lies so already."""
    shape = _shape(value)
    tensor, expected = tensors_of(value)[0], 1
    for dim in reversed(order):
        if shape[dim] != 1 and hint(tensor.stride(dim)) != expected:
            return math.prod(shape) * tensor.element_size()
        expected *= shape[dim]
    return 0


# Of attention_backward.cu's kernels for sm80 and later, in 16 bits.
_DEPTH_IN_REGISTERS = 128


def _is_deterministic() -> bool:
    """Whether attention has to be. (Where it only warns, it stays as it is.)"""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# Of an H100 and an H200.
_USUAL_MULTIPROCESSORS = 132


def _multiprocessors(value: fx.Node) -> int:
    device = tensors_of(value)[0].device
    if device.type != "cuda" or not torch.cuda.is_available():
        return _USUAL_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _efficient_backward(node: fx.Node, args: Sequence[Any]) -> int:
    """attention_backward.cu: the workspace holds float32 sums of dq for narrower types, of dk and dv too where heads
    are too deep for registers, and delta the row sums of dO * O."""
    query, key, value = (_shape(a) for a in args[1:4])
    delta = 4 * math.prod(query[:-1])
    if _element(args[1]) == 4:
        return delta
    summed = (query,) if query[-1] <= _DEPTH_IN_REGISTERS else (query, key, value)
    return delta + 4 * sum(map(math.prod, summed))


def _flex_backward(node: fx.Node, args: Sequence[Any]) -> int:
    """torch/_inductor/kernel/flex/flex_attention.py: delta, the row sums of dO * O in float32."""
    return 4 * math.prod(_shape(args[0])[:-1])


# Rows up to the first length are sorted in place (aten/native/cuda/Sort.h). Rows from the second length on are sorted
# one by one, others all at once; from the third number of rows on by cub's segmented sort (SortStable.cu).
_MOST_IN_PLACE, _ROW_FILLS_DEVICE, _SEGMENTS = 4096, 1_000_000, 128


def _sort(node: fx.Node, args: Sequence[Any]) -> int:
    """aten/native/cuda/SortStable.cu and cub: a second buffer of keys, and two of int64 places.

    To sort several rows at once: also two buffers of places with their rows, and sorted keys that nothing reads.
    """
    shape, dim = _shape(args[0]), args[1] if len(args) > 1 else node.kwargs.get("dim", -1)
    if not shape or not isinstance(dim, int) or shape[dim] <= _MOST_IN_PLACE:
        return 0
    element, row, count = _element(args[0]), shape[dim], math.prod(shape)
    rows = count // row
    if rows == 1 or row >= _ROW_FILLS_DEVICE:
        return row * (element + 16)
    return count * (2 * element + 24 if rows < _SEGMENTS else element + 16)


# aten/native/cuda/Indexing.cu, index_put_with_sort_kernel: linear, sorted and original places, int64, with cub's
# buffers as much again.
_SORTED_PLACE = 6 * 8


def _index_put(node: fx.Node, args: Sequence[Any]) -> int:
    """Only where Inductor falls back to the sort: accumulation in a type without fast atomics, and everything under
    deterministic algorithms but one value where a mask says so."""
    indices = [i for i in args[1] if isinstance(i, fx.Node)]
    is_mask = [tensors_of(i)[0].dtype in (torch.bool, torch.uint8) for i in indices]
    if is_mask == [True] and math.prod(_shape(args[2])) == 1:
        return 0
    return _put(args[0], len(args) > 3 and args[3], [_shape(i) for i in indices])


def _masked_index_put(node: fx.Node, args: Sequence[Any]) -> int:
    """It accumulates. Inductor makes an index_put of it."""
    return _put(args[0], True, [_shape(i) for i in args[2] if isinstance(i, fx.Node)])


def _put(into: fx.Node, accumulate: bool, places: Sequence[tuple[int, ...]]) -> int:
    is_fast = not accumulate or tensors_of(into)[0].dtype != torch.bfloat16
    if not places or (is_fast and not torch.are_deterministic_algorithms_enabled()):
        return 0
    return _SORTED_PLACE * math.prod(torch.broadcast_shapes(*places))


def _scatter(node: fx.Node, args: Sequence[Any]) -> int:
    """aten/native/TensorAdvancedIndexing.cpp, _scatter_via_index_put: under deterministic algorithms a tensor is put by
    a sort of its places. One that is expanded along all other dimensions has as many as along this one."""
    if not torch.are_deterministic_algorithms_enabled() or not isinstance(args[3], fx.Node):
        return 0
    shape, index = _shape(args[2]), tensors_of(args[2])[0]
    dim = args[1] % max(len(shape), 1)
    is_expanded = all(hint(index.stride(d)) == 0 for d in range(len(shape)) if d != dim)
    return _SORTED_PLACE * (shape[dim] if shape and is_expanded else math.prod(shape))


def _embedding_backward(node: fx.Node, args: Sequence[Any]) -> int:
    """aten/native/cuda/Embedding.cu: the places sorted, with their origins and counts. (Inductor decomposes the op into
    an index_put in float32, which is in the graph.)"""
    return 6 * 8 * math.prod(_shape(args[1]))


# How many partial results Inductor makes of one at most, about: it splits a reduction to fill the device.
_MAX_SPLITS = 256


def _split_reduction(node: fx.Node) -> int:
    """torch/_inductor/ir.py, Reduction.num_splits: where too few results are made of too much (the gradient of a norm's
    weight), partial results are written first, in float32."""
    kept, source = math.prod(_shape(node)), node.all_input_nodes[0]
    shape = _shape(source)
    dims = reduced_dims(node, len(shape))
    reduced = math.prod(shape[d] for d in dims)
    outer = any(i not in dims and shape[i] != 1 for i in range(max(dims, default=0), len(shape)))
    # Of the rows or columns that stay, there are enough to fill a device.
    if reduced < _MAX_SPLITS or (not outer and kept >= 1024):
        return 0
    return 4 * kept * min(_MAX_SPLITS, reduced // 8)


# Of (batch, sequence, head, depth).
_flash_rows_first = functools.partial(_flash_backward, head_axis=2)

_HIDDEN: dict[str, Callable[[fx.Node, Sequence[Any]], int]] = {
    "aten._scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten._flash_attention_backward": _flash_rows_first,
    "torch_attn._varlen_attn_backward": _flash_rows_first,
    "aten._scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "aten._scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten._efficient_attention_backward": _efficient_backward,
    "flex_attention_backward": _flex_backward,
    "aten.sort": _sort,
    "aten.argsort": _sort,
    "aten.index_put": _index_put,
    "aten.index_put_": _index_put,
    "aten._unsafe_index_put": _index_put,
    "aten._unsafe_masked_index_put_accumulate": _masked_index_put,
    "aten.scatter": _scatter,
    "aten.scatter_": _scatter,
    "aten.scatter_add": _scatter,
    "aten.scatter_add_": _scatter,
    "aten.embedding_dense_backward": _embedding_backward,
}
