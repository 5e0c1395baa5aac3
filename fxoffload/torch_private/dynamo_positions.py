"""Private torch APIs of Dynamo: whether a tensor of positions counts up by one, for all that a graph can know.

transformers takes ``position_ids`` that do not count up for packed sequences, and reads their values to tell. A graph
cannot read values, so that under ``torch.compile`` it takes all of them for packed, its own ``arange`` too. That one
counts up for certain: it is in the graph. Positions that are the graph's input are not known.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.fx.experimental.symbolic_shapes import statically_known_true


class _Found(threading.local):
    consecutive: bool = False


_found = _Found()
_assumed = ContextVar("assumed", default=False)

_SHAPES = ("unsqueeze", "view", "reshape", "expand", "expand_as", "repeat")  # the last dimension is checked
_COPIES = ("to", "long", "int", "contiguous", "clone", "detach")
_SUMS = ("add", "__add__", "__radd__")
_EXACT = (torch.int32, torch.int64)  # floats round large positions


def are_consecutive(position_ids: Tensor) -> bool:
    """Whether each row of ``position_ids`` counts up by one, as the graph that Dynamo traces has it.

    False where it cannot be known, and outside of Dynamo but for ``assume_consecutive``. The graph gets no node and no
    guard from it.

    Needed by torch 2.11 to 2.14: ``torch._dynamo.comptime``.
    """
    if not torch.compiler.is_dynamo_compiling():
        return _assumed.get()
    comptime(_look)
    return bool(_result())


@contextlib.contextmanager
def assume_consecutive() -> Iterator[None]:
    """Take all positions for consecutive, for a tracer other than Dynamo whose caller gives none of its own.

    Needed by torch 2.11 to 2.14: ``torch._dynamo.comptime``, which knows Dynamo's graphs alone.
    """
    token = _assumed.set(True)
    try:
        yield
    finally:
        _assumed.reset(token)


def _look(ctx: ComptimeContext) -> None:
    """Runs while Dynamo traces ``are_consecutive``."""
    _found.consecutive = False
    node = getattr(ctx.get_local("position_ids").as_proxy(), "node", None)
    if isinstance(node, fx.Node):
        _found.consecutive = _counts_up(node)


@torch._dynamo.assume_constant_result  # pyright: ignore[reportPrivateImportUsage]
def _result() -> bool:
    return _found.consecutive


def _counts_up(node: fx.Node) -> bool:
    """Whether a node is ``arange`` with a step of one, plus numbers, in any shape whose last dimension is all of it."""
    length = _last(node)
    if length is None or node.op not in ("call_function", "call_method") or _is_written_to(node):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.target is torch.arange:
        step = node.kwargs.get("step", node.args[2] if len(node.args) > 2 else 1)
        return bool(step == 1) and "out" not in node.kwargs
    if name in _SUMS:
        tensors = [a for a in node.args if isinstance(_value(a), Tensor)]
        numbers = [a for a in node.args if isinstance(a, int) or isinstance(_value(a), (int, torch.SymInt))]
        whole = len(tensors) == 1 and len(tensors) + len(numbers) == len(node.args)
        return whole and not node.kwargs and isinstance(tensors[0], fx.Node) and _counts_up(tensors[0])
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target is operator.getitem:
        if not _takes_whole_rows(node.args[1], _value(source).dim()):
            return False
    elif name not in (*_SHAPES, *_COPIES):
        return False
    before = _last(source)
    return before is not None and statically_known_true(before == length) and _counts_up(source)


def _takes_whole_rows(index: Any, dims: int) -> bool:
    """Whether an index leaves the last of ``dims`` dimensions as it is."""
    items = [i for i in (index if isinstance(index, tuple) else (index,)) if i is not None]
    leading, last = items[: dims - 1], items[dims - 1 :]
    return all(isinstance(i, int) or i == slice(None) for i in leading) and all(i == slice(None) for i in last)


def _is_written_to(node: fx.Node) -> bool:
    """Whether an op so far writes into a node's memory, or into a view of it."""
    for user in node.users:
        name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        if user.kwargs.get("out") is node or (user.args and user.args[0] is node and _writes(user, name)):
            return True
        if (name in (*_SHAPES, *_COPIES) or user.target is operator.getitem) and _is_written_to(user):
            return True
    return False


def _writes(user: fx.Node, name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or user.target is operator.setitem or name in ("iadd", "isub", "imul", "ifloordiv", "imod")


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _last(node: fx.Node) -> Any:
    """Length of the last dimension of a tensor of exact integers."""
    value = _value(node)
    return value.shape[-1] if isinstance(value, Tensor) and value.dim() and value.dtype in _EXACT else None
