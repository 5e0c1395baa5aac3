"""Methods that are replaced on single objects for a while.

[Note: Overrides]
A hook would do in many places, but hooks are walked through while they run: one that ends the last transition, or the
thread that waits for copies, would take itself out of the list that is being walked. An attribute of the object in
front of its class's method can be put and removed at any time, also around code that raises.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Overrides:
    """Replaced methods, put back together."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def put(self, target: Any, name: str, call: Callable[..., Any]) -> None:
        """Replaces ``target.name`` by ``call``, which gets the method that was there and then its arguments."""
        original = getattr(target, name)
        attributes = target.__dict__

        @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"))
        def override(_: Any, *args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        # A bound method like any other: learning rate schedulers look for the function in it.
        ours = types.MethodType(override, target)
        before = attributes.get(name, _MISSING)
        attributes[name] = ours

        def undo() -> None:
            if attributes.get(name) is not ours:
                return  # replaced once more by somebody else, who calls us
            if before is _MISSING:
                del attributes[name]
            else:
                attributes[name] = before

        self._undo.append(undo)

    def remove(self) -> None:
        """Puts everything back."""
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()


def is_ours(value: Any) -> bool:
    """Whether this is an override, or a hook that this package has put somewhere."""
    return getattr(getattr(value, "__func__", value), "__module__", "").startswith(__package__ or "fxoffload.phases")
