"""Private torch APIs about sizes that are not known while a graph is compiled, and about fake tensors that have them.

``fxoffload._torch_compat`` has the others of the compiler.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, StrictMinMaxConstraint
from torch.fx.experimental.symbolic_shapes import free_symbols as free_symbols
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as free_unbacked_symbols
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


@contextlib.contextmanager
def without_learnt_sizes() -> Iterator[None]:
    """Compile as if Dynamo had compiled nothing before, and as if nothing had been compiled afterwards.

    Stands for ``torch._dynamo.pgo._CODE_STATE``: for the whole process, the sizes that each piece of code was compiled
    with. A second size makes the next compilation one for dynamic sizes.
    """
    from torch._dynamo import pgo

    learnt, pgo._CODE_STATE = pgo._CODE_STATE, defaultdict(pgo.CodeState)
    try:
        yield
    finally:
        pgo._CODE_STATE = learnt


class _OtherSizes:
    """Values of size symbols that stand for their hints, and the values of expressions with them."""

    def __init__(self, values: Mapping[Any, int]) -> None:
        self._values = dict(values)
        self._known: dict[Any, int | None] = {}

    def of(self, node: Any) -> int | None:
        """The value of a SymInt's node."""
        expression = node._expr  # as it was made: ``expr`` looks for simpler forms each time
        if expression not in self._known:
            values = {
                s: self._values[s] if s in self._values else symbol_hint(s, node.shape_env)
                for s in node.expr.free_symbols
            }
            self._known[expression] = None if None in values.values() else int(node.expr.xreplace(values))
        return self._known[expression]


_OTHER_SIZES: ContextVar[_OtherSizes | None] = ContextVar("fxoffload_other_sizes", default=None)


@contextlib.contextmanager
def hints_at(sizes: Mapping[Any, int]) -> Iterator[None]:
    """Within it ``hint`` tells sizes as they would be with these values of the symbols; other symbols keep their
    hints."""
    token = _OTHER_SIZES.set(_OtherSizes(sizes))
    try:
        yield
    finally:
        _OTHER_SIZES.reset(token)


def hint(value: Any) -> int | None:
    """The size hint of an int or SymInt, without adding a guard; None where there is none (unbacked)."""
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


def symbol_hint(symbol: Any, shape_env: Any) -> int | None:
    """The value of a size symbol in the call that is compiled for; None for a symbol without one."""
    value = shape_env.backed_var_to_val.get(symbol)
    return None if value is None else int(value)


def largest_size(value: Any) -> int | None:
    """The largest value that a SymInt may have; None for no bound."""
    upper = value.node.shape_env.bound_sympy(value.node.expr).upper
    return int(upper) if getattr(upper, "is_Integer", False) else None


def bounds_sizes() -> bool:
    """Whether the caller bounds some size (``mark_dynamic`` with ``min`` or ``max``). Dynamo then refuses guards that
    narrow it further."""
    return any(isinstance(c, StrictMinMaxConstraint) for c in _size_constraints())


def marks_sizes() -> bool:
    """Whether the caller wants some size to vary (``mark_dynamic``). Dynamo then refuses guards that fix it."""
    return any(c is not None for c in _size_constraints())


def _size_constraints() -> Iterator[Any]:
    context = TracingContext.try_get()
    for symbolic in context.tensor_to_context.values() if context is not None else ():
        yield from getattr(symbolic, "constraint_sizes", None) or ()


def _expression(value: Any) -> Any:
    """A sympy expression or number; SymInts are not computed with, so no guard is added."""
    if isinstance(value, torch.SymInt):
        return value.node.expr
    return sympy.Integer(value) if isinstance(value, int) else value


def product(a: Any, b: Any) -> Any:
    """``a * b`` of ints, SymInts and sympy expressions, as an expression."""
    return _expression(a) * _expression(b)


def quotient(a: Any, b: Any) -> int | None:
    """``a / b`` where it is the same whole number for all sizes; else None."""
    found = sympy.cancel(_expression(a) / _expression(b))
    return int(found) if found.is_Integer and found > 0 else None


@contextlib.contextmanager
def _fakes_without_guards(fake: Any) -> Iterator[None]:
    """The mode of a fake tensor; computing in it guards nothing.

    Stands for ``FakeTensor.fake_mode`` and ``ShapeEnv.suppress_guards``.
    """
    mode = fake.fake_mode
    env = mode.shape_env
    with mode, torch.no_grad(), env.suppress_guards() if env is not None else contextlib.nullcontext():
        yield


class NewGuardError(GuardOnDataDependentSymNode):
    """The compiled code would hold for some sizes only.

    Code that can do without an answer about unknown sizes does so here too.
    """


def _holds_for_all(expression: Any, value: Any, env: Any) -> bool:
    """Whether ``expression`` is ``value`` for all sizes that a tensor can have, within the known range of each.

    To torch a size may be larger than any 64-bit number, and an open end of a slice is the largest of these."""
    ranges = {}
    for symbol in expression.free_symbols:
        known = env.var_to_range.get(symbol)
        if known is None or not known.is_int:
            return False
        ranges[symbol] = known & ValueRanges(-sys.maxsize, sys.maxsize - 1)
    found = bound_sympy(expression, ranges)
    return found.is_singleton() and bool(found.lower == value)


@contextlib.contextmanager
def no_new_guards(env: Any) -> Iterator[None]:
    """Within it nothing may be assumed of sizes that is not assumed already: Dynamo has made the guards of the graph,
    and would not check it.

    Stands for ``ShapeEnv.error_on_new_guards`` (torch 2.13) by the method that it changes. ``env``: of the graph; None
    where there is none.

    Raises:
        NewGuardError: where something new would be assumed.
    """
    if env is None:
        yield
        return

    def check(expression: Any, value: Any) -> None:
        if not ShapeEnv._suppress_guards_tls() and not _holds_for_all(expression, value, env):
            raise NewGuardError(
                expression, f"expected nothing new to be assumed of sizes, found {expression} == {value}"
            )

    before = env.__dict__.get("_check_frozen")
    env._check_frozen = check
    try:
        yield
    finally:
        if before is None:
            del env._check_frozen
        else:
            env._check_frozen = before


def new_fake_like(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same layout, over memory of its own."""
    with _fakes_without_guards(value) if isinstance(value, FakeTensor) else contextlib.nullcontext():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def fakes_over_new_memory(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake tensors of the same layouts, over new memory that they share as ``values`` share theirs.

    Values that are not strided stay.
    """
    memory: dict[int, torch.Tensor] = {}
    found = []
    for value in values:
        if value.layout is not torch.strided or not isinstance(value, FakeTensor):
            found.append(value)
            continue
        storage = value.untyped_storage()
        with _fakes_without_guards(value):
            if storage._cdata not in memory:
                memory[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=value.device)
            flat = memory[storage._cdata].view(value.dtype)
            found.append(flat.as_strided(value.shape, value.stride(), value.storage_offset()))
    return found


def run_on_fakes(node: fx.Node) -> Any:
    """The result of the op of ``node`` for the fake values of its arguments."""
    args = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    fake = next((n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], FakeTensor)), None)
    with _fakes_without_guards(fake) if fake is not None else contextlib.nullcontext():
        return node.target(*args[0], **args[1])  # type: ignore[operator]


def form_of(value: torch.Tensor) -> tuple[Any, Any]:
    """Shape, and strides (None of what has none), of a fake tensor, to be compared with another's: as expressions, so
    that no guard is added."""
    strided = value.layout is torch.strided
    return tuple(map(_expression, value.shape)), tuple(map(_expression, value.stride())) if strided else None


def symbols_of(value: Any) -> set[Any]:
    """The free symbols in the sizes and strides of a fake tensor, or in a SymInt."""
    if isinstance(value, torch.Tensor):
        found: set[Any] = set()
        for item in (*value.shape, *value.stride(), value.storage_offset()):
            if isinstance(item, torch.SymInt):
                found |= set(free_symbols(item))
        return found
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(free_symbols(value))
    return set()


def told_all_symbols(inputs: Sequence[Any]) -> bool:
    """Whether each symbol in the sizes among ``inputs`` is an input itself, as it always is in a whole graph. A product
    of symbols alone tells none of them."""
    expressions = [i.node.expr for i in inputs if isinstance(i, torch.SymInt)]
    told = {e for e in expressions if e.is_Symbol}
    return all(e.free_symbols <= told for e in expressions)
