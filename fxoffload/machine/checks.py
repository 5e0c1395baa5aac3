"""Checks of single values; every message names the field, the accepted values and the value found."""

from __future__ import annotations

import math
from typing import Any

from fxoffload.errors import OptionsError


def positive_int(name: str, value: Any) -> int:
    """``value`` itself. Raises OptionsError (a ValueError) unless it is an int above zero."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise OptionsError(f"expected {name} to be an integer above 0, found {value!r}")


def positive(name: str, value: Any) -> float:
    """``value`` as a float. Raises OptionsError (a ValueError) unless it is a finite number above zero."""
    if _is_finite(value) and value > 0:
        return float(value)
    raise OptionsError(f"expected {name} to be a finite number above 0, found {value!r}")


def not_negative(name: str, value: Any) -> float:
    """``value`` as a float. Raises OptionsError (a ValueError) unless it is a finite number of at least zero."""
    if _is_finite(value) and value >= 0:
        return float(value)
    raise OptionsError(f"expected {name} to be a finite number of at least 0, found {value!r}")


def text(name: str, value: Any) -> str:
    """``value`` itself. Raises OptionsError (a ValueError) unless it is a string with something in it."""
    if isinstance(value, str) and value.strip():
        return value
    raise OptionsError(f"expected {name} to be a string that is not empty, found {value!r}")


def _is_finite(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False
