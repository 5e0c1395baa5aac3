"""Plans are as good as the golden ones. See README.md."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import fxoffload
from tests.oracle import golden, outcome
from tests.oracle.adapter import no_points_between
from tests.oracle.cases import BATCHES, COMMON
from tests.oracle.models import STEPS, machine
from tests.oracle.outcome import Numbers, changes, compare, numbers_of

GOLDEN = {case["name"]: case for case in golden.read(golden.PLANS)}
# Their graphs are planned in other cases too.
SLOW = {
    "chain: default",
    "chain: slowdown of 50 %",
    "chain: tight budget",
    "stack: default",
    "stack: slowdown of 10 %",
    "stack: slowdown of 50 %",
    "stack: tight budget",
    "measured chain, slow: slowdown",
    "trained chain: extra memory: budget",
    "trained chain: gathered parameters: budget",
}
CASES = [
    pytest.param(number, name, id=name, marks=[pytest.mark.slow] if batch.is_slow or name in SLOW else [])
    for number, batch in enumerate(BATCHES)
    for name in batch.objectives
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("FXOFFLOAD_") or n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]:
            patch.delenv(name)
        patch.setenv("FXOFFLOAD_PROGRESS", "0")
        yield
    torch.set_num_threads(threads)


@functools.cache
def results(number: int, names: tuple[str, ...]) -> Mapping[str, Numbers | None]:
    """Of cases of a batch, which share what takes long."""
    return BATCHES[number].run({name: GOLDEN[name]["options"] for name in names})


@pytest.fixture
def result_of(request: pytest.FixtureRequest) -> Callable[[int, str], Numbers | None]:
    """That of a case. The first one that is asked for makes those of all cases of its batch that are to run."""
    given = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = {callspec.params["name"] for callspec in given if callspec is not None and "name" in callspec.params}

    def found(number: int, name: str) -> Numbers | None:
        return results(number, tuple(n for n in BATCHES[number].objectives if n in wanted or n == name))[name]

    return found


def test_every_case_has_a_golden_result() -> None:
    assert list(GOLDEN) == [name for batch in BATCHES for name in batch.objectives]
    assert {case["name"]: case["made"] for case in GOLDEN.values()} == {
        n: b.made for b in BATCHES for n in b.objectives
    }


@pytest.mark.parametrize(("number", "name"), CASES)
def test_a_plan_is_as_good_as_the_golden_one(
    number: int, name: str, result_of: Callable[[int, str], Numbers | None]
) -> None:
    found, case = result_of(number, name), GOLDEN[name]
    assert found is not None, f"{name}: expected a plan within {case['options']}, found that the planner refuses"
    result = compare(case["numbers"], found, case["options"].get("activation_budget"))
    told = "\n  ".join([f"{name} ({case['made']}):", *changes(case["numbers"], found)])
    assert not result.worse, f"worse: {'; '.join(result.worse)}\n{told}"
    if result.better:
        warnings.warn(f"better: {told}\nremake the golden file with python -m tests.oracle.make", stacklevel=1)


@pytest.mark.slow
def test_sharing_a_trace_changes_no_plan(result_of: Callable[[int, str], Numbers | None]) -> None:
    """Cases of one model share partitionings. ``fxoffload.plan`` alone gives the same."""
    name = "stack: tight budget"
    with no_points_between():
        step = STEPS["stack"]()
        plan = fxoffload.plan(step.model, example_args=step.args, device=machine(), **COMMON, **GOLDEN[name]["options"])
    (number,) = [i for i, b in enumerate(BATCHES) if name in b.objectives]
    assert numbers_of(plan) == result_of(number, name)


# -- the comparison itself ---------------------------------------------------------------------------------------------

_BEFORE: dict[str, Any] = {
    "step_ms": 10.0,
    "peak_bytes": 1000_000,
    "host_bytes": 500_000,
    "smallest_budget_bytes": 800_000,
    "plain_step_ms": 9.0,
    "plain_peak_bytes": 2000_000,
    "segments": 10,
}


@pytest.mark.parametrize(
    ("change", "worse", "better"),
    [
        ({}, False, False),
        ({"segments": 12, "step_ms": 10.009, "peak_bytes": 999_100}, False, False),
        ({"step_ms": 10.02}, True, False),
        ({"step_ms": 9.9}, False, True),
        ({"peak_bytes": 1002_000, "step_ms": 5.0}, True, True),
        ({"host_bytes": 501_000}, True, False),
        ({"smallest_budget_bytes": 700_000}, False, True),
        ({"plain_step_ms": 8.9}, True, False),
        ({"plain_peak_bytes": 1990_000}, True, False),
    ],
)
def test_what_is_worse_and_what_is_better(change: dict[str, Any], worse: bool, better: bool) -> None:
    found = compare(_BEFORE, {**_BEFORE, **change})
    assert (bool(found.worse), bool(found.better)) == (worse, better)


def test_a_budget_is_met_to_the_byte() -> None:
    assert not compare(_BEFORE, _BEFORE, 1000_000).worse
    assert compare(_BEFORE, _BEFORE, 999_999).worse
    assert outcome.AIMS[:3] == ("step_ms", "peak_bytes", "host_bytes")
