"""Steps that are measured before a plan over several graphs is made: on the CPU, in a time of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import fxoffload
from fxoffload.compiler import plan_chain
from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.compiler.first_steps import FirstSteps
from fxoffload.compiler.measured_chain import as_compiled, measured_calls
from fxoffload.planner.as_measured import measured_step
from fxoffload.planner.chain import concatenate
from fxoffload.planner.schedule import Schedule
from fxoffload.runtime import background
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.profiler.step_clock import StepClock
from fxoffload.runtime.profiler.stream_events import host_events
from fxoffload.step.segment_names import TURN, entry_of
from tests.planner.rehearsal import CPU
from tests.planner.test_chain_planning import LENGTH, MODELS, Run, alone, new_plans, per_layer, recorded
from tests.planner.test_chain_search import layer, passed
from tests.planner.test_quick_plan import CALLS, SEEN, planning
from tests.support import assert_equal, batch

__all__ = ["alone"]  # the fixture

TICK_MS = 3.0


@contextmanager
def measuring(patience_s: float = 60.0) -> Iterator[list[FirstSteps]]:
    """Plans are made on a thread of their own, as on a GPU. Every reading of the time is three milliseconds later."""
    found: list[FirstSteps] = []
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += TICK_MS
        return now

    def first_steps_of(planning: Any, schedule: Any) -> FirstSteps:
        clock = StepClock(len(planning.descriptions), count=2, events=host_events(tick))
        found.append(FirstSteps(clock, patience_s))
        return found[-1]

    with (
        mock.patch.object(plan_chain, "first_steps_of", first_steps_of),
        mock.patch.object(engine_for(CPU).calls, "_in_background", True),
    ):
        yield found


def until(is_so: Any) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def join_planning() -> None:
    for thread in threading.enumerate():
        if thread.name == "fxoffload-chain-plan":
            thread.join(30)


def test_a_plan_is_made_from_steps_of_the_graphs_as_they_are() -> None:
    plain = recorded(MODELS["stack"], policy="keep_all").step()
    torch.compiler.reset()
    with measuring() as found:
        run = recorded(MODELS["stack"], steps=3)  # planning begins with the third
        until(lambda: found)
        for at in range(4):  # one is skipped, two count, the next ends the second
            assert not new_plans() and not found[0].is_settled, at
            assert_equal(run.step(), plain)
        until(lambda: found[0].is_settled)
        join_planning()
        (plan,) = new_plans()
        assert plan.basis == "steps"
        assert str(plan).count("predicted from steps that were measured before it was made") == 1
        assert_equal(run.step(), plain)
    # Every segment took one tick, and so did every gap between calls.
    assert plan.baseline.step_ms == pytest.approx(TICK_MS * (len(plan.boundaries) - 1))


def test_without_further_steps_a_plan_is_made_from_estimates() -> None:
    with measuring(patience_s=0.05) as found:
        run = recorded(MODELS["stack"], steps=3)
        join_planning()
        (plan,) = new_plans()
        assert found[0].is_settled and plan.basis != "steps"
        assert found[0].step_begins() is None
        run.step()


def test_planning_ends_when_the_model_is_forgotten() -> None:
    with measuring() as found:
        recorded(MODELS["stack"], steps=3)
        until(lambda: found)
        torch.compiler.reset()
        join_planning()
        assert not new_plans() and found[0].is_settled
        assert all(t.name != "fxoffload-chain-plan" for t in threading.enumerate())


def test_a_step_that_is_run_for_its_plan_is_run_until_it_was_measured() -> None:
    run = Run(per_layer(MODELS["stack"]()), batch(length=LENGTH))
    with measuring() as found:
        (plan,) = fxoffload.profile_step(run.step)
    assert plan.basis == "steps" and found[0].is_settled


def test_clocks_that_fail_or_give_up_leave_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(2, events=host_events())
    steps = FirstSteps(clock, 60.0)
    monkeypatch.setattr(clock, "begin_step", mock.Mock(side_effect=RuntimeError("on purpose")))
    with pytest.warns(UserWarning, match="could not measure a step"):
        assert steps.step_begins() is None
    assert steps.wait() is None and steps.is_settled
    monkeypatch.setattr(background, "is_ending", lambda: True)
    assert FirstSteps(StepClock(2, events=host_events()), 60.0).wait() is None


def test_calls_of_one_graph_take_what_the_median_took() -> None:
    plain, again = layer(halves=2), layer((64,), again_ms=0.5)
    ms: Any = {
        "forward": {"call 0/f": 5.0, "call 1/f": 7.0, "call 2/f": 9.0, "call 3/f": 2.0},
        "backward": {"call 0/b0": 1.0, "call 1/b0": 2.0, "call 2/b0": 4.0, "call 3/b0": 8.0},
    }
    found = measured_calls([plain, plain, plain, again], ["plain"] * 3 + ["again"], ms)
    assert list(found) == ["plain", "again"]
    first, second = found.values()
    assert [s.ms for s in (*first.forward, *first.backward)] == [7.0, 2.0, plain.backward[1].ms]
    assert [s.ms for s in (*second.forward, *second.backward)] == [2.0, 8.0]
    assert first.candidates == plain.candidates


GAP = entry_of("forward", 1)


def in_measured_time(found: ChainPlanning, schedule: Schedule, times: float = 1.0) -> Schedule:
    """Graphs took this many times longer. A gap that took 8 ms when it was seen took 3 for each ``times``."""
    description = found.descriptions[0]
    ms = {
        phase: {s.name: times * s.ms for s in segments}
        for phase, segments in (("forward", description.step.forward), ("backward", description.step.backward))
    }
    description = description.measured(measured_step(description.step, ms), "steps")  # type: ignore[arg-type]
    found.chain_search.gap_ms = {GAP: 8.0}
    return found.in_measured_time([description] * CALLS, {GAP: 3.0 * times, TURN: 1.0}, schedule)


def test_a_plan_keeps_its_decisions_and_takes_the_measured_time() -> None:
    """Ranks that measure different times still run the same code, and move the same values."""
    found = planning(SEEN)
    schedule = found.run()
    baseline, aim = found.baseline, "the least peak found within a slowdown of 10 %: "
    assert any(schedule.offload) and found.summary.startswith(aim)
    for times, gap in ((2.0, 6.0), (4.0, 8.0)):  # it was seen once in 8 ms
        measured = in_measured_time(found, schedule, times)
        assert (measured.offload, measured.windows) == (schedule.offload, schedule.windows)
        assert found.chain_search.gap_ms == {GAP: gap, TURN: 1.0}
        assert found.baseline.step_ms == pytest.approx(gap + 1.0 + CALLS * found.descriptions[0].step.compute_ms)
        assert found.baseline.peak_bytes == baseline.peak_bytes and found.is_measured
        assert found.summary.startswith(aim)
    assert found.baseline.step_ms > 8 * baseline.step_ms


def test_a_plan_that_everything_is_kept_under_says_so_still() -> None:
    found = planning(SEEN)
    found.summary = "everything is kept"
    in_measured_time(found, found.compiled.scheduler.smallest())
    assert found.summary == "everything is kept"


@pytest.mark.parametrize(("is_measured", "expected"), [(True, 5.0), (False, 10.0)])
def test_measured_times_of_a_graph_as_compiled_stand(is_measured: bool, expected: float) -> None:
    """Where it runs a variant now, that takes twice as long as was thought."""
    compiled = concatenate([layer(ms=5.0)] * 2, passed(2))
    ran = concatenate([layer(ms=7.0)] * 2, passed(2))
    ms = {"forward": {s.name: 2 * s.ms for s in ran.step.forward}, "backward": {}}
    found: Any = as_compiled(compiled, ran, [True] * 2, ["layer"] * 2, ms, is_measured=is_measured)  # type: ignore[arg-type]
    assert measured_step(compiled.step, found).forward[1].ms == pytest.approx(expected)
