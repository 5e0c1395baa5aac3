"""Sizes in bytes: reading them from options and writing them into messages."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, Decimal

_PREFIXES = ("k", "m", "g", "t")
_UNITS = (
    {"": 1, "b": 1}
    | {p: 1000 ** (i + 1) for i, p in enumerate(_PREFIXES)}
    | {f"{p}b": 1000 ** (i + 1) for i, p in enumerate(_PREFIXES)}
    | {f"{p}ib": 1024 ** (i + 1) for i, p in enumerate(_PREFIXES)}
)
_PATTERN = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)
# What the device leaves for activations.
AUTO = "auto"
_ACCEPTED = (
    "a number of bytes such as 1048576, or a string with a unit such as '1.5GB', '512 MiB' or "
    "'2GiB' (kB, MB, GB, TB are powers of 1000, and so are k, M, G, T; KiB, MiB, GiB, TiB powers of 1024)"
)


def parse_bytes(value: int | str, name: str, *, allow_zero: bool = False) -> int:
    """The number of bytes that ``value`` stands for; parts of a byte are rounded.

    ``name`` is the option the value was given for. Raises OptionsError (a ValueError) when the
    value is no size, is negative, is less than one byte, or is zero without ``allow_zero``.
    """
    amount = _amount_bytes(value, name)
    if amount < 1 and not (allow_zero and amount == 0):
        least = "0 or at least 1 byte" if allow_zero else "at least 1 byte"
        raise _no_size(f"{name} is {value!r}; expected {least}: {_ACCEPTED}")
    return int(amount.to_integral_value(ROUND_HALF_EVEN))


def parse_budget(value: int | str, name: str) -> int | str:
    """As ``parse_bytes``; or a share of what a device leaves, as "auto" (all of it) or in the form "80%".

    Raises OptionsError (a ValueError) as ``parse_bytes`` does, and for shares that are not above 0 and at most 100 %.
    """
    if isinstance(value, str):
        if value.strip().lower() == AUTO:
            return AUTO
        if match := _PERCENT.fullmatch(value):
            percent = float(match[1])
            if not 0 < percent <= 100:
                raise _no_size(f"{name} is {value!r}; expected more than 0 % and at most 100 % of what {AUTO!r} gives")
            return AUTO if percent == 100 else f"{percent:.17g}%"
    elif isinstance(value, float) and 0 < value < 1:
        raise _no_size(f"{name} is {value!r}; expected bytes, or '{100 * value:g}%' of what the device leaves")
    try:
        return parse_bytes(value, name)
    except ValueError as error:
        raise _no_size(f"{error}; or {AUTO!r} for what the device leaves, '80%' for a share of that") from None


def share_of(budget: str) -> float:
    """The share that a budget of ``parse_budget`` stands for: 1.0 for "auto", 0.8 for "80%"."""
    return 1.0 if budget == AUTO else float(budget.removesuffix("%")) / 100


def format_bytes(num_bytes: int) -> str:
    """``num_bytes`` with one decimal in the largest of GiB, MiB and KiB that fits, else in B."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def _amount_bytes(value: object, name: str) -> Decimal:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        amount = Decimal(value)
        if amount.is_finite():
            return amount
    elif isinstance(value, str) and (match := _PATTERN.fullmatch(value)):
        number, unit = match.groups()
        if unit.lower() in _UNITS:
            return Decimal(number) * _UNITS[unit.lower()]
    raise _no_size(f"{name} is {value!r}; expected {_ACCEPTED}")


def _no_size(message: str) -> Exception:
    from fxoffload.errors import OptionsError  # which imports torch._dynamo; the command line's help does not

    return OptionsError(message)
