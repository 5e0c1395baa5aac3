"""Steps that are measured before a plan over several graphs is made: on the CPU, in a time of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fxoffload
from fxoffload.compiler import first_steps, plan_chain
from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.compiler.first_steps import FirstSteps, as_in_steps, first_steps_of, measured_descriptions
from fxoffload.compiler.first_steps import in_measured_time as in_time_of
from fxoffload.compiler.measured_chain import as_compiled, measured_calls
from fxoffload.compiler.recalibrate_chain import ChainRecalibration
from fxoffload.planner.as_measured import measured_step
from fxoffload.planner.chain import concatenate, with_turn
from fxoffload.planner.objective import Objective
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.steps import TrainingStep
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.profiler.step_clock import StepClock
from fxoffload.runtime.profiler.stream_events import host_events
from fxoffload.step.readings import Readings, Sample
from fxoffload.step.segment_names import TURN, entry_of, segment_of
from tests.planner.rehearsal import CPU
from tests.planner.test_chain_planning import LENGTH, MODELS, Run, alone, new_plans, per_layer, recorded
from tests.planner.test_chain_search import layer, passed
from tests.planner.test_quick_plan import CALLS, SEEN, planning
from tests.support import assert_equal, batch

__all__ = ["alone"]  # the fixture

TICK_MS = 0.25


class Measuring:
    """Plans are made on a thread of their own, as on a GPU: one begins to search when ``may_search`` is set. Every
    reading of the time is a quarter of a millisecond later."""

    def __init__(self) -> None:
        self.found: list[FirstSteps] = []
        self.begun, self.may_search = threading.Event(), threading.Event()
        self.searched: list[float] = []  # plain Inductor's time, by estimates
        self._now = 0.0

    def _tick(self) -> float:
        self._now += TICK_MS
        return self._now

    def first_steps_of(self, planning: ChainPlanning) -> FirstSteps:
        self.found.append(FirstSteps(StepClock(len(planning.descriptions), count=2, events=host_events(self._tick))))
        return self.found[-1]

    def run(self, planning: ChainPlanning) -> Schedule:
        self.begun.set()
        assert self.may_search.wait(60)
        self.searched.append(planning.expected_ms)
        return SEARCH(planning)


SEARCH = ChainPlanning.run


@contextmanager
def measuring() -> Iterator[Measuring]:
    found = Measuring()
    with (
        mock.patch.object(plan_chain, "first_steps_of", found.first_steps_of),
        mock.patch.object(ChainPlanning, "run", lambda planning: found.run(planning)),
        mock.patch.object(engine_for(CPU).calls.plans, "in_background", True),
    ):
        yield found


def plan_of(measured: Measuring) -> fxoffload.Plan:
    """The plan, once it is found."""
    measured.may_search.set()
    for thread in threading.enumerate():
        if thread.name == "fxoffload-chain-plan":
            thread.join(30)
    (plan,) = new_plans()
    return plan


def test_a_plan_is_predicted_from_steps_of_the_graphs_as_they_are() -> None:
    plain = recorded(MODELS["stack"], policy="keep_all").step()
    torch.compiler.reset()
    with measuring() as measured:
        run = recorded(MODELS["stack"], steps=3)  # planning begins with the third
        assert measured.begun.wait(30)
        for _ in range(4):  # one is skipped, two count, the next reads them
            assert measured.found[0].readings is None
            assert_equal(run.step(), plain)
        assert measured.found[0].readings is not None and measured.found[0].is_settled
        plan = plan_of(measured)
        assert_equal(run.step(), plain)
    assert plan.basis == "steps"
    assert str(plan).count("predicted from steps that were measured before it was made") == 1
    # Every segment took one tick, and so did every gap between calls.
    assert plan.baseline.step_ms == pytest.approx(TICK_MS * (len(plan.boundaries) - 1))
    assert measured.searched[0] < 0.5 * plan.baseline.step_ms


def test_without_enough_steps_a_plan_is_predicted_from_estimates() -> None:
    with measuring() as measured:
        run = recorded(MODELS["stack"], steps=3)
        assert measured.begun.wait(30)
        run.steps(3)
        plan = plan_of(measured)
        assert plan.basis == "estimated" and measured.found[0].readings is None
        assert plan.baseline.step_ms == pytest.approx(measured.searched[0])


def test_a_step_that_is_run_for_its_plan_waits_for_no_steps() -> None:
    run = Run(per_layer(MODELS["stack"]()), batch(length=LENGTH))
    with measuring() as measured:
        measured.may_search.set()
        (plan,) = fxoffload.profile_step(run.step)
    assert plan.basis == "estimated"


def test_a_clock_that_fails_leaves_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(2, events=host_events())
    steps = FirstSteps(clock)
    monkeypatch.setattr(clock, "begin_step", mock.Mock(side_effect=RuntimeError("on purpose")))
    with pytest.warns(UserWarning, match="could not measure a step"):
        assert steps.step_begins() is None
    assert steps.readings is None and steps.is_settled


@pytest.mark.parametrize(
    ("device", "calibrates", "is_measured"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_which_steps_are_measured(
    monkeypatch: pytest.MonkeyPatch, device: str, calibrates: bool, is_measured: bool
) -> None:
    monkeypatch.setattr(first_steps, "step_clock_for", lambda device, count, **_: SimpleNamespace(count=count))
    asked: Any = SimpleNamespace(device=torch.device(device), calibrates=calibrates, descriptions=[1, 2], order=None)
    assert (first_steps_of(asked) is not None) is is_measured


def phase_of(calls: list[tuple[float, float, float]], backward: bool = False) -> Sample:
    """Per call, in the order in which they run: how long it waits at its beginning and at its end, and how long its
    segment takes. A gap of 1 ms is before each."""
    at, found = 0.0, Sample(0.0)
    for n, (waits, ms, ends) in enumerate(calls):
        call = len(calls) - 1 - n if backward else n
        gap = entry_of("backward" if backward else "forward", call)
        found.begin_ms[gap], found.segment_ms[gap] = at, 1.0
        name = segment_of(call, "b0" if backward else "f")
        found.begin_ms[name], found.segment_ms[name] = at + 1.0 + waits, ms
        at += 1.0 + waits + ms + ends
    return found


@pytest.mark.parametrize("at_end", [0.0, 9.0])  # FSDP2 has gathered the next parameters by then
@pytest.mark.parametrize(
    ("waits", "forward_ms", "backward_ms"),
    [
        ((0.2, 0.1, 0.0, 0.0), 12.0, 22.0),  # no wait to speak of: the median of all calls
        ((0.2, 9.0, 9.0, 9.0), 10.0, 20.0),  # those that run first
        ((9.0,) * CALLS, None, None),
    ],
)
def test_calls_that_begin_with_a_wait_are_not_counted(
    waits: tuple[float, ...], forward_ms: float | None, backward_ms: float | None, at_end: float
) -> None:
    found = planning(SEEN)
    forward = phase_of(list(zip(waits, (10.0, 12.0, 12.0, 14.0), [at_end] * CALLS, strict=True)))
    backward = phase_of(list(zip(waits, (20.0, 22.0, 22.0, 24.0), [at_end] * CALLS, strict=True)), backward=True)
    readings = Readings({"forward": [forward], "backward": [backward]})
    measured = measured_descriptions(found, readings)
    if forward_ms is None:
        assert measured is None
        schedule = found.run()
        assert in_time_of(found, readings, schedule) is schedule and not found.is_measured
        return
    assert measured is not None and len(measured) == CALLS
    assert {s.ms for d in measured for s in d.step.forward} == {forward_ms}
    assert measured[0].step.backward[0].ms == backward_ms and measured[0].basis == "steps"


@pytest.mark.parametrize(
    ("is_sharded", "basis", "floor"), [(True, "segments", 1.07), (True, "steps", 0.0), (False, "segments", 0.0)]
)
def test_graphs_of_fsdp2_take_longer_in_steps_than_alone(
    is_sharded: bool, basis: Any, floor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First steps that mostly wait for copies do not tell."""
    monkeypatch.setattr(first_steps, "fsdp2_is_used", lambda: is_sharded)
    found = planning(SEEN)
    alone = found.descriptions[0].step
    found.descriptions = as_in_steps([replace(d, basis=basis) for d in found.descriptions])
    longer = found.descriptions[0].step
    assert longer.compute_ms == pytest.approx((floor or 1.0) * alone.compute_ms), "what the search reckons with"
    seen_ms = alone.forward[0].ms, 2 * alone.backward[0].ms
    forward = phase_of([(0.0, seen_ms[0], 0.0)] * CALLS)
    backward = phase_of([(0.0, seen_ms[1], 0.0)] * CALLS, backward=True)
    measured = measured_descriptions(found, Readings({"forward": [forward], "backward": [backward]}))
    assert measured is not None
    assert measured[0].step.forward[0].ms == pytest.approx(max(seen_ms[0], floor * alone.forward[0].ms))
    assert measured[0].step.backward[0].ms == seen_ms[1]


def test_the_search_takes_segments_for_as_long_as_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Exception):
        pass

    def stop(descriptions: Sequence[Any], *args: Any) -> None:
        seen.extend(descriptions)
        raise Stopped

    seen: list[Any] = []
    alone = planning(SEEN).descriptions
    tracked: list[Any] = [
        SimpleNamespace(description=replace(d, basis="segments"), own_plan=None, written=()) for d in alone
    ]
    monkeypatch.setattr(first_steps, "fsdp2_is_used", lambda: True)
    monkeypatch.setattr(plan_chain, "ChainPlanning", stop)
    with pytest.raises(Stopped):
        plan_chain.plan_chain(tracked, SEEN)
    assert [d.step.compute_ms for d in seen] == pytest.approx([1.07 * d.step.compute_ms for d in alone])


def test_the_least_time_is_that_of_a_phase() -> None:
    """Segments scatter: those that took longer make up for others."""
    before = layer(halves=2)
    ms = [s.ms for s in before.backward]
    took = replace(
        before, backward=tuple(replace(s, ms=1.2 * s.ms) if not i else s for i, s in enumerate(before.backward))
    )

    def lengthened(factor: float) -> TrainingStep:
        return replace(before, backward=tuple(replace(s, ms=factor * s.ms) for s in before.backward))

    found = first_steps._no_faster(took, lengthened(1.0 + 0.2 * ms[0] / sum(ms)))
    assert [s.ms for s in found.backward] == pytest.approx([s.ms for s in took.backward])
    found = first_steps._no_faster(took, lengthened(1.5))
    assert sum(s.ms for s in found.backward) == pytest.approx(1.5 * sum(ms))


@pytest.mark.parametrize("waits", [0.0, 9.0])
def test_a_call_that_waits_in_its_middle_is_not_counted(waits: float) -> None:
    forward, backward = (phase_of([(0.0, 10.0, 0.0)] * CALLS, backward=back) for back in (False, True))
    first, second = segment_of(0, "b0"), segment_of(0, "b1")  # of the call that runs last
    backward.begin_ms[second] = backward.begin_ms[first] + backward.segment_ms[first] + waits
    backward.segment_ms[second] = 5.0
    counted = first_steps._without_waits(Readings({"forward": [forward], "backward": [backward]}))
    assert (first in counted["backward"]) is (second in counted["backward"]) is (waits == 0.0)
    assert segment_of(0, "f") in counted["forward"] and segment_of(1, "b0") in counted["backward"]


def test_a_graph_that_was_in_no_counted_call_keeps_its_basis() -> None:
    other = replace(planning(SEEN).descriptions[0], step=layer(ms=8.0))
    found = planning(SEEN)
    found.descriptions = [found.descriptions[0], *[other] * (CALLS - 1)]
    found.compiled = found._chain_search(found.descriptions, SEEN.edge_memory, [frozenset()] * CALLS).as_compiled()
    forward = phase_of([(0.0, 10.0, 0.0), *[(9.0, 10.0, 0.0)] * (CALLS - 1)])
    backward = phase_of([*[(9.0, 10.0, 0.0)] * (CALLS - 1), (0.0, 10.0, 0.0)], backward=True)
    measured = measured_descriptions(found, Readings({"forward": [forward], "backward": [backward]}))
    assert measured is not None
    assert [d.basis for d in measured] == ["steps", *[other.basis] * (CALLS - 1)]
    ratio = 10.0 / found.descriptions[0].step.forward[0].ms
    assert measured[1].step.forward[0].ms == pytest.approx(8.0 * ratio)


def test_calls_of_one_graph_take_what_the_median_took() -> None:
    plain, again = layer(halves=2), layer((64,), again_ms=0.5)
    ms: Any = {
        "forward": {"call 0/f": 5.0, "call 1/f": 7.0, "call 2/f": 9.0, "call 3/f": 2.0},
        "backward": {"call 0/b0": 1.0, "call 1/b0": 2.0, "call 2/b0": 4.0, "call 3/b0": 8.0},
    }
    found = measured_calls([plain, plain, plain, again], ["plain"] * 3 + ["again"], ms)
    assert list(found) == ["plain", "again"]
    (first, is_all), (second, is_all_of_second) = found.values()
    assert (is_all, is_all_of_second) == (False, True)
    # The second half's backward was not measured: it takes as much longer as the rest.
    ratio = (2.0 + 8.0) / (plain.backward[0].ms + again.backward[0].ms)
    assert [s.ms for s in (*first.forward, *first.backward)] == [7.0, 2.0, pytest.approx(ratio * plain.backward[1].ms)]
    assert [s.ms for s in (*second.forward, *second.backward)] == [2.0, 8.0]
    assert first.candidates == plain.candidates


def test_steps_that_take_far_longer_than_estimated_still_move_more() -> None:
    """The plan decided on estimates: that its prediction was measured is no reason to keep what it moves."""
    planning: Any = SimpleNamespace(
        choice=SimpleNamespace(scheduler=None),
        objective=Objective(max_slowdown=0.02),
        limit_bytes=None,
        expected_ms=2.0,
    )
    box: Any = SimpleNamespace(plan=SimpleNamespace(baseline=SimpleNamespace(step_ms=4.0)))
    schedule: Any = None
    assert ChainRecalibration(planning, schedule, lambda: None, box).expected_ms == 2.0  # type: ignore[arg-type]


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
    assert found.expected_ms == baseline.step_ms, "what was decided on estimates is told apart from what was measured"
    # Should the variants not compile, the graphs as they are have the measured time too.
    assert found.compiled.schedule is not None
    assert found.compiled.schedule.simulation.step_ms >= found.baseline.step_ms


def test_a_plan_that_everything_is_kept_under_says_so_still() -> None:
    found = planning(SEEN)
    found.summary = "everything is kept"
    in_measured_time(found, found.compiled.scheduler.smallest())
    assert found.summary == "everything is kept"


@pytest.mark.parametrize(
    ("is_measured", "backward", "expected"),
    [(True, 1.01, 5.0), (True, 1.5, 7.5), (True, 3.0, 10.0), (False, 1.0, 10.0)],
)
def test_measured_times_stand_unless_variants_take_longer_in_both_phases(
    is_measured: bool, backward: float, expected: float
) -> None:
    """Of a graph as compiled, which runs a variant now. The variant's forward takes twice as long as was thought."""
    compiled = concatenate([layer(ms=5.0)] * 2, passed(2))
    ran = concatenate([layer(ms=7.0)] * 2, passed(2))
    ms = {
        "forward": {s.name: 2 * s.ms for s in ran.step.forward},
        "backward": {s.name: backward * s.ms for s in ran.step.backward},
    }
    found: Any = as_compiled(compiled, ran, [True] * 2, ["layer"] * 2, ms, is_measured=is_measured)  # type: ignore[arg-type]
    assert measured_step(compiled.step, found).forward[1].ms == pytest.approx(expected)


@pytest.mark.parametrize(("before", "now"), [(2.0, 3.0), (3.0, 2.0)])
def test_with_the_calls_stands_the_time_between_them(before: float, now: float) -> None:
    """A wait within calls of the first steps comes after the calls of a plan. None is in the head."""
    gaps = {"forward": GAP, "backward": entry_of("backward", 0)}
    calls, ran = concatenate([layer(ms=5.0)] * 2, passed(2)), concatenate([layer(ms=7.0)] * 2, passed(2))
    first: Any = {"forward": {gaps["forward"]: before, TURN: 4.0}, "backward": {gaps["backward"]: before}}
    compiled = calls.with_step(measured_step(with_turn(calls.step), first))
    ms = {
        "forward": {**{s.name: s.ms for s in ran.step.forward}, gaps["forward"]: now, TURN: 5.0},
        "backward": {**{s.name: s.ms for s in ran.step.backward}, gaps["backward"]: now},
    }
    # The second call's graph ran as compiled nowhere, or nothing varied.
    for varied, graphs, expected in (
        ([False, True], "ab", min(before, now)),
        ([False, True], "aa", now),
        ([False] * 2, "aa", now),
    ):
        found: Any = as_compiled(compiled, ran, varied, list(graphs), ms, is_measured=True)  # type: ignore[arg-type]
        assert [found[phase][gap] for phase, gap in gaps.items()] == [expected] * 2
        assert found["forward"][TURN] == 5.0
