"""Describes in words the objects that refer to an object. Keeps no reference to anything."""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_OWN_FILES = (__file__, str(Path(__file__).with_name("residue.py")))
_DEPTH = 5
_MOST_NAMED = 4
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, types.CellType)


def describe_referrers(targets: Iterable[Any], own: Iterable[Any]) -> dict[int, list[str]]:
    """For the id of each target: its referrers, in words.

    Args:
        own: the caller's containers, to be left out. Frames of this package are left out always.
    """
    targets = list(targets)
    left_out = {id(thing) for thing in own} | {id(targets)}
    levels: dict[int, list[Any]] = {}
    wanted, passes = targets, 0
    while wanted and passes < _DEPTH:
        left_out.add(id(wanted))
        found = _referrers(wanted, left_out)
        levels |= found
        left_out |= {id(levels), id(found)} | {id(some) for some in found.values()}
        unnamed = {id(r): r for some in found.values() for r in some if _is(r, (*_CONTAINERS, Tensor))}
        wanted = [r for key, r in unnamed.items() if key not in levels]
        left_out.add(id(unnamed))
        passes += 1
    _add_frames({id(target) for target in targets}, levels)
    texts = {id(target): list(_texts(target, levels)) for target in targets}
    levels.clear()
    return texts


def _referrers(objects: list[Any], left_out: set[int]) -> dict[int, list[Any]]:
    """One pass of the collector over everything, for all objects at once."""
    found: dict[int, list[Any]] = {id(one): [] for one in objects}
    everybody = gc.get_referrers(*objects)
    for referrer in everybody:
        if id(referrer) in left_out or _is(referrer, types.FrameType):
            continue
        for referent in {id(r) for r in gc.get_referents(referrer)} & found.keys():
            found[referent].append(referrer)
    return found


def _add_frames(targets: set[int], levels: dict[int, list[Any]]) -> None:
    """The collector does not look into the locals of running functions."""
    frame: types.FrameType | None = None
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_filename not in _OWN_FILES and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                for name, target in _locals(frame, targets):
                    place = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
                    levels.setdefault(target, []).append(_Local(f"local variable {name!r} in function {place}"))
            frame = frame.f_back
    # Bound to the frame of this function it would be a cycle, which keeps all that the frames hold.
    del frame


class _Local(str):
    """Said already."""


def _locals(frame: types.FrameType, targets: set[int]) -> list[tuple[str, int]]:
    variables = frame.f_locals
    found = [(name, id(value)) for name, value in variables.items() if id(value) in targets]
    if sys.version_info < (3, 13):
        variables.clear()  # a snapshot that the frame would keep
    return found


def _texts(target: Any, levels: dict[int, list[Any]]) -> Iterator[str]:
    named: dict[str, None] = {}
    for referrer in levels.get(id(target), ()):
        text = _text(target, referrer, levels, _DEPTH)
        if text:
            named[text] = None
    yield from list(named)[:_MOST_NAMED]
    if len(named) > _MOST_NAMED:
        yield f"and {len(named) - _MOST_NAMED} others"


def _text(target: Any, referrer: Any, levels: dict[int, list[Any]], depth: int) -> str:
    """Empty where only our own caller holds it."""
    if _is(referrer, _Local):
        return str(referrer)
    if _is(referrer, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return f"local variable in the suspended {referrer.__qualname__}"
    if _is(referrer, types.FunctionType):
        code = referrer.__code__
        return f"function {referrer.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    if not _is(referrer, (*_CONTAINERS, Tensor)):
        return _attribute_text(target, referrer)
    place = _place(target, referrer)
    above = [one for one in levels.get(id(referrer), ()) if one is not target] if depth else []
    if isinstance(referrer, dict):
        owned = _owner_text(place, referrer, above, levels)
        if owned:
            return owned
    outer = next((text for one in above if (text := _text(referrer, one, levels, depth - 1))), "")
    return f"{place} in {outer}" if outer else place


def _place(target: Any, container: Any) -> str:
    """Where in a container: "key 'x' of a dict"."""
    kind = type(container).__name__
    if isinstance(container, dict):
        keys = [key for key, value in list(container.items()) if value is target]
        return f"key {_key_text(keys[0])} of a {kind}" if keys else f"a key of a {kind}"
    if isinstance(container, (list, tuple, deque)):
        index = next((i for i, value in enumerate(container) if value is target), None)
        return f"item {index} of a {kind}" if index is not None else f"a {kind}"
    if isinstance(container, types.CellType):
        return "closure variable"
    return f"a {kind}" if not isinstance(container, Tensor) else f"inside a {kind}"


def _owner_text(place: str, names: dict[Any, Any], above: list[Any], levels: dict[int, list[Any]]) -> str:
    """Of a dict that is the namespace of a module or an object, or holds a module's parameters or buffers."""
    if names.get("__name__") in sys.modules and "__spec__" in names:
        return f"{place.replace('key', 'global').removesuffix(' of a dict')} of {names['__name__']}"
    for owner in above:
        if _attributes(owner) is names:
            return f"{place.replace('key', 'attribute').removesuffix(' of a dict')} of {type(owner).__name__}"
        holders = [owner, *levels.get(id(owner), ())] if _is(owner, dict) else [owner]
        for module in holders:
            if _is(module, nn.Module):
                for attribute, word in (("_parameters", "parameter"), ("_buffers", "buffer")):
                    if (_attributes(module) or {}).get(attribute) is names:
                        return f"{place.replace('key', word).split(' of ')[0]} of {type(module).__name__}"
    return ""


def _attribute_text(target: Any, owner: Any) -> str:
    names = [str(name) for name, value in (_attributes(owner) or {}).items() if value is target]
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if _quietly(lambda slot=slot: object.__getattribute__(owner, slot)) is target:
                names.append(slot)
    if names:
        return f"attribute {names[0]!r} of {type(owner).__name__}"
    return f"a {type(owner).__name__}"


def _key_text(key: Any) -> str:
    if isinstance(key, Tensor):
        return f"<{type(key).__name__}>"
    text = _quietly(lambda: repr(key)) if isinstance(key, (str, int, tuple, type(None))) else None
    return text[:60] if isinstance(text, str) else f"<{type(key).__name__}>"


def _attributes(owner: Any) -> dict[Any, Any] | None:
    found = _quietly(lambda: object.__getattribute__(owner, "__dict__"))
    return found if isinstance(found, dict) else None


def _is(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    # Not isinstance(): that asks proxies for their __class__, and they may raise.
    return issubclass(type(thing), kinds)


def _quietly(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:
        return None
