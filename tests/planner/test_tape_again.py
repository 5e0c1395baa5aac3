"""Steps of calls with what was measured of them, in the place of estimates."""

from __future__ import annotations

import pytest

from fxoffload.compiler.measured_chain import MeasuredChain, measured_calls, ratios_of, scaled
from fxoffload.planner.chain import BESIDE_NOTHING, concatenate
from fxoffload.planner.steps import TrainingStep
from tests.planner.test_tape_recompute import layer, passed

PLAIN, AGAIN = layer(halves=2), layer((64,), again_ms=0.5)


def seconds(step: TrainingStep) -> tuple[list[float], list[float]]:
    return [s.ms for s in step.forward], [s.ms for s in step.backward]


def needs(step: TrainingStep) -> tuple[list[int], list[int]]:
    return [s.temp_bytes for s in step.forward], [s.temp_bytes for s in step.backward]


def test_calls_of_one_kind_take_what_the_median_took_and_need_what_the_largest_needed() -> None:
    found = MeasuredChain(
        {
            "forward": {"call 0/f": 5.0, "call 1/f": 7.0, "call 2/f": 9.0, "call 3/f": 2.0},
            "backward": {"call 0/b0": 1.0, "call 1/b0": 2.0, "call 2/b0": 4.0, "call 3/b0": 8.0},
        },
        {"backward": {"call 0/b1": 7, "call 1/b1": None, "call 2/b1": 9, "call 3/b0": -5}},
        BESIDE_NOTHING,
    )
    steps = [PLAIN, PLAIN, PLAIN, AGAIN]
    calls = measured_calls(steps, ["plain", "plain", "plain", "again"], found)
    assert set(calls) == {"plain", "again"}
    assert seconds(calls["plain"]) == ([7.0], [2.0, PLAIN.backward[1].ms])
    assert seconds(calls["again"]) == ([2.0], [8.0])
    assert needs(calls["plain"]) == (needs(PLAIN)[0], [PLAIN.backward[0].temp_bytes, 9])
    assert needs(calls["again"])[1] == [0], "a working set is not less than nothing"
    assert calls["plain"].candidates == PLAIN.candidates


def test_what_nobody_has_run_is_as_much_slower_as_what_ran() -> None:
    chain = concatenate([PLAIN, PLAIN], passed(2))
    ms = {"forward": {"call 0/f": 3.0, "call 1/f": 1.0}, "backward": {"call 0/b0": 2.0, "call 9/b0": 100.0}}
    ratios = ratios_of(chain, ms)  # type: ignore[arg-type]
    (f,), (b0, b1) = seconds(PLAIN)
    assert ratios == {
        "forward": pytest.approx(4.0 / (2 * f)),
        "backward": pytest.approx((2.0 + b0 + 2 * b1) / (2 * (b0 + b1))),
    }
    slower = scaled(AGAIN, {"forward": 2.0, "backward": 3.0})
    assert seconds(slower) == ([2.0 * s.ms for s in AGAIN.forward], [3.0 * s.ms for s in AGAIN.backward])
    assert seconds(scaled(AGAIN, {})) == seconds(AGAIN)
