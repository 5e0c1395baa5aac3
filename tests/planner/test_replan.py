"""Planning again with measured times: once, within the budget, and only where it is better."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.compiler import plan_of_graph, recalibrate_graph, replan
from fxoffload.compiler.partitioning import Partitioning
from fxoffload.compiler.planning import GraphPlanning, Planning
from fxoffload.compiler.recalibrate_graph import GraphRecalibration
from fxoffload.compiler.replan import Replan
from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.registry import PlanBox
from fxoffload.plan_report.summary import aim_of
from fxoffload.planner import TrainingStep
from fxoffload.planner.as_measured import as_measured, measured_step, shared
from fxoffload.planner.objective import Objective
from fxoffload.planner.plan import NO_GRAPH, Prediction
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.windows import no_windows
from fxoffload.runtime.profiler.step_clock import StepClock
from fxoffload.runtime.profiler.stream_events import host_events
from fxoffload.runtime.tracker.outputs import Outputs
from fxoffload.step.choice import RanCall
from fxoffload.step.segment_names import TURN
from tests.capture import example_input
from tests.planner.test_planning import compiled, middle, new_graphs, plan_of, tower
from tests.planner.test_schedule import rates
from tests.planner.test_windows import chain

MIB = 1 << 20


class FakeClock:
    """Answers with given values, once it is ready."""

    def __init__(self, ms: dict[str, dict[str, float]], temp: dict[str, dict[str, int | None]] | None = None) -> None:
        self.ms, self.temp = ms, temp or {"forward": {}, "backward": {}}
        self.is_ready = True
        self.measuring = False
        self.turn_peak: int | None = None
        self.signature: object = None

    def ready(self) -> bool:
        return self.is_ready

    def readings(self) -> FakeClock:
        return self

    def segment_ms(self) -> dict[str, dict[str, float]]:
        return self.ms

    def typical(self) -> None:
        return None

    def temp_bytes(self) -> dict[str, dict[str, int | None]]:
        return self.temp

    def step_ms(self) -> dict[str, float]:
        return {phase: sum(found.values()) + 0.5 for phase, found in self.ms.items()}

    def peak_bytes(self) -> int:
        return 123

    def between_steps_ms(self) -> float:
        return 7.0

    def gap_peaks(self) -> dict[str, int]:
        return {} if self.turn_peak is None else {TURN: self.turn_peak}


def times(step: TrainingStep, factor: float = 1.0) -> dict[str, dict[str, float]]:
    return {
        "forward": {s.name: s.ms * factor for s in step.forward},
        "backward": {s.name: s.ms * factor for s in step.backward},
    }


class Followed:
    """A planned chain, as a compiled graph would be followed."""

    def __init__(
        self,
        objective: Objective,
        clocks: list[FakeClock],
        step: TrainingStep | None = None,
        *,
        plain: float = 1.0,
        takes: float = 1.0,
    ) -> None:
        """``plain``: the part of the graph's time that plain Inductor takes, which recomputes less. ``takes``: the part
        of the budget that the first plan may take."""
        self.step = chain(8, 8 * MIB) if step is None else step
        self.scheduler = Scheduler(self.step, rates())
        keep = self.scheduler.keep_all()
        found = (
            self.scheduler.least_time(int(takes * objective.budget_bytes))
            if objective.budget_bytes is not None
            else self.scheduler.least_peak(keep.step_ms * (1 + (objective.max_slowdown or 0)))
        )
        assert found is not None
        self.schedule: Schedule = found
        plan = Plan(
            graph=NO_GRAPH,
            device="h200",
            summary=aim_of(objective),
            predicted=Prediction.of(found.simulation),
            baseline=Prediction.of(
                replace(keep, forward_ms=plain * keep.forward_ms, backward_ms=plain * keep.backward_ms)
            ),
            smallest_budget_bytes=0,
            activation_budget=objective.budget_bytes,
            max_slowdown=objective.max_slowdown,
            simulation=found.simulation,
        )
        self.box = PlanBox(plan)
        self.graph = SimpleNamespace(planned="the first", outputs=Outputs())
        self.pinned: list[tuple[int, Any]] = []  # and the choice followed then
        self.room = 1 << 60
        self.made = 0
        self.order = list(range(len(found.offload)))[::-1]

        def make_clock() -> Any:
            self.made += 1
            return clocks[self.made - 1]

        calibration = GraphRecalibration(
            self.graph,  # type: ignore[arg-type]
            GraphPlanning(None, found, self.scheduler, plan),  # type: ignore[arg-type]
            self.box,
            objective,
            self.order,
            {"forward": {}, "backward": {}},
            self.pin,
        )
        self.replan = Replan(calibration, self.box, make_clock=make_clock, in_background=False)

    def pin(self, more: int) -> bool:
        self.pinned.append((more, self.graph.planned))
        return more <= self.room


def test_the_steps_of_a_cool_device_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock_for(device: torch.device, *, skip: int, **about: Any) -> StepClock:
        return StepClock(skip=skip, events=host_events())

    monkeypatch.setattr(recalibrate_graph, "calibration_of", mock.Mock())
    monkeypatch.setattr(recalibrate_graph, "engine_for", mock.Mock())
    monkeypatch.setattr(recalibrate_graph, "step_clock_for", clock_for)
    any_one: Any = None
    about = (any_one, any_one, any_one, any_one, any_one)
    found = recalibrate_graph.replan_for(*about, torch.device("cuda"), lambda more: True)
    assert found is not None
    assert [found.step_begins() is None for _ in range(4)] == [True, True, True, False]


def test_times_that_make_the_plan_too_slow() -> None:
    """Segments are ten times faster than predicted: copies that they hid are exposed."""
    step = chain(8, 8 * MIB)
    fast = times(step, 0.1)
    objective = Objective(None, 0.02)
    followed = Followed(objective, [FakeClock(fast), FakeClock(fast)], step)
    assert any(followed.schedule.offload)
    followed.replan.poll()
    planned = followed.graph.planned
    assert planned != "the first"
    faster = measured_step(step, fast)  # type: ignore[arg-type]
    measured = followed.scheduler.with_step(faster, followed.scheduler.host_bytes)
    in_order = [False] * len(planned.offload)
    for at, go in zip(followed.order, planned.offload, strict=True):
        in_order[at] = go
    from fxoffload.planner import simulate

    now = simulate(measured.step, in_order, copies=rates(), windows=planned.windows)
    before = simulate(measured.step, followed.schedule.offload, copies=rates(), windows=followed.schedule.windows)
    assert before.step_ms > measured.keep_all().step_ms * 1.02
    assert now.step_ms <= measured.keep_all().step_ms * 1.02
    plan = followed.box.plan
    assert plan.calibrated == Prediction.of(now)
    assert plan.calibrated_baseline is not None
    assert plan.calibrated_baseline.step_ms == pytest.approx(plan.baseline.step_ms * 0.1)
    assert plan.predicted.step_ms == pytest.approx(followed.schedule.simulation.step_ms)


def test_a_graph_that_is_too_slow_whatever_moves() -> None:
    """Copies that are exposed would make it slower still."""
    step = chain(8, 8 * MIB)
    fast = times(step, 0.1)
    followed = Followed(Objective(None, 0.02), [FakeClock(fast), FakeClock(fast)], step, plain=0.9)
    assert any(followed.schedule.offload)
    followed.replan.poll()
    plan = followed.box.plan
    assert plan.calibrated is not None and plan.calibrated_baseline is not None
    keeps = followed.scheduler.with_step(measured_step(step, fast), None).keep_all().step_ms  # type: ignore[arg-type]
    assert keeps > 1.02 * plan.calibrated_baseline.step_ms
    assert plan.calibrated.step_ms <= 1.003 * keeps
    assert 0 < plan.calibrated.bytes_offloaded < plan.predicted.bytes_offloaded


@pytest.mark.parametrize(("factor", "room", "more"), [(1.4, 1 << 60, False), (1.6, 1 << 60, True), (1.6, 1, False)])
def test_a_step_that_takes_far_longer_than_was_thought(factor: float, room: int, more: bool) -> None:
    """It hides more copies than are pinned for. More is pinned, and then they are made; or the plan stays as it is."""
    step = chain(8, 80 * MIB)
    slow = times(step, factor)
    followed = Followed(Objective(None, 0.02), [FakeClock(slow), FakeClock(slow)], step)
    followed.room = room
    moved, peak = followed.schedule.simulation.bytes_offloaded, followed.schedule.simulation.peak_bytes
    assert 0 < moved < 8 * 80 * MIB
    followed.replan.poll()
    plan = followed.box.plan
    assert plan.calibrated is not None and plan.calibrated_baseline is not None
    now = plan.calibrated
    asked = [more for more, _ in followed.pinned]
    assert asked == ([] if factor < 1.5 else [2 * 80 * MIB])
    if more:
        assert now.bytes_offloaded == moved + asked[0] and now.peak_bytes < peak
        assert [planned for _, planned in followed.pinned] == ["the first"]
        assert sum(followed.graph.planned.offload) * 80 * MIB == now.bytes_offloaded
    else:
        assert now.bytes_offloaded == moved and now.peak_bytes == peak
        assert followed.graph.planned == "the first"
    saved = 1 - now.peak_bytes / plan.calibrated_baseline.peak_bytes
    assert plan.summary.startswith("the least peak found within a slowdown of 2 %, by what was measured: ")
    assert f"{100 * saved:.0f} % less memory" in plan.summary
    assert now.step_ms <= plan.calibrated_baseline.step_ms * 1.02


def test_the_budget_is_kept() -> None:
    step = chain(8, 8 * MIB)
    budget = 40 * MIB
    slow_forward = {"forward": times(step, 3.0)["forward"], "backward": times(step, 0.2)["backward"]}
    temp: dict[str, dict[str, int | None]] = {"forward": {"f7": 6 * MIB}, "backward": {"b7": 12 * MIB, "b0": None}}
    followed = Followed(Objective(budget), [FakeClock(slow_forward, temp), FakeClock(slow_forward)], step)
    with mock.patch.object(recalibrate_graph, "shared", lambda sizes, alike: sizes):
        followed.replan.poll()
    plan = followed.box.plan
    assert plan.calibrated is not None
    assert plan.calibrated.peak_bytes <= budget
    assert followed.graph.planned != "the first"  # whose peak has grown


def test_a_loss_in_eager_code_is_part_of_the_step() -> None:
    step = chain(8, 8 * MIB)
    clocks = [FakeClock(times(step)), FakeClock(times(step))]
    for clock in clocks:
        clock.ms["forward"][TURN], clock.turn_peak = 3.0, 400 * MIB
    followed = Followed(Objective(None, 0.02), clocks, step)
    before = followed.box.plan
    followed.replan.poll()
    plan = followed.box.plan
    assert plan.calibrated is not None and plan.calibrated_baseline is not None
    assert (plan.calibrated.peak_phase, plan.calibrated.peak_segment) == ("forward", TURN)
    assert plan.calibrated.peak_bytes == 400 * MIB
    assert plan.calibrated.outside_ms == 3.0
    assert 0 < plan.calibrated.outside_bytes < 400 * MIB
    assert plan.calibrated.step_ms == pytest.approx(before.predicted.step_ms + 3.0)
    assert plan.calibrated_baseline.step_ms == pytest.approx(before.baseline.step_ms + 3.0)
    assert plan.calibrated_baseline.peak_bytes >= 400 * MIB
    # Without what moves, if everything does: budgets below that are not promised any more.
    assert plan.smallest_budget_bytes == 400 * MIB - (64 * MIB - before.predicted.bytes_offloaded)
    followed.replan.poll()
    measured = sum(ms for of_phase in times(step).values() for ms in of_phase.values())
    assert followed.box.plan.measured_step_ms == pytest.approx(measured + 1.0 + 3.0)


def test_a_turn_is_measured_above_what_was_there_in_the_steps_that_ran() -> None:
    """They moved everything, as before a correction. The plan keeps some of it: that comes on top."""
    step = chain(8, 8 * MIB)
    found = []
    for moves in (False, True):
        clocks = [FakeClock(times(step)), FakeClock(times(step))]
        clocks[0].ms["forward"][TURN], clocks[0].turn_peak = 3.0, 400 * MIB
        followed = Followed(Objective(48 * MIB), clocks, step)
        every = (moves,) * len(followed.order)
        clocks[0].signature = RanCall((), every, no_windows(step))
        followed.replan.poll()
        assert followed.box.plan.calibrated_baseline is not None
        found.append(followed.box.plan.calibrated_baseline.peak_bytes)
    assert found == [400 * MIB, (400 + 64) * MIB]


def test_a_turn_that_was_measured_in_the_plan_s_order() -> None:
    """The graph's candidates are in another order than the step's."""
    step = chain(8, 8 * MIB)
    clock = FakeClock(times(step))
    followed = Followed(Objective(None, 0.02), [clock, clock], step)
    calibration = followed.replan.calibration
    assert isinstance(calibration, GraphRecalibration)
    moved = (True, *(False,) * (len(followed.order) - 1))
    clock.signature = RanCall((), moved, no_windows(step))
    offload, windows = calibration._ran(clock)  # type: ignore[arg-type]
    assert [at for at, go in enumerate(offload) if go] == [followed.order[0]]
    assert windows == no_windows(step)


def test_what_is_stopped_while_it_waits_plans_nothing() -> None:
    """Another plan is being made, of the step that the graph is in from now on."""
    step = chain(8, 8 * MIB)
    clock = FakeClock(times(step, 0.1))
    for stops in (False, True):
        followed = Followed(Objective(None, 0.02), [clock, clock], step)
        followed.replan._in_background = True
        with mock.patch.object(replan.background, "start_planning") as start:
            followed.replan.poll()
        ((work, *about), _) = start.call_args
        if stops:
            followed.replan.stop()
        work(*about)
        assert (followed.graph.planned == "the first") == stops
        assert (followed.box.plan.calibrated is None) == stops == (followed.replan.clock is None)


def test_a_short_turn_is_left_out() -> None:
    step = chain(8, 8 * MIB)
    clock = FakeClock(times(step))
    clock.ms["forward"][TURN], clock.turn_peak = 0.01, 8 * MIB
    followed = Followed(Objective(None, 0.02), [clock, clock], step)
    followed.replan.poll()
    assert followed.box.plan.calibrated == followed.box.plan.predicted


def test_equal_measurements_change_nothing() -> None:
    for objective in (Objective(None, 0.02), Objective(40 * MIB)):
        step = chain(8, 8 * MIB)
        followed = Followed(objective, [FakeClock(times(step)), FakeClock(times(step))], step)
        followed.replan.poll()
        assert followed.graph.planned == "the first"
        assert followed.box.plan.calibrated == followed.box.plan.predicted
        assert followed.box.plan.calibrated_baseline == followed.box.plan.baseline
        assert followed.box.plan.between_steps_ms == 7.0


@pytest.mark.parametrize("source", ["options", "checkpointing"])
def test_a_new_plan_leaves_a_little_to_the_program(source: str) -> None:
    """The first one exceeds the budget. Activation checkpointing's peak is no promise, and taken whole."""
    step = chain(8, 8 * MIB)
    tight = Followed(Objective(40 * MIB), [FakeClock(times(step))], step).schedule.simulation.peak_bytes
    clocks = [FakeClock(times(step)), FakeClock(times(step))]
    followed = Followed(Objective(tight, source=source), clocks, step, takes=2.0)
    assert followed.schedule.simulation.peak_bytes > tight
    followed.replan.poll()
    assert followed.box.plan.calibrated is not None
    assert (followed.box.plan.calibrated.peak_bytes < tight) == (source == "options")


def test_where_nothing_else_fits_all_of_the_budget_is_taken() -> None:
    step = chain(8, 8 * MIB)
    least = Scheduler(step, rates()).smallest().simulation.peak_bytes
    followed = Followed(Objective(least), [FakeClock(times(step)), FakeClock(times(step))], step, takes=2.0)
    assert followed.schedule.simulation.peak_bytes > least
    followed.replan.poll()
    assert followed.box.plan.calibrated is not None
    assert followed.box.plan.calibrated.peak_bytes == least


def test_a_plan_that_takes_all_of_its_budget_stays() -> None:
    step = chain(8, 8 * MIB)
    tight = Followed(Objective(40 * MIB), [FakeClock(times(step))], step).schedule.simulation.peak_bytes
    followed = Followed(Objective(tight), [FakeClock(times(step)), FakeClock(times(step))], step)
    assert followed.schedule.simulation.peak_bytes == tight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        followed.replan.poll()
    assert followed.graph.planned == "the first"


def test_only_once_and_then_it_is_measured() -> None:
    step = chain(8, 8 * MIB)
    first, second = FakeClock(times(step, 0.1)), FakeClock(times(step, 0.3))
    first.is_ready = second.is_ready = False
    followed = Followed(Objective(None, 0.02), [first, second], step)
    assert followed.replan.poll() is first  # type: ignore[comparison-overlap]
    assert followed.box.plan.calibrated is None
    first.is_ready = True
    recalibrate = GraphRecalibration.recalibrate
    with mock.patch.object(GraphRecalibration, "recalibrate", autospec=True, side_effect=recalibrate) as again:
        assert followed.replan.poll() is second  # type: ignore[comparison-overlap]
        planned, calibrated = followed.graph.planned, followed.box.plan.calibrated
        assert followed.box.plan.measured_step_ms is None
        second.is_ready = True
        for _ in range(3):
            assert followed.replan.poll() is None
        assert again.call_count == 1
    assert followed.made == 2
    plan = followed.box.plan
    assert (followed.graph.planned, plan.calibrated) == (planned, calibrated)
    assert plan.measured_step_ms == pytest.approx(16 * 0.3 + 1.0)
    assert plan.measured_exposed_ms == pytest.approx(1.0)
    assert plan.measured_peak_bytes == 123


def test_a_mistake_is_one_warning() -> None:
    step = chain(4, 8 * MIB)
    broken = FakeClock(times(step))
    broken.temp_bytes = mock.Mock(side_effect=RuntimeError("lost an event"))  # type: ignore[method-assign]
    followed = Followed(Objective(None, 0.02), [broken, FakeClock(times(step))], step)
    with pytest.warns(UserWarning, match="goes on with its plan as it is: RuntimeError: lost an event") as caught:
        followed.replan.poll()
    assert len(caught) == 1
    assert followed.graph.planned == "the first"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        followed.replan.poll()
        assert followed.replan.poll() is None
    assert followed.box.plan.measured_step_ms is not None
    assert followed.box.plan.calibrated is None


def test_several_threads_plan_once() -> None:
    step = chain(4, 8 * MIB)
    followed = Followed(Objective(None, 0.02), [FakeClock(times(step, 0.1)), FakeClock(times(step))], step)
    calls = []
    followed.replan._calibrate = lambda *args: calls.append(args)  # type: ignore[method-assign]
    start = threading.Barrier(8)

    def poll() -> None:
        start.wait()
        followed.replan.poll()

    threads = [threading.Thread(target=poll) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_what_is_measured_and_what_is_not() -> None:
    step = replace(chain(2), forward=tuple(replace(s, temp_bytes=5) for s in chain(2).forward))
    found = measured_step(step, {"forward": {"f0": 7.0}}, {"forward": {"f0": -3, "f1": None}, "backward": {"b1": 9}})
    assert [(s.ms, s.temp_bytes) for s in found.forward] == [(7.0, 0), (1.0, 5)]
    assert [(s.ms, s.temp_bytes) for s in found.backward] == [(1.0, 9), (1.0, 0)]
    assert found.storages == step.storages


@pytest.mark.parametrize(
    ("ms", "taken"),
    [
        pytest.param(1.25, 2.5, id="in proportion"),
        pytest.param(10.0, 11.0, id="as much longer, where an op takes far longer than estimated"),
    ],
)
def test_another_partition_takes_what_its_segments_took_in_this_one(ms: float, taken: float) -> None:
    estimated = chain(3)
    first, second, third = (replace(s, temp_bytes=5) for s in estimated.forward)
    estimated = replace(estimated, forward=(first, second, third))
    measured = measured_step(estimated, {"forward": {"f0": 3.0, "f1": ms}}, {"forward": {"f0": 7, "f1": 6, "f2": 4}})
    other = replace(estimated, forward=(first, replace(second, ms=2.0), replace(third, temp_bytes=9)))
    found = as_measured(other, estimated, measured)
    # The first is the same code. The third may take less memory, but need not.
    assert [(s.ms, s.temp_bytes) for s in found.forward] == [(3.0, 7), (pytest.approx(taken), 6), (1.0, 9)]
    assert found.backward == measured.backward


def test_a_layer_that_is_cut_otherwise() -> None:
    """As much longer in all; and the piece that takes most memory, as much more."""
    estimated = chain(2)
    first, second = (replace(s, temp_bytes=5, layer="a layer") for s in estimated.forward)
    estimated = replace(estimated, forward=(first, second))
    measured = measured_step(estimated, {"forward": {"f0": 1.0, "f1": 21.0}}, {"forward": {"f0": 5, "f1": 8}})
    pieces = [replace(first, name=f"f{i}_1", ms=i, temp_bytes=4 + i) for i in (1.0, 3.0)]
    found = as_measured(replace(estimated, forward=tuple(pieces)), estimated, measured)
    assert [(s.ms, s.temp_bytes) for s in found.forward] == [(6.0, 5), (18.0, 10)]


def test_a_piece_of_a_layer_that_is_the_same_code_says_nothing_of_the_others() -> None:
    estimated = chain(3)
    segments = [
        replace(s, temp_bytes=5, layer="a layer" if i < 2 else s.layer) for i, s in enumerate(estimated.forward)
    ]
    estimated = replace(estimated, forward=tuple(segments))
    measured = measured_step(estimated, {"forward": {"f0": 10.0, "f1": 1.2}}, {"forward": {"f0": 9, "f1": 6}})
    segments[1] = replace(segments[1], ms=0.5, temp_bytes=4)
    found = as_measured(replace(estimated, forward=tuple(segments)), estimated, measured)
    assert [(s.ms, s.temp_bytes) for s in found.forward] == [(10.0, 9), (pytest.approx(0.6), 5), (1.0, 5)]


@pytest.mark.parametrize(
    ("estimate", "ratio"),
    [
        pytest.param(1.0, 1.5, id="as the segments that differ"),
        pytest.param(0.01, (3.0 + 1.5 + 1.0) / 2.01, id="as all, where those that differ are next to nothing"),
    ],
)
def test_what_belongs_to_no_layer_of_the_measured_partition(estimate: float, ratio: float) -> None:
    estimated = chain(3)
    first, second, third = estimated.forward
    second = replace(second, layer="")
    estimated = replace(estimated, forward=(first, replace(second, ms=estimate), third))
    measured = measured_step(estimated, {"forward": {"f0": 3.0, "f1": 1.5}})
    other = replace(estimated, forward=(first, replace(second, name="f1_1", ms=2.0), third))
    found = as_measured(other, estimated, measured)
    assert [s.ms for s in found.forward] == [3.0, pytest.approx(2.0 * ratio), 1.0]


def test_segments_of_one_code_share_what_was_measured() -> None:
    sizes: dict[Any, Any] = {"forward": {"a": 3, "b": 5, "c": None, "d": 8, "unknown": 1}}
    alike: dict[Any, Any] = {"forward": {"a": 1, "b": 1, "c": 1, "d": 2, "e": 3}, "backward": {"x": 1}}
    assert shared(sizes, alike) == {
        "forward": {"a": 5, "b": 5, "c": 5, "d": 8, "e": None},
        "backward": {"x": None},
    }


def test_scale() -> None:
    keep = Prediction.of(Scheduler(chain(2), rates()).keep_all())
    assert keep.scaled(2.0).step_ms == 2 * keep.step_ms
    assert keep.scaled(2.0).peak_bytes == keep.peak_bytes


# -- compiled graphs ---------------------------------------------------------------------------------------------------


@contextmanager
def following(watch: Callable[[GraphPlanning], object] = lambda planned: None) -> Iterator[list[Replan]]:
    """Graphs that are compiled meanwhile are followed, as on a GPU. Every reading of their clocks is one millisecond
    after the last. ``watch``: is shown each plan."""
    now = itertools.count()
    followers: list[Replan] = []

    def follow(
        graph: Any, planned: GraphPlanning, box: PlanBox, objective: Objective, alike: Any, _: Any, pin: Any, *__: Any
    ) -> Replan:
        assert planned.partitioning.step is not None
        watch(planned)
        place = {c.name: i for i, c in enumerate(planned.partitioning.step.candidates)}
        order = [place[c.name] for c in graph.saved.candidates]
        observer = Replan(
            GraphRecalibration(graph, planned, box, objective, order, alike, pin),
            box,
            make_clock=lambda: StepClock(skip=1, count=2, events=host_events(lambda: float(next(now)))),
            in_background=False,
        )
        followers.append(observer)
        return observer

    with mock.patch.object(plan_of_graph, "replan_for", follow):
        yield followers


def train(model: nn.Module, call: Any) -> dict[str, Tensor]:
    """A step; returns the gradients."""
    model.zero_grad()
    call(example_input()).square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_a_compiled_graph_is_followed(one_thread: None) -> None:
    """From the events to the plan."""
    budget = middle(recompute="default")
    before = set(map(id, fxoffload.graphs()))
    model = tower()
    with following() as followers:
        call = compiled(model, activation_budget=budget, recompute="default")
        gradients = [train(model, call) for _ in range(9)]
    assert len(followers) == 1
    (graph,) = [g for g in new_graphs() if id(g) not in before]
    plan = plan_of(graph)
    assert plan.calibrated is not None and plan.simulation is not None
    assert plan.calibrated.peak_bytes <= budget
    # One millisecond for each segment, whatever was estimated.
    assert plan.calibrated.step_ms == pytest.approx(len(plan.simulation.boundaries) + plan.calibrated.exposed_ms)
    assert plan.measured_step_ms is not None and plan.measured_exposed_ms is not None
    assert plan.predicted.step_ms < 1.0
    assert all(torch.equal(found[n], gradients[0][n]) for found in gradients for n in found)
    assert followers[0].clock is None


def alive(graphs: Iterable[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(ref() is not None for ref in graphs)


class DraftGraphs:
    """Weak references to the graphs of partitionings: those that passes have made, and no code is made of."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Any]] = []

    def add(self, *partitionings: Partitioning | None) -> None:
        for partitioning in partitionings:
            for state in () if partitioning is None else (partitioning.forward_state, partitioning.backward_state):
                assert state is not None and state.outer is not None
                self.refs += [weakref.ref(x) for gm in (state.gm, state.outer) for x in (gm, gm.graph)]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["auto", "default"])
def test_partitionings_are_let_go_once_their_graph_is_planned_anew(one_thread: None, recompute: str) -> None:
    budget = middle(recompute=recompute)
    partitionings = DraftGraphs()
    model = tower()
    with following(lambda planned: partitionings.add(planned.partitioning, planned.base)) as followers:
        call = compiled(model, activation_budget=budget, recompute=recompute)
        train(model, call)
        assert len(followers) == 1
        assert alive(partitionings.refs) == len(partitionings.refs) > 0, "to plan again"
        while followers[0]._calibration is not None:
            train(model, call)
    assert fxoffload.plans()[-1].calibrated is not None
    assert alive(partitionings.refs) == 0
    assert followers[0].clock is not None, "it measures still"
    train(model, call)


@pytest.mark.slow
def test_partitionings_are_let_go_once_their_code_is_there_where_nothing_is_planned_anew(one_thread: None) -> None:
    partitionings = DraftGraphs()
    model = tower()
    run = Planning.run

    def watched(self: Planning, **how: bool) -> GraphPlanning | None:
        planned = run(self, **how)
        assert planned is not None
        partitionings.add(planned.partitioning, planned.base)
        return planned

    budget = middle()
    with mock.patch.object(Planning, "run", watched):
        call = compiled(model, activation_budget=budget)
        train(model, call)
    assert partitionings.refs
    assert alive(partitionings.refs) == 0
    train(model, call)


def test_the_cpu_is_not_followed() -> None:
    device = torch.device("cpu")
    assert recalibrate_graph.replan_for(None, None, None, None, {}, device, None) is None  # type: ignore[arg-type]
