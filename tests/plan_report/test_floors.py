"""Memory that every plan needs, in words."""

from __future__ import annotations

import pytest

from fxoffload.compiler.explain import floors_of
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import SegmentStep, StorageInfo, TrainingStep
from fxoffload.planner.windows import no_windows
from tests.oracle.models import machine

MIB = 1 << 20


def step(*, is_left_out: bool = False) -> TrainingStep:
    """Logits that a caller makes a loss from; their gradients are the peak."""
    storages = (
        StorageInfo("saved", MIB),
        StorageInfo("logits", 64 * MIB, is_output=True),
        StorageInfo("tangent", 64 * MIB, is_tangent=True, is_left_out=is_left_out),
        StorageInfo("gradient", MIB, is_gradient=True),
    )
    return TrainingStep(
        storages,
        (SegmentStep("f", ms=1.0, writes=("saved", "logits")),),
        (SegmentStep("b", ms=1.0, reads=("saved", "tangent"), writes=("gradient",)),),
    )


@pytest.mark.parametrize("is_left_out", [False, True])
def test_gradients_of_logits_are_named_where_they_are_there(is_left_out: bool) -> None:
    made = step(is_left_out=is_left_out)
    simulation = simulate(made, (), copies=machine(), windows=no_windows(made))
    found = [f for f in floors_of(made, simulation) if f.startswith("what the forward")]
    assert len(found) == 1 and (f"gradients of it: {0 if is_left_out else 64}" in found[0])
