"""Private torch APIs of guards on sizes that vary."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


def bounds_sizes() -> bool:
    """Whether the caller bounds some size (``mark_dynamic`` with ``min`` or ``max``). Dynamo then refuses guards that
    narrow it further.

    Needed by torch 2.11 to 2.14: ``TracingContext.tensor_to_context`` and ``StrictMinMaxConstraint``.
    """
    return any(isinstance(c, StrictMinMaxConstraint) for c in _size_constraints())


def marks_sizes() -> bool:
    """Whether the caller wants some size to vary (``mark_dynamic``). Dynamo then refuses guards that fix it.

    Needed by torch 2.11 to 2.14: ``TracingContext.tensor_to_context``.
    """
    return any(c is not None for c in _size_constraints())


def _size_constraints() -> Iterator[Any]:
    context = TracingContext.try_get()
    for symbolic in context.tensor_to_context.values() if context is not None else ():
        yield from getattr(symbolic, "constraint_sizes", None) or ()


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

    Needed by torch 2.11, and by torch 2.13 to 2.14, where ``error_on_new_guards`` refuses what holds for all sizes too.

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
