"""Memory that every plan needs, in words."""

from __future__ import annotations

import pytest

from fxoffload.compiler.explain import floors_of
from fxoffload.planner.chain import with_turn
from fxoffload.planner.simulate import simulate
from fxoffload.planner.steps import SegmentStep, StorageInfo, TrainingStep
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


@pytest.mark.parametrize("how", ["before a step", "left out", "measured"])
def test_a_loss_in_eager_code_is_unknown_before_a_step(how: str) -> None:
    made = step(is_left_out=how == "left out")
    if how == "measured":
        made = with_turn(made, ms=2.0, temp_bytes=MIB)
    found = [f for f in floors_of(made, simulate(made, (), copies=machine())) if f.startswith("what the forward")]
    assert len(found) == 1
    assert ("a loss in eager code takes is not in the plan until a step ran" in found[0]) is (how == "before a step")
