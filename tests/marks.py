"""Marks of single parameters, and the number of examples that are drawn."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Parameters of a case that ``make test`` leaves out: others of the same test check nearly as much."""
    return pytest.param(*values, marks=pytest.mark.slow)


_quick = False


def draw_few(*, quick: bool) -> None:
    """Called before tests are collected. ``quick``: tests marked ``slow`` are left out."""
    global _quick
    _quick = quick


def examples(count: int) -> int:
    """How many examples hypothesis draws: ``count`` where slow tests run too, else a third."""
    return max(count // 3, 10) if _quick else count
