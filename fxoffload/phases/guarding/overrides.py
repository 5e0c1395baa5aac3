"""Methods that are replaced on single objects for a while.

[Note: Overrides]
A hook would do in many places, but hooks are walked through while they run. One that ends the last transition, or the
thread that waits for copies, would take itself out of the list that is being walked. An override is an attribute of the
object, in front of its class's method. It can be put and removed at any time, also around code that raises.

Other code replaces methods too. If it does so while an override is there, its method calls the override for good (a
learning rate scheduler's count of steps). Such an override stays where it is, inside theirs, and is switched on and
off. In front of theirs it would call itself without end.

Compiled code guards on the attributes that it went through. So an object gets the same override every time. A compiled
function that calls one has a second version for it, in which the override is called and not traced, and no third.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_MISSING = object()
_NOT_SEARCHED = (type, types.ModuleType, Tensor)
_COLLECTIONS = (dict, list, tuple, set, frozenset)
_DEPTH = 6  # of references: from other code's replacement to an override in it, from a function to a model
_MOST_THINGS, _MOST_ITEMS = 2000, 100  # that are looked at for an override, and of one collection


class Override:
    """One method of one object, to be replaced repeatedly.

    Args:
        call: gets the method that was there and then its arguments.
    """

    def __init__(self, target: Any, name: str, call: Callable[..., Any]) -> None:
        self._target, self._name = target, name
        self._original: Callable[..., Any] = getattr(target, name)
        self._first = self._original  # before other code can have put ours into theirs
        self._inside = threading.local()
        self._before: Any = _MISSING  # the attribute that was there, if any
        self._on = False
        self._examined: tuple[Any, bool] = (None, False)  # the method in place, and whether it calls this

        @functools.wraps(self._original, assigned=("__name__", "__qualname__", "__doc__"))
        def override(_: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "now", False):
                # We are part of the method that was in place, though ``leads_to`` had not found us: now it is known.
                self._examined, self._original = (self._original, True), self._first
                return self._first(*args, **kwargs)
            self._inside.now = True
            try:
                return call(self._original, *args, **kwargs) if self._on else self._original(*args, **kwargs)
            finally:
                self._inside.now = False

        # A bound method like any other: learning rate schedulers look for the function in it.
        self._ours = types.MethodType(torch.compiler.disable(override, recursive=False), target)

    def put(self) -> Callable[[], None]:
        """Puts it in place, or switches it on where the method in place calls it. Returns ``remove``."""
        attributes, name = self._target.__dict__, self._name
        now = attributes.get(name, _MISSING)
        if now is _MISSING or not self._is_part_of(now):
            self._before, self._original = now, getattr(self._target, name)
            attributes[name] = self._ours
        self._on = True
        return self.remove

    def remove(self) -> None:
        """Takes it away. May be called twice, and before ``put``."""
        self._on = False
        attributes, name = self._target.__dict__, self._name
        if attributes.get(name) is not self._ours:
            return  # replaced once more by other code, which may call us
        if self._before is _MISSING:
            del attributes[name]
        else:
            attributes[name] = self._before

    def _is_part_of(self, method: Any) -> bool:
        """Whether this is the override, or was made of it."""
        if self._examined[0] is not method:
            self._examined = method, leads_to(method, self, self._ours, self._ours.__func__, apart_from=self._target)
        return self._examined[1]


def leads_to(method: Any, *wanted: Any, apart_from: Any = None) -> bool:
    """Whether a callable is one of these, or may call one.

    Args:
        apart_from: an object that is not looked into.
    """

    def references(thing: Any) -> list[Any]:
        is_large = isinstance(thing, _COLLECTIONS) and len(thing) > _MOST_ITEMS
        return [] if is_large or isinstance(thing, nn.Module) else references_of(thing)

    things = itertools.islice(walk(method, references, apart_from), _MOST_THINGS)
    return any(thing is one for thing in things for one in wanted)


def walk(start: Any, references: Callable[[Any], list[Any]], apart_from: Any = None) -> Iterator[Any]:
    """An object and those that it leads to by a few references, each once, the nearest first.

    Args:
        references: of one object; those of an object that cannot be looked into (a proxy of one that is gone) do not
            count.
        apart_from: an object that is left out.
    """
    seen = {id(apart_from)}
    level = [start]
    for _ in range(_DEPTH):
        following = []
        for thing in level:
            if id(thing) not in seen:
                seen.add(id(thing))
                yield thing
                with contextlib.suppress(Exception):
                    following += references(thing)
        level = following


def references_of(thing: Any) -> list[Any]:
    """The object that a callable is bound to, those it closes over and wraps, its arguments and attributes; the items
    of a collection."""
    if isinstance(thing, Override):
        return [thing._original]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, types.FunctionType):
        cells = []
        for cell in thing.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                cells.append(cell.cell_contents)
        return [*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), *vars(thing).values()]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, _COLLECTIONS):
        return list(thing.values() if isinstance(thing, dict) else thing)
    if type(thing).__module__.startswith("fxoffload.") or isinstance(thing, _NOT_SEARCHED):
        return []
    return [*getattr(thing, "__dict__", {}).values()]


def remove_hook(hooks: dict[int, Any] | None, hook: Any) -> None:
    """Takes a hook out of a module's or tensor's, if it is there."""
    for key in [key for key, known in (hooks or {}).items() if known is hook]:
        hooks.pop(key, None)  # type: ignore[union-attr]


def is_ours(value: Any) -> bool:
    """Whether this is an override, or a hook that this package has put somewhere."""
    return getattr(getattr(value, "__func__", value), "__module__", "").startswith("fxoffload.phases.")
