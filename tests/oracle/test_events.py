"""Under fixed plans, the simulator and the copy engine do what they did. See README.md."""

from __future__ import annotations

import difflib

import pytest

from tests.oracle import events, golden, simulations

LOGS = {case["name"]: case for case in golden.read(golden.EVENTS)}
STEPS = {case["name"]: case for case in golden.read(golden.SIMULATIONS)}


def test_every_case_has_a_golden_result() -> None:
    assert {name: case["made"] for name, case in LOGS.items()} == {n: s.made for n, s in events.SCRIPTS.items()}
    assert tuple(STEPS) == simulations.NAMES


@pytest.mark.parametrize("name", simulations.NAMES)
def test_a_simulated_step_is_the_golden_one(name: str) -> None:
    assert simulations.run(name) == STEPS[name]


@pytest.mark.parametrize("name", events.SCRIPTS)
def test_the_events_of_a_fixed_plan_are_the_golden_ones(name: str) -> None:
    found, expected = events.run(name), LOGS[name]["log"]
    different = list(difflib.unified_diff(expected, found, "golden", "now", lineterm=""))
    assert not different, "\n".join([f"{name} ({LOGS[name]['made']}):", *different[:60]])
