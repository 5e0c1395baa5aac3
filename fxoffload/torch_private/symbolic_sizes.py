"""Private torch APIs of sizes that vary: their hints, symbols and expressions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_symbols as free_symbols
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as free_unbacked_symbols


class _OtherSizes:
    """Values of size symbols that stand for their hints, and the values of expressions with them."""

    def __init__(self, values: Mapping[Any, int]) -> None:
        self._values = dict(values)
        self._known: dict[Any, int | None] = {}

    def of(self, node: Any) -> int | None:
        """The value of a SymInt's node."""
        expression = node._expr  # as it was made: ``expr`` looks for simpler forms each time
        if expression not in self._known:
            of_call = node.shape_env.backed_var_to_val  # the call that is compiled for
            values = {s: self._values.get(s, of_call.get(s)) for s in node.expr.free_symbols}
            self._known[expression] = None if None in values.values() else int(node.expr.xreplace(values))
        return self._known[expression]


_OTHER_SIZES: ContextVar[_OtherSizes | None] = ContextVar("fxoffload_other_sizes", default=None)


@contextlib.contextmanager
def hints_at(sizes: Mapping[Any, int]) -> Iterator[None]:
    """Within it ``hint`` tells sizes as they would be with these values of the symbols; other symbols keep their
    hints.

    Needed by torch 2.11 to 2.14: ``SymNode._expr`` and ``ShapeEnv.backed_var_to_val``.
    """
    token = _OTHER_SIZES.set(_OtherSizes(sizes))
    try:
        yield
    finally:
        _OTHER_SIZES.reset(token)


def hint(value: Any) -> int | None:
    """The size hint of an int or SymInt, without adding a guard; None where there is none (unbacked).

    Needed by torch 2.11 to 2.14: ``SymNode._hint`` and ``SymNode.has_hint``.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        node = value.node
        others = _OTHER_SIZES.get()
        if others is not None and hasattr(node, "_expr"):
            return others.of(node)
        known = getattr(node, "_hint", None)
        if known is None and node.has_hint():
            known = node.hint
        return int(known) if known is not None else None
    return None


def largest_size(value: Any) -> int | None:
    """The largest value that a SymInt may have; None for no bound.

    Needed by torch 2.11 to 2.14: ``ShapeEnv.bound_sympy``.
    """
    upper = value.node.shape_env.bound_sympy(value.node.expr).upper
    return int(upper) if getattr(upper, "is_Integer", False) else None


def _expression(value: Any) -> Any:
    """A sympy expression or number; SymInts are not computed with, so no guard is added."""
    if isinstance(value, torch.SymInt):
        return value.node.expr
    return sympy.Integer(value) if isinstance(value, int) else value


def product(a: Any, b: Any) -> Any:
    """``a * b`` of ints, SymInts and sympy expressions, as an expression.

    Needed by torch 2.11 to 2.14: ``SymNode.expr``.
    """
    return _expression(a) * _expression(b)


def quotient(a: Any, b: Any) -> int | None:
    """``a / b`` where it is the same whole number for all sizes; else None.

    Needed by torch 2.11 to 2.14: ``SymNode.expr``.
    """
    found = sympy.cancel(_expression(a) / _expression(b))
    return int(found) if found.is_Integer and found > 0 else None


def form_of(value: torch.Tensor) -> tuple[Any, Any]:
    """Shape, and strides (None of what has none), of a fake tensor, to be compared with another's: as expressions, so
    that no guard is added.

    Needed by torch 2.11 to 2.14: ``SymNode.expr``.
    """
    strided = value.layout is torch.strided
    return tuple(map(_expression, value.shape)), tuple(map(_expression, value.stride())) if strided else None


def form_when_contiguous(value: torch.Tensor) -> tuple[Any, Any]:
    """``form_of`` a contiguous tensor of the same shape.

    Needed by torch 2.11 to 2.14: ``SymNode.expr``.
    """
    shape = tuple(map(_expression, value.shape))
    strides, size = [], sympy.Integer(1)
    for n in reversed(shape):
        strides.append(size)
        size = size * n
    return shape, tuple(reversed(strides))


def symbols_of(value: Any) -> set[Any]:
    """The free symbols in the sizes and strides of a fake tensor, or in a SymInt.

    Needed by torch 2.11 to 2.14: ``torch.fx.experimental.symbolic_shapes.free_symbols``.
    """
    if isinstance(value, torch.Tensor):
        found: set[Any] = set()
        for item in (*value.shape, *value.stride(), value.storage_offset()):
            if isinstance(item, torch.SymInt):
                found |= set(free_symbols(item))
        return found
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(free_symbols(value))
    return set()


def told_symbols(inputs: Sequence[Any]) -> frozenset[Any]:
    """The symbols that are an input themselves, or a size of an input.

    Needed by torch 2.11 to 2.14: ``SymNode.expr``.
    """
    sizes = [n for i in inputs for n in (i.shape if isinstance(i, torch.Tensor) else (i,))]
    expressions = [n.node.expr for n in sizes if isinstance(n, torch.SymInt)]
    return frozenset(e for e in expressions if e.is_Symbol)


def backed_sizes(inputs: Sequence[Any]) -> list[torch.SymInt]:
    """Sizes whose hints tell those of all ``inputs``: inputs that are sizes, and of tensors one for each symbol that is
    left.

    Needed by torch 2.11 to 2.14: ``SymNode.expr``.
    """
    found = [i for i in inputs if isinstance(i, torch.SymInt)]
    told = {n.node.expr for n in found}
    for size in (n for i in inputs if isinstance(i, torch.Tensor) for n in i.shape):
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in told:
            found.append(size)
            told.add(size.node.expr)
    return [n for n in found if hint(n) is not None]


def told_all_symbols(inputs: Sequence[Any]) -> bool:
    """Whether each symbol in the sizes of ``inputs`` is an input or a size itself, as it always is in a whole graph. A
    product of symbols alone tells none of them.

    Needed by torch 2.11 to 2.14: ``free_symbols``.
    """
    told = told_symbols(inputs)
    sized = [i for i in inputs if isinstance(i, (torch.Tensor, torch.SymInt))]
    return all(set(free_symbols(i)) <= told for i in sized)
