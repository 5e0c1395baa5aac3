"""Plans over several graphs, made again with measured times: on the CPU, in a time of its own."""

from __future__ import annotations

import gc
import itertools
import mmap
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import fxoffload
from fxoffload.compiler import chain_graphs, chain_planning, pacing, plan_chain, recalibrate_chain
from fxoffload.compiler.planning import AROUND_BYTES
from fxoffload.compiler.recalibrate_chain import ChainRecalibration, as_compiled, with_turn
from fxoffload.compiler.recalibration import Recalibration
from fxoffload.compiler.replan import Replan
from fxoffload.planner.as_measured import measured_step
from fxoffload.planner.chain import concatenate
from fxoffload.planner.link import ConstantRates
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.simulate import Simulation, simulate
from fxoffload.planner.steps import TrainingStep
from fxoffload.planner.windows import no_windows, windows_for
from fxoffload.runtime.engine import CopyEngine, engine_for
from fxoffload.runtime.profiler.step_clock import StepClock, StepRecording
from fxoffload.runtime.profiler.stream_events import PooledEvents, host_events
from fxoffload.runtime.tracker.step_tracker import StepTracker
from fxoffload.step.call_order import CallOrder
from fxoffload.step.segment_names import TURN, lies_between
from tests.marks import examples
from tests.planner import test_chain_planning
from tests.planner.chains import decided_steps
from tests.planner.rehearsal import CPU
from tests.planner.test_chain_planning import MODELS, Run, alone, loss_of, moved_by, new_plans, recorded
from tests.support import Stack, assert_equal, batch

__all__ = ["alone"]  # the fixture

LAYERS, CALLS = 5, 10


class Measured:
    """Plans that are made meanwhile are followed, as on a GPU, in a time of its own.

    Args:
        tick_ms: by how much every reading of the time is later than the last.
        count: steps that each of the clocks counts. The first that follows a plan is skipped.
    """

    def __init__(self, tick_ms: float = 1.0, *, count: int = 2, in_background: bool = False) -> None:
        self.tick_ms, self.count, self.in_background = tick_ms, count, in_background
        self.now = 0.0
        self.followers: list[Replan] = []
        self.clocks: list[StepClock] = []
        self.events: list[PooledEvents[Any]] = []
        self.planning: list[Any] = []

    def _time(self) -> float:
        self.now += self.tick_ms
        return self.now

    def _clock(self, num_calls: int, order: CallOrder | None) -> StepClock:
        self.events.append(host_events(self._time))
        self.clocks.append(StepClock(num_calls, order=order, skip=1, count=self.count, events=self.events[-1]))
        return self.clocks[-1]

    def follow(self, planning: Any, schedule: Schedule, tracked_graphs: Any, box: Any) -> Replan:
        calibration = ChainRecalibration(planning, schedule, tracked_graphs[0], box)
        order = planning.order  # the plan's data is let go of
        found = Replan(
            calibration,
            box,
            tracked_graphs,
            make_clock=lambda: self._clock(len(tracked_graphs), order),
            in_background=self.in_background,
        )
        self.followers.append(found)
        self.planning.append(weakref.ref(planning))
        return found

    @property
    def counted(self) -> int:
        """Steps that the first clock has counted."""
        return self.clocks[0]._counted.total()


@contextmanager
def measured(tick_ms: float = 1.0, **changes: Any) -> Iterator[Measured]:
    found = Measured(tick_ms, **changes)
    with mock.patch.object(plan_chain, "replan_for_chain", found.follow):
        yield found


@contextmanager
def estimated(factor: float) -> Iterator[None]:
    """Predicted times of segments are this many times longer."""
    step_of = chain_graphs.step_of

    def slower(*args: Any) -> TrainingStep:
        step = step_of(*args)
        down, up = (tuple(replace(s, ms=s.ms * factor) for s in side) for side in (step.forward, step.backward))
        return replace(step, forward=down, backward=up)

    with mock.patch.object(chain_graphs, "step_of", slower):
        yield


def the_plan() -> fxoffload.Plan:
    (plan,) = new_plans()
    return plan


def without_turn(simulation: Simulation) -> Simulation:
    """What the watch can see of it."""
    return replace(simulation, boundaries=tuple(b for b in simulation.boundaries if b.segment != TURN))


def segments_of(plan: fxoffload.Plan, phase: str | None = None) -> int:
    """How many segments of calls the step has."""
    found = [b for b in plan.boundaries if phase in (None, b.phase)]
    return sum(not b.segment.endswith("entry") for b in found)


def kept(name: str = "stack") -> dict[str, Tensor]:
    """A step that keeps everything."""
    return recorded(MODELS[name], policy="keep_all").steps(1)[0]


# -- measurements ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_shown_is_the_step_that_was_measured() -> None:
    """A reading is a millisecond after the last one; eager code between the layers takes seven, and the loss and the
    head twenty."""
    plain = kept()
    with measured() as time:

        def between(i: int, x: Tensor) -> Tensor:
            time.now += 20.0 if i == LAYERS - 1 else 7.0
            return x

        run = recorded(lambda: Stack(LAYERS, between=between), activation_budget="1GiB")
        kept_alive = []
        for _ in range(9):
            assert_equal(run.step(), plain)
            kept_alive.append((the_plan().calibrated is not None, the_plan().measured_step_ms is not None))
    #                skipped          measured         planned, skipped measured        shown
    assert kept_alive == [(False, False)] * 3 + [(True, False)] * 3 + [(True, True)] * 3
    plan = the_plan()
    segments = segments_of(plan)
    gaps = 4 * 8.0 + 21.0 + 4 * 1.0  # and one for each reading
    assert plan.calibrated is not None and plan.calibrated_baseline is not None
    assert plan.calibrated.exposed_ms == 0.0  # nothing moves
    assert plan.calibrated.step_ms == pytest.approx(segments + gaps)
    assert plan.calibrated.forward_ms == pytest.approx(segments_of(plan, "forward") + 4 * 8.0 + 21.0)
    assert plan.calibrated_baseline.step_ms == pytest.approx(plan.calibrated.step_ms)
    # Between the events of segments, and of calls.
    exposed = segments + CALLS
    assert plan.measured_exposed_ms == pytest.approx(exposed)
    assert plan.measured_step_ms == pytest.approx(segments + gaps + exposed)
    step = plan.measured_step
    assert step is not None and step.step_ms == pytest.approx(plan.measured_step_ms)
    assert sum(s.end_ms - s.begin_ms for s in step.stands_still()) == pytest.approx(exposed)
    ran = [s for s in step.segments if not lies_between(s.segment)]
    assert [(s.phase, s.segment) for s in ran] == [
        (b.phase, b.segment) for b in plan.boundaries if not lies_between(b.segment)
    ]
    assert all(a.end_ms <= b.begin_ms + 1e-9 for a, b in itertools.pairwise(step.segments))
    assert plan.predicted.step_ms < 1.0
    assert plan.measured_peak_bytes is None
    (turn,) = [b for b in plan.boundaries if b.segment == TURN]
    assert turn.phase == "forward" and turn.end_ms - turn.begin_ms == pytest.approx(21.0)
    assert "measured" in str(plan) and "calibrated" in str(plan)


@pytest.mark.slow
def test_afterwards_nothing_is_measured() -> None:
    begin = StepRecording.begin
    with measured() as time, mock.patch.object(StepRecording, "begin", autospec=True, side_effect=begin) as began:
        run = recorded(MODELS["stack"], activation_budget="1GiB")
        run.steps(6)
        assert began.call_count == CALLS * 2 * time.count
        (observer,) = time.followers
        assert observer._calibration is None and observer.clock is not None
        run.step()
        assert observer.clock is None
        made, now, plan = [e.num_made for e in time.events], time.now, the_plan()
        run.steps(3)
        assert began.call_count == CALLS * 2 * time.count
    assert [e.num_made for e in time.events] == made and len(made) == 2
    assert (time.now, the_plan()) == (now, plan)
    step = engine_for(CPU).calls._step
    assert step is not None and step.recording is None
    assert all(c.tracked().measure is None for c in step.calls)  # type: ignore[union-attr]
    gc.collect()
    assert time.planning[0]() is None, "what was planned from is let go"


# -- plans made again --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("tick_ms", "moves"), [(2e-4, False), (5e-3, True)])
def test_times_that_make_the_plan_too_slow(tick_ms: float, moves: bool) -> None:
    """Segments are thousands of times faster than predicted: copies that they hid are exposed. From the next step on
    other values move, byte for byte as simulated now, and no bit of a gradient changes."""
    plain = kept()
    with measured(tick_ms), estimated(1e4):
        run = recorded(MODELS["stack"], max_slowdown=0.1, disable=("tape_recompute",))
        moved = [moved_by(run) for _ in range(2)]
        before = the_plan()
        assert moved == [before.predicted.bytes_offloaded] * 2
        assert before.simulation is not None
        test_chain_planning.check_bytes(run, before.simulation)
        assert the_plan().calibrated is None
        assert_equal(run.step(), plain)  # planned again when it begins
    plan = the_plan()
    assert plan.calibrated is not None and plan.calibrated_baseline is not None and plan.simulation is not None
    assert plan.calibrated.bytes_offloaded < moved[0]
    assert (plan.calibrated.bytes_offloaded > 0) == moves
    test_chain_planning.check_bytes(run, without_turn(plan.simulation))
    assert plan.calibrated.step_ms <= plan.calibrated_baseline.step_ms * 1.1
    assert plan.predicted == before.predicted and plan.baseline == before.baseline
    assert plan.decisions != before.decisions
    offloaded = sum(d.total_bytes for d in plan.decisions if d.action == "offload")
    assert offloaded == plan.calibrated.bytes_offloaded
    for _ in range(4):
        assert_equal(run.step(), plain)
    assert the_plan().measured_step_ms is not None
    assert moved_by(run) == plan.calibrated.bytes_offloaded


@pytest.mark.slow
@pytest.mark.parametrize("first", ["some", "nothing"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_step_that_takes_far_longer_than_was_thought(first: str, is_there: bool) -> None:
    """It hides more copies: more is pinned, then more moves, and the plan says so; or it stays as it was where there is
    nothing to be pinned. No bit of a gradient changes."""
    plain = kept()
    asked: list[tuple[int, int]] = []

    def pin(engine: CopyEngine, nbytes: int, _: object) -> bool:
        assert engine is engine_for(CPU)
        asked.append((nbytes, follow.call_count))
        return is_there

    follow = mock.patch.object(
        StepTracker, "follow_instead", autospec=True, side_effect=StepTracker.follow_instead
    ).start()
    pins = mock.patch.object(CopyEngine, "pin", pin)
    nothing = mock.patch.object(chain_planning, "WORTH", 1.0 if first == "nothing" else chain_planning.WORTH)
    try:
        with measured(1.0), pins, nothing:
            run = recorded(MODELS["stack"], max_slowdown=0.02, disable=("tape_recompute",))
            moved, before = moved_by(run), the_plan()
            assert moved == before.predicted.bytes_offloaded and bool(moved) == (first == "some")
            while (plan := the_plan()).calibrated is None:
                assert asked == []
                assert_equal(run.step(), plain)
            for _ in range(4):
                assert moved_by(run) == plan.calibrated.bytes_offloaded
                assert_equal(run.step(), plain)
    finally:
        mock.patch.stopall()
    ((nbytes, num_followed),) = asked
    assert nbytes > moved and num_followed == 0
    assert plan.calibrated_baseline is not None
    if is_there:
        assert plan.calibrated.bytes_offloaded == nbytes
        assert plan.calibrated.peak_bytes < before.predicted_peak_bytes
    else:
        assert plan.calibrated.bytes_offloaded == moved
    if is_there or first == "some":
        assert "the least peak found within a slowdown of 2 %, by what was measured: " in plan.summary
    else:
        assert plan.summary == before.summary  # everything is kept
    assert plan.calibrated.step_ms <= 1.02 * plan.calibrated_baseline.step_ms


@pytest.mark.slow
def test_no_more_than_the_host_has_room_for() -> None:
    plain, budget = kept(), 27 * mmap.PAGESIZE
    with measured(1.0):
        run = recorded(MODELS["stack"], max_slowdown=0.02, disable=("tape_recompute",), host_budget=budget, steps=6)
        plan = the_plan()
        assert plan.calibrated is not None
        assert plan.predicted.bytes_offloaded < plan.calibrated.bytes_offloaded <= budget
        assert moved_by(run) == plan.calibrated.bytes_offloaded
        assert_equal(run.step(), plain)


@pytest.mark.slow
def test_equal_measurements_change_nothing() -> None:
    """What everything fits into is kept, whatever it takes."""
    with measured(1e-2) as time, mock.patch.object(StepTracker, "follow_instead") as instead:
        run = recorded(MODELS["stack"], activation_budget="1GiB", steps=6)
        assert the_plan().calibrated is not None
        assert time.counted == time.count
        assert not instead.called
        assert moved_by(run) == 0


def first_plan(pick: Callable[[list[Any]], Any]) -> Any:
    """Makes ``ChainPlanning.run`` move everything; ``pick``: what a call runs, of None and two variants."""

    def decide(planning: Any) -> Schedule:
        ways = planning.chain_search
        variants = {kind: [None, *variants[-2:]] for kind, variants in ways._variants_by_kind.items()}
        planning.choice = ways.with_variants(tuple(pick(variants[kind]) for kind in ways._kinds))
        step = planning.chain.step
        offload = tuple(bool(c.moved_bytes) for c in step.candidates)
        windows = windows_for(step, offload, 1 << 30) or no_windows(step)
        return Schedule(offload, windows, simulate(step, offload, copies=planning.rates, windows=windows))

    return mock.patch.object(chain_planning.ChainPlanning, "run", decide)


@pytest.mark.slow
def test_every_call_goes_on_running_its_variant() -> None:
    """Random decisions and variants; with measured times all of it is kept. Nothing is compiled for it."""
    generator = random.Random(7)
    plain = kept()
    budget = 1 << 30

    with measured(1e-3), first_plan(generator.choice):
        alive = set(fxoffload.graphs())
        run = recorded(MODELS["stack"], activation_budget=budget, steps=3)
        for graph in set(fxoffload.graphs()) - alive:
            test_chain_planning._tell_callers(run.watch, graph)
        before = the_plan()
        moved = moved_by(run)
        assert moved == before.predicted.bytes_offloaded > 0
        tracked = engine_for(CPU).calls._step.calls[0].tracked()  # type: ignore[union-attr]
        assert tracked is not None
        chain = tracked.chains.at(())
        first = chain.plan
        assert first is not None
        counts = test_chain_planning.compile_counts()
        for _ in range(2):
            assert chain.plan is first
            assert_equal(run.step(), plain)  # planned again when the second one begins
        assert chain.plan is not None and chain.plan is not first
        assert [c.variant for c in chain.plan.choices] == [c.variant for c in first.choices]
        assert len({c.variant for c in first.choices}) > 1
        plan = the_plan()
        assert plan.calibrated is not None and plan.simulation is not None
        assert plan.calibrated.bytes_offloaded == 0
        test_chain_planning.check_bytes(run, without_turn(plan.simulation))
        assert_equal(run.step(), plain)
        run.steps(2)
        assert {**test_chain_planning.compile_counts(), "segments": 0} == {**counts, "segments": 0}
    assert the_plan().measured_step_ms is not None
    assert "recompute" in {d.action for d in plan.decisions}
    # Variants that recompute take longer than the graphs as compiled.
    assert plan.calibrated_baseline is not None
    assert plan.calibrated_baseline.step_ms < plan.calibrated.step_ms


@pytest.mark.slow_except("0.0005-1e-06-5-0")
@pytest.mark.parametrize(("least_ms", "tick_ms", "first", "then"), [(0.5, 5.0, 0, LAYERS), (0.0005, 1e-6, LAYERS, 0)])
def test_what_was_measured_decides_which_calls_are_paced(
    monkeypatch: pytest.MonkeyPatch, least_ms: float, tick_ms: float, first: int, then: int
) -> None:
    """Forwards that are longer than predicted, or shorter, though nothing else changes."""
    monkeypatch.setattr(pacing, "_LEAST_MS", least_ms)
    monkeypatch.setattr(pacing, "_BUSY", 0.0)
    monkeypatch.setattr(pacing, "fsdp2_is_used", lambda: True)
    paced: list[int] = []
    monkeypatch.setattr(engine_for(CPU).streams, "pace", lambda: paced.append(1), raising=False)
    seen = []
    with measured(tick_ms), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = recorded(MODELS["stack"], activation_budget=1, disable=("tape_recompute",))
        for _ in range(9):
            paced.clear()
            run.step()
            seen.append(len(paced))
    assert the_plan().calibrated is not None
    assert (seen[1], seen[-1]) == (first, then) and set(seen) <= {first, then}


def test_a_chain_that_goes_while_it_is_planned_again_is_let_go() -> None:
    """Nothing is measured after that."""

    def gone(self: ChainRecalibration, readings: Any) -> None:
        observer = self.observer()
        assert observer is not None
        observer.stop()

    with measured(1e-3) as time, mock.patch.object(ChainRecalibration, "recalibrate", gone):
        run = recorded(MODELS["stack"], activation_budget="1GiB", steps=3)
        run.steps(6)
        (observer,) = time.followers
        assert observer.clock is None and observer._calibration is None
        assert len([c for c in time.clocks if c._counted]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("extra", [40 << 10, 1 << 20])
def test_working_sets_that_exceed_the_budget(extra: int) -> None:
    """More is moved, beyond the pinned memory; where that does not help there is a warning."""
    fits = extra < 1 << 20
    plain = kept()
    budget = test_chain_planning.in_between()

    def larger(_: Any, alike: Any) -> Any:
        return {"backward": dict.fromkeys(alike["backward"], extra)}

    with measured(1e-3), mock.patch.object(recalibrate_chain, "shared", larger):
        run = recorded(MODELS["stack"], activation_budget=budget, disable=("tape_recompute",), steps=5)
        before = the_plan()
        assert before.calibrated is None and before.predicted_peak_bytes <= budget
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.step()
        found = [w for w in caught if "by what was measured, the plan takes" in str(w.message)]
        assert len(found) == (not fits)
        plan = the_plan()
        assert plan.calibrated is not None
        if fits:
            assert plan.calibrated.peak_bytes <= budget
            assert plan.calibrated.bytes_offloaded > before.predicted.bytes_offloaded
        else:
            assert plan.calibrated.peak_bytes > budget
            assert plan.calibrated.bytes_offloaded == before.predicted.bytes_offloaded
        assert moved_by(run) == plan.calibrated.bytes_offloaded
        assert_equal(run.step(), plain)


@pytest.mark.slow
def test_a_budget_that_was_missed_from_the_beginning_is_not_warned_of_again() -> None:
    with measured(1e-3):
        with pytest.warns(UserWarning, match="expected an activation_budget of at least"):
            run = recorded(MODELS["stack"], activation_budget=1, disable=("tape_recompute",), steps=5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.steps(4)
    plan = the_plan()
    assert plan.calibrated is not None and plan.measured_step_ms is not None
    assert plan.calibrated.peak_bytes == plan.predicted_peak_bytes


def test_on_a_thread_of_its_own() -> None:
    """No step waits for it, and steps meanwhile follow the first plan and are not measured."""
    release = threading.Event()
    recalibrate = Recalibration.recalibrate

    def slow(self: Recalibration, readings: Any) -> None:
        assert release.wait(60)
        recalibrate(self, readings)

    plain = kept()
    with (
        measured(2e-4, in_background=True) as time,
        estimated(1e4),
        mock.patch.object(Recalibration, "recalibrate", slow),
    ):
        run = recorded(MODELS["stack"], max_slowdown=0.1, disable=("tape_recompute",), steps=5)
        moved = [moved_by(run) for _ in range(3)]
        assert moved == [the_plan().predicted.bytes_offloaded] * 3
        assert the_plan().calibrated is None
        assert len(time.clocks) == 1
        release.set()
        for thread in threading.enumerate():
            if thread.name == "fxoffload-replan":
                thread.join()
        assert_equal(run.step(), plain)
        plan = the_plan()
        assert plan.calibrated is not None and plan.calibrated.bytes_offloaded < moved[0]
        assert moved_by(run) == plan.calibrated.bytes_offloaded
        run.steps(2)
    assert the_plan().measured_step_ms is not None


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def _hooked(on: Run) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        on.step()


def _raises_in_forward(on: Run) -> None:
    on.model.between = lambda i, x: x if i < 2 else test_chain_planning._raise(x)
    with pytest.raises(RuntimeError, match="on purpose"):
        on.step()
    on.model.between = None  # type: ignore[assignment]


def _raises_in_backward(on: Run) -> None:
    def hook(i: int, x: Tensor) -> Tensor:
        if i == 2:
            x.register_hook(test_chain_planning._raise)
        return x

    on.model.between = hook
    with pytest.raises(RuntimeError, match="on purpose"):
        on.step()
    on.model.between = None  # type: ignore[assignment]


def _twice(on: Run) -> None:
    loss = loss_of(on.model(on.x))
    loss.backward(retain_graph=True)
    loss.backward()


def _two_forwards(on: Run) -> None:
    losses = [loss_of(on.model(on.x)) for _ in range(2)]
    for loss in reversed(losses):
        loss.backward()


def _no_backward(on: Run) -> None:
    on.model(on.x)


def _another_policy(on: Run) -> None:
    with fxoffload.override_policy("offload_all"):
        on.step()


def _everything_kept(on: Run) -> None:
    with fxoffload.override_policy("keep_all"):
        on.step()


def _the_last_layers_kept(on: Run) -> None:
    """The policy changes in the middle of a step."""
    policy = fxoffload.override_policy("keep_all")
    hook = on.model.layers[1].register_forward_pre_hook(lambda *_: policy.__enter__())  # type: ignore[index,union-attr]
    try:
        on.step()
    finally:
        hook.remove()
        policy.__exit__(None, None, None)


ODD = (
    _hooked,
    _raises_in_forward,
    _raises_in_backward,
    _twice,
    _two_forwards,
    _no_backward,
    _another_policy,
    _everything_kept,
    _the_last_layers_kept,
)


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
def test_steps_that_are_not_the_chain_are_not_measured(odd: Callable[[Run], None]) -> None:
    """Their time is in no reading; steps before and after them count."""
    plain = kept()
    with measured(1.0, count=3) as time:
        run = recorded(MODELS["stack"], activation_budget="1GiB", steps=4)
        time.tick_ms = 1000.0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "saved-tensor hooks of")
            odd(run)
        time.tick_ms = 1.0
        run.model.zero_grad(set_to_none=True)
        assert_equal(run.step(), plain)
        assert_equal(run.step(), plain)
        assert time.counted <= 2
        while the_plan().calibrated is None:
            assert_equal(run.step(), plain)
        plan = the_plan()
        assert plan.calibrated is not None
        assert plan.calibrated.step_ms == pytest.approx(segments_of(plan) + CALLS - 1)
        samples = time.clocks[0].readings().samples
        assert [len(of_phase) for of_phase in samples.values()] == [3, 3]
        assert max(ms for of_phase in samples.values() for s in of_phase for ms in s.segment_ms.values()) == 1.0


@pytest.mark.slow
def test_a_chain_that_is_forgotten_is_not_measured_any_more() -> None:
    plain = test_chain_planning.Run(
        test_chain_planning.per_layer(test_chain_planning.Paths(), policy="keep_all"),
        batch(length=test_chain_planning.LENGTH),
    )
    with measured() as time:
        run = test_chain_planning.Run(
            test_chain_planning.per_layer(test_chain_planning.Paths(), activation_budget="1GiB"),
            batch(length=test_chain_planning.LENGTH),
        )
        run.steps(4)
        observer = weakref.ref(time.followers.pop())
        clock = weakref.ref(time.clocks.pop())
        for on in (run, plain):
            on.model.path = (0, 1, 3, 3, 4)  # type: ignore[assignment]
        for _ in range(3):
            assert_equal(run.step(), plain.step())
        gc.collect()
        assert observer() is None and clock() is None
        assert time.planning[0]() is None
        run.steps(4)
        assert len(time.followers) == 1, "the other chain is planned, and measured"


@pytest.mark.slow
def test_it_goes_with_its_graphs() -> None:
    others = set(fxoffload.graphs())
    with measured() as time:
        run = recorded(MODELS["stack"], steps=4)
        found = [weakref.ref(x) for x in (time.followers.pop(), time.clocks.pop(), engine_for(CPU).calls._step)]
        graphs = [weakref.ref(g) for g in fxoffload.graphs() if g not in others]
        assert graphs
        assert time.planning[0]() is not None
        del run
        test_chain_planning.WATCHES.clear()
        engine_for(CPU).calls._step = None
        torch.compiler.reset()
        gc.collect()
        assert [ref() for ref in (*found, *graphs, *time.planning)] == [None] * (len(found) + len(graphs) + 1)
        assert not new_plans()


def test_it_lets_go_where_one_of_its_graphs_is_gone() -> None:
    places = StepTracker(dict, in_background=False)
    tracked_graphs = [places.track() for _ in range(3)]
    calibration = SimpleNamespace()
    observer = Replan(
        calibration,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        tuple(weakref.ref(s) for s in tracked_graphs),
        make_clock=lambda: StepClock(3, skip=0, events=host_events()),
    )
    assert observer.step_begins() is not None
    held = weakref.ref(tracked_graphs[0])
    del tracked_graphs[1]
    assert observer._calibration is None and observer.clock is None
    assert observer.step_begins() is None
    tracked_graphs.clear()
    assert held() is None


@pytest.mark.slow
@pytest.mark.parametrize("where", ["time", "readings", "plan"])
def test_a_failure_is_one_warning(where: str) -> None:
    """The first plan stays."""
    plain = kept()
    broken = {
        "time": (PooledEvents, "record"),
        "readings": (StepRecording, "samples"),
        "plan": (ChainRecalibration, "measured"),
    }
    with measured(2e-4) as time, estimated(1e4):
        run = recorded(MODELS["stack"], max_slowdown=0.1, disable=("tape_recompute",), steps=3)
        with (
            mock.patch.object(*broken[where], test_chain_planning._raise),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            moved = [moved_by(run) for _ in range(4)]
            assert_equal(run.step(), plain)
        told = [str(w.message) for w in caught if "on purpose" in str(w.message)]
        assert len(told) == 1, told
        assert "goes on with its" in told[0]
        assert moved == [the_plan().predicted.bytes_offloaded] * 4
        run.steps(4)
        assert the_plan().calibrated is None
        # Where only the plan failed, steps are still measured.
        assert (the_plan().measured_step_ms is not None) == (where == "plan")
        assert time.followers[0].clock is None


def test_a_chain_that_is_never_complete_is_not_measured_for_ever() -> None:
    with measured(count=1) as time:
        run = recorded(MODELS["stack"], activation_budget="1GiB", steps=3)
        for _ in range(6):
            _raises_in_backward(run)
            run.model.zero_grad(set_to_none=True)
        assert time.followers[0].clock is None
        gc.collect()
        assert time.planning[0]() is None
        assert moved_by(run) == 0
    assert the_plan().calibrated is None and the_plan().measured_step_ms is None


# -- parts -------------------------------------------------------------------------------------------------------------


def test_the_cpu_and_a_piece_that_is_off_are_not_followed() -> None:
    seen = []

    def follow(planning: Any, *args: Any) -> None:
        seen.append(planning.calibrates)
        assert recalibrate_chain.replan_for_chain(planning, *args) is None

    with mock.patch.object(plan_chain, "replan_for_chain", follow):
        for changes in ({}, {"disable": ("calibration",)}):
            torch.compiler.reset()
            recorded(MODELS["stack"], activation_budget="1GiB", steps=3, **changes)
    assert seen == [True, False]
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), calibrates=False)
    assert recalibrate_chain.replan_for_chain(gpu, None, (), None) is None  # type: ignore[arg-type]


def test_a_budget_is_that_of_the_graphs_and_what_runs_between_them() -> None:
    """The graphs' part is compared; the whole is reported."""
    limit, budget = 100 << 20, (100 << 20) + AROUND_BYTES
    simulation: Any = SimpleNamespace(peak_bytes=limit)
    objective: Any = SimpleNamespace(budget_bytes=budget, max_slowdown=None, is_checkpointing=False)

    class Again(ChainRecalibration):
        def __init__(self) -> None:
            Recalibration.__init__(self, SimpleNamespace(simulation=simulation), None, None, objective, limit)  # type: ignore[arg-type]
            self._planning: Any = SimpleNamespace(warn=lambda kind, text: warnings.warn(text, stacklevel=2))

    too_much: Any = SimpleNamespace(simulation=SimpleNamespace(peak_bytes=limit + (1 << 20), step_ms=1.0))
    with pytest.warns(UserWarning, match=r"takes 165.* more than the activation_budget of 164"):
        Again()._warn_of_the_budget(too_much)
    assert Again()._is_better(too_much, too_much, None)  # type: ignore[arg-type]


@settings(max_examples=examples(40), deadline=None)
@given(decided_steps(4))
def test_the_turn_changes_no_byte_and_adds_its_time(made: tuple[TrainingStep, tuple[bool, ...]]) -> None:
    """It comes after all segments of the forward, also under windows that were made without it."""
    step, decisions = made
    chain = concatenate([step, step]).step
    offload = tuple(decisions[i % len(decisions)] for i in range(len(chain.candidates))) if decisions else ()
    if not decisions:
        offload = (False,) * len(chain.candidates)
    rates = ConstantRates(20.0, 20.0)
    whole = simulate(chain, (False,) * len(chain.candidates), copies=rates, windows=no_windows(chain)).peak_bytes
    windows = windows_for(chain, offload, whole) or no_windows(chain)
    plain = simulate(chain, offload, copies=rates, windows=windows)
    for ms in (0.0, 3.0):
        later = with_turn(chain)
        later = replace(later, forward=(*later.forward[:-1], replace(later.forward[-1], ms=ms)))
        found = simulate(later, offload, copies=rates, windows=windows)
        assert (found.peak_bytes, found.bytes_offloaded, found.bytes_reclaimed, found.num_prefetch_misses) == (
            (plain.peak_bytes, plain.bytes_offloaded, plain.bytes_reclaimed, plain.num_prefetch_misses)
        )
        assert found.step_ms <= plain.step_ms + ms + 1e-6
        assert found.step_ms >= plain.step_ms - 1e-6
        if not any(offload):
            assert found.step_ms == pytest.approx(plain.step_ms + ms)
        kinds = [b for b in found.boundaries if b.segment != TURN]
        assert [b.live_bytes for b in kinds] == [b.live_bytes for b in plain.boundaries]


def test_what_graphs_would_take_as_they_were_compiled() -> None:
    """Two calls: the second recomputes, by its estimate 5 ms instead of 2, and takes three times as long."""
    from tests.planner.test_chain_search import layer, passed

    compiled = concatenate([layer((8,), ms=1.0)] * 2, passed(2))
    ran = concatenate([layer((8,), ms=1.0), layer((8,), ms=1.0, again_ms=3.0, halves=2)], passed(2))
    ms: Any = {
        "forward": {"call 0/entry": 0.0, "call 0/f": 7.0, "call 1/entry": 0.5, "call 1/f": 3.0, TURN: 4.0},
        "backward": {"call 1/b0": 7.0, "call 1/b1": 8.0, "call 0/backward entry": 0.25, "call 0/b0": 9.0},
    }
    found = as_compiled(compiled, ran, [False, True], ["one", "another"], ms)
    step = measured_step(with_turn(compiled.step), found)
    assert [(s.name, s.ms) for s in step.forward] == [
        ("call 0/entry", 0.0),
        ("call 0/f", 7.0),
        ("call 1/entry", 0.5),
        ("call 1/f", 3.0),
        (TURN, 4.0),
    ]
    assert [(s.name, s.ms) for s in step.backward] == [
        ("call 1/b0", pytest.approx(6.0)),
        ("call 0/backward entry", 0.25),
        ("call 0/b0", 9.0),
    ]


def test_a_graph_that_some_calls_ran_as_compiled_takes_what_these_took() -> None:
    """Four calls of one graph, of which the third and fourth recomputed."""
    from tests.planner.test_chain_search import layer, passed

    plain, again = layer((8,), ms=1.0), layer((8,), ms=1.0, again_ms=3.0)
    compiled, ran = concatenate([plain] * 4, passed(4)), concatenate([plain, plain, again, again], passed(4))
    ms: Any = {
        "forward": {"call 0/f": 7.0, "call 1/f": 8.0, "call 2/f": 30.0, "call 3/f": 40.0},
        "backward": {"call 3/b0": 90.0, "call 2/b0": 80.0, "call 1/b0": 20.0, "call 0/b0": 10.0},
    }
    varied = [False, False, True, True]
    found = as_compiled(compiled, ran, varied, ["a"] * 4, ms)
    assert found == {
        "forward": {"call 0/f": 7.0, "call 1/f": 8.0, "call 2/f": 7.5, "call 3/f": 7.5},
        "backward": {"call 0/b0": 10.0, "call 1/b0": 20.0, "call 2/b0": 15.0, "call 3/b0": 15.0},
    }
    # The last call is of another graph, which no call ran as compiled.
    other = as_compiled(compiled, ran, varied, ["a", "a", "a", "b"], ms)
    assert other["forward"]["call 3/f"] == 40.0 and other["forward"]["call 2/f"] == 7.5
    assert other["backward"]["call 3/b0"] == pytest.approx(90.0 * 2.0 / 5.0)


@pytest.mark.parametrize("records", [True, False])
def test_the_clock_knows_what_other_streams_held_before_the_first_call(records: bool) -> None:
    """And whether it may have the allocator record."""
    asked: list[Any] = []

    def clock(device: torch.device, num_calls: int, *, records: bool, **left: Any) -> StepClock:
        asked.append((device, num_calls, left, records))
        return StepClock(num_calls, events=host_events())

    cuda = torch.device("cuda")
    planning: Any = SimpleNamespace(
        device=cuda,
        calibrates=True,
        order=None,
        choice=SimpleNamespace(scheduler=None),
        objective=SimpleNamespace(budget_bytes=None),
        limit_bytes=None,
        others_bytes=77,
        first_bytes=5,
        records=records,
    )
    tracked_graphs = [engine_for(CPU).calls.track() for _ in range(3)]
    schedule: Any = None
    box: Any = None
    with mock.patch.object(recalibrate_chain, "step_clock_for", clock):
        observer = recalibrate_chain.replan_for_chain(planning, schedule, tuple(map(weakref.ref, tracked_graphs)), box)
    assert observer is not None
    assert asked == [(cuda, 3, {"order": None, "left_bytes": 77, "first_bytes": 5}, records)]
