"""What a plan gains, in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fxoffload.plan_report.summary import gain_of


@pytest.mark.parametrize(
    ("peak", "step_ms", "text"),
    [(75, 102.0, "25 % less memory for +2.0 % time"), (104, 103.6, "4 % more memory for +3.6 % time")],
)
def test_gains_and_losses(peak: int, step_ms: float, text: str) -> None:
    base = SimpleNamespace(peak_bytes=100, step_ms=100.0)
    assert gain_of(SimpleNamespace(peak_bytes=peak, step_ms=step_ms), base) == text  # type: ignore[arg-type]
