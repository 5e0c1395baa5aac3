"""Objects that are known and not held."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_Thing = TypeVar("_Thing")


class WeakBag(Generic[_Thing]):
    """A ``WeakSet`` that runs no code when an element goes. A ``WeakSet`` runs Python then, on whatever thread drops
    the element: the exception of a signal that comes meanwhile would be printed and lost."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[_Thing]] = {}
        self._numbers = itertools.count()

    def add(self, thing: _Thing) -> None:
        """``thing`` is not in it."""
        for number, known in list(self._known.items()):
            if known() is None:
                self._known.pop(number, None)
        self._known[next(self._numbers)] = weakref.ref(thing)

    def __iter__(self) -> Iterator[_Thing]:
        return iter([thing for known in list(self._known.values()) if (thing := known()) is not None])
