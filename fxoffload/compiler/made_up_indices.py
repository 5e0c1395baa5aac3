"""Whether indices stay valid where inputs are made up. On a GPU, an index that is not valid ends the process.

A made-up integer is a valid index. A value computed from it need not be: not ``index - 1``, nor a count of zeros. So
each value of a segment is REAL (one that a step could have), SAFE (real, zero or a valid index, element by element) or
UNSAFE (anything). No index may be UNSAFE.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import aten_names, call_of, op_name, tensors_of

# Operators that hand values on, or some of them.
HANDS_ON = aten_names(
    """view reshape _unsafe_view unsqueeze squeeze expand permute transpose t slice select alias detach clone contiguous
    _to_copy where split split_with_sizes as_strided constant_pad_nd flip roll repeat"""
) | {"prims.convert_element_type"}
INDEX_LISTS = aten_names(
    """index _unsafe_index index_put index_put_ _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate"""
)
INDEX_ALONG = aten_names("gather scatter scatter_add scatter_reduce index_select index_add")
EMBEDDINGS = aten_names("embedding embedding_dense_backward")
# Arguments that say where groups end: of grouped products, of packed sequences.
ENDS = ("offs", "cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_q", "cu_seq_k")

_INDEXING = INDEX_LISTS | INDEX_ALONG | EMBEDDINGS | aten_names("take")
# Their results are valid indices whatever they read.
_MAKES_INDICES = aten_names("topk sort argsort argmax argmin kthvalue multinomial")
_READS_SHAPES = aten_names("zeros_like ones_like new_zeros new_ones")
# Zeros give zeros. A number that is added must not be negative.
_KEEPS_ZEROS = (
    HANDS_ON
    | _INDEXING
    | aten_names("add mul floor_divide div remainder bitwise_and bitwise_right_shift sum cumsum minimum cat stack")
)


class _Value(enum.IntEnum):
    REAL = 0
    SAFE = 1
    UNSAFE = 2


def may_index_wrongly(nodes: Sequence[fx.Node]) -> bool:
    """Whether some of ``nodes`` (in graph order) would index by an UNSAFE value, were their inputs made up."""
    known: dict[fx.Node, _Value] = {}
    for node in nodes:
        if node.op == "call_function":
            if any(_value_of(n, known) is _Value.UNSAFE for n in _indices_of(node)):
                return True
            known[node] = _result_of(node, known)
    return False


def _value_of(node: fx.Node, known: Mapping[fx.Node, _Value]) -> _Value:
    if node in known:
        return known[node]
    if not tensors_of(node):
        return _Value.REAL  # a size
    return _Value.UNSAFE if any(t.dtype.is_floating_point for t in tensors_of(node)) else _Value.SAFE


def _result_of(node: fx.Node, known: Mapping[fx.Node, _Value]) -> _Value:
    name = op_name(call_of(node)[0])
    if name in _MAKES_INDICES or name in _READS_SHAPES:
        return _Value.REAL
    read: Sequence[Any] = node.all_input_nodes
    if name == "aten.where":
        read = [a for a in node.args[1:] if isinstance(a, fx.Node)]
    worst = max((_value_of(n, known) for n in read), default=_Value.REAL)
    if worst is not _Value.SAFE:
        return worst
    is_negative = any(isinstance(a, (int, float)) and a < 0 for a in node.args) and name == "aten.add"
    keeps = (name in _KEEPS_ZEROS and not is_negative) or node.target is operator.getitem
    return _Value.SAFE if keeps else _Value.UNSAFE


def _indices_of(node: fx.Node) -> list[fx.Node]:
    """Arguments that ``node`` reads as indices, or as ends of groups."""
    target, args = call_of(node)
    schema = getattr(target, "_schema", None)
    if schema is None:
        return []
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | dict(node.kwargs)
    names = (*ENDS, "indices", "index") if op_name(target) in _INDEXING else ENDS
    found: list[fx.Node] = []
    for name in names:
        fx.map_arg(given.get(name), found.append)
    return [n for n in found if not any(t.dtype is torch.bool for t in tensors_of(n))]
