"""Values as cells of tables; "-" where there is none."""

from __future__ import annotations

GIB = 1 << 30


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / GIB:.2f}"


def percent(part: float | None) -> str:
    """Signed: 0.02 is "+2.0%"."""
    return "-" if part is None else f"{part:+.1%}"
