"""Methods that are replaced on single objects for a while.

[Note: Overrides]
A hook would do in many places, but hooks are walked through while they run: one that ends the last transition, or the
thread that waits for copies, would take itself out of the list that is being walked. An attribute of the object in
front of its class's method can be put and removed at any time, also around code that raises.

Compiled code guards on the attributes that it went through. So an object gets the same override every time: a compiled
function that calls one has a second version for it, in which the override is called and not traced, and no third.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

_MISSING = object()


class Override:
    """One method of one object, to be replaced again and again.

    Args:
        target: the object.
        name: of the method.
        call: gets the method that was there and then its arguments.
    """

    def __init__(self, target: Any, name: str, call: Callable[..., Any]) -> None:
        self._target, self._name = target, name
        self._original: Callable[..., Any] = getattr(target, name)

        @functools.wraps(self._original, assigned=("__name__", "__qualname__", "__doc__"))
        def override(_: Any, *args: Any, **kwargs: Any) -> Any:
            return call(self._original, *args, **kwargs)

        # A bound method like any other: learning rate schedulers look for the function in it.
        self._ours = types.MethodType(torch.compiler.disable(override, recursive=False), target)

    def put(self) -> Callable[[], None]:
        """Puts it in place. Returns what takes it away."""
        attributes, name = self._target.__dict__, self._name
        before = attributes.get(name, _MISSING)
        self._original = getattr(self._target, name)
        attributes[name] = self._ours

        def undo() -> None:
            if attributes.get(name) is not self._ours:
                return  # replaced once more by somebody else, who calls us
            if before is _MISSING:
                del attributes[name]
            else:
                attributes[name] = before

        return undo


class Overrides:
    """Replaced methods, put back together."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def put(self, override: Override) -> None:
        """Puts one in front of the method that its object has now."""
        self._undo.append(override.put())

    def remove(self) -> None:
        """Puts everything back."""
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()


def is_ours(value: Any) -> bool:
    """Whether this is an override, or a hook that this package has put somewhere."""
    return getattr(getattr(value, "__func__", value), "__module__", "").startswith(__package__ or "fxoffload.phases")
