"""Marks of single parameters."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Parameters of a case that ``make test`` leaves out: others of the same test check nearly as much."""
    return pytest.param(*values, marks=pytest.mark.slow)
