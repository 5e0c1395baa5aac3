"""Frozen dataclasses and named tuples as JSON text and back, checked field by field.

A field may be a string, an integer, a finite number, a literal, a tuple of one kind, another such class, or None where
its type says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")

# Of the JSON form of a plan. Every change of a field is another version. Text of a version that is not here is refused.
# Earlier ones lack fields, which get their defaults. The first had frontiers that no plan met.
SCHEMA = 4
_EARLIER = (1, 2, 3)


def dumps(value: Any, *, skip: Collection[str] = ()) -> str:
    """JSON text with one line for each field, and one for each entry of a list. ``skip``: fields left out.

    Raises:
        ValueError: a field has another type than it should, or a number is not finite.
        TypeError: something has no JSON form.
    """
    kind = type(value)
    # Through the decoder, so that nothing is written that could not be read back.
    value = _decode_fields(kind, _plain_fields(value, skip), kind.__name__, skip)
    plain = _plain_fields(value, skip)
    lines = [f"{json.dumps(name)}: {_lines(field)}" for name, field in {"schema": SCHEMA, **plain}.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def loads(kind: type[T], text: str, what: str, *, skip: Collection[str] = ()) -> T:
    """What ``dumps`` wrote. ``what`` names it in messages.

    Raises:
        ValueError: the text is damaged, is something else, or is of another version.
    """
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"expected the JSON text of {what} (of a file, not its path), found {str(text)[:40]!r}: {error}"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"expected the JSON text of {what}, an object, found a {type(found).__name__}")
    schema = found.pop("schema", None)
    is_earlier = schema in _EARLIER
    if (schema != SCHEMA and not is_earlier) or isinstance(schema, bool):
        raise ValueError(
            f"expected {what} of schema {SCHEMA}, found schema {schema!r}; "
            "read it with the fxoffload that wrote it, or plan again and write it with this one"
        )
    if schema == 1:
        found["frontier"] = []
    return _decode_fields(kind, found, what, skip, may_lack=is_earlier)


# -- to text -----------------------------------------------------------------------------------------------------------


def _plain_fields(value: Any, skip: Collection[str]) -> dict[str, Any]:
    return {name: _encode(getattr(value, name), name) for name in _hints(type(value)) if name not in skip}


def _lines(plain: Any) -> str:
    if not isinstance(plain, list) or not plain:
        return json.dumps(plain)
    return "[\n " + ",\n ".join(json.dumps(item) for item in plain) + "\n]"


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str):
        return value
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        return {name: _encode(getattr(value, name), f"{where}: {name}") for name in _hints(type(value))}
    if isinstance(value, tuple):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    # The abstract kinds, because numpy's numbers come out of solvers.
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"expected {where} to be a string, a number, a tuple or a dataclass, found {value!r}")


# -- from text ---------------------------------------------------------------------------------------------------------


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Field -> type, in order."""
    names = getattr(kind, "_fields", None) or [f.name for f in dataclasses.fields(kind)]
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in names}


def _decode_fields(kind: type[T], value: Any, where: str, skip: Collection[str] = (), *, may_lack: bool = False) -> T:
    """``may_lack``: fields that have defaults, in this class and in the classes of its fields."""
    if not isinstance(value, dict):
        raise ValueError(f"expected {where} to be a JSON object, found {_short(value)}")
    hints = {name: hint for name, hint in _hints(kind).items() if name not in skip}
    if may_lack:
        has_default: Collection[str] | None = getattr(kind, "_field_defaults", None)  # of a named tuple
        if has_default is None:
            has_default = {f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}  # type: ignore[arg-type]
        hints = {name: hint for name, hint in hints.items() if name in value or name not in has_default}
    missing, unknown = [n for n in hints if n not in value], [n for n in value if n not in hints]
    if missing or unknown:
        raise ValueError(
            f"expected {where} to have the fields {', '.join(hints)}; found {', '.join(unknown) or 'none'} "
            f"besides them, and missed {', '.join(missing) or 'none'}"
        )
    return kind(**{name: _decode(hint, value[name], f"{where}: {name}", may_lack) for name, hint in hints.items()})


def _decode(kind: Any, value: Any, where: str, may_lack: bool) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(a for a in arguments if a is not types.NoneType)
        return None if value is None else _decode(inner, value, where, may_lack)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise ValueError(f"expected {where} to be one of {', '.join(arguments)}, found {_short(value)}")
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"expected {where} to be a list, found {_short(value)}")
        return tuple(_decode(arguments[0], item, f"{where}[{i}]", may_lack) for i, item in enumerate(value))
    if kind in (str, int, float):
        return _decode_scalar(kind, value, where)
    return _decode_fields(kind, value, where, may_lack=may_lack)


def _decode_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        words = {str: "a string", int: "an integer", float: "a finite number"}
        raise ValueError(f"expected {where} to be {words[kind]}, found {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
