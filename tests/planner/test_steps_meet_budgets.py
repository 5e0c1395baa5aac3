"""Steps over several graphs are held to their budget, and plans state the whole step: real graphs, on the CPU, with an
allocator that is made up."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fxoffload
from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.planner.schedule import Schedule
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.profiler.stream_events import host_events
from fxoffload.runtime.tracker.hold_to_budget import HoldToBudget
from tests.planner import test_chain_planning, test_gaps
from tests.planner.rehearsal import CPU
from tests.planner.test_chain_planning import Run, alone, new_plans, recorded
from tests.planner.test_gaps import LAYERS, Recorded
from tests.support import Stack, assert_equal

__all__ = ["alone"]  # the fixture


class Head(Recorded):
    """An eager head, after the last layer, whose memory changes from step to step. The process has had far more."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, at_turn=True)
        self.total = 1 << 40

    def pass_by(self, gradient: Tensor) -> None:
        self.total += self.nbytes + (1 << 24)  # and what the graphs allocate
        super().pass_by(gradient)

    def read(self) -> Memory:
        return super().read()._replace(total=self.total)


@contextlib.contextmanager
def held(head: Head) -> Iterator[None]:
    """The engine reads the allocator there, and holds steps to their budgets."""
    hold = HoldToBudget(head.read, head.history)
    with test_gaps.recording(head), mock.patch.object(engine_for(CPU).calls, "_hold", hold):
        yield


def begin(head: Head, **changes: Any) -> Run:
    """A model whose second step is recorded."""
    run = recorded(head.model, steps=1, **changes)
    head.watch = run.watch
    return run


@pytest.fixture
def peaks() -> tuple[int, int]:
    found = test_chain_planning.range_of_peaks("stack")
    test_chain_planning._PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("disable", [("tape_recompute",), ()], ids=["offloading", "and recomputing"])
def test_a_head_that_appears_late_and_goes_away(peaks: tuple[int, int], disable: tuple[str, ...]) -> None:
    """Two steps are above the budget at most. No bit of a gradient changes."""
    least, most = peaks
    plain = recorded(lambda: Stack(LAYERS), policy="keep_all").steps(1)[0]
    head = Head(0)
    run = begin(head, activation_budget=most, disable=disable)
    with held(head):
        found = [head.peak_of(run) for _ in range(4)]
        assert max(found) <= most and new_plans()[-1].predicted.bytes_offloaded == 0
        head.nbytes = (most - least) * 2 // 3
        found = [head.peak_of(run) for _ in range(5)]
        assert found[0] > most >= max(found[2:])
        assert_equal(run.step(), plain)
        plan = new_plans()[-1]
        assert plan.predicted.outside_bytes >= head.nbytes > 0
        assert 0.9 * most < found[-1] <= plan.predicted.peak_bytes <= most < plan.baseline.peak_bytes
        head.nbytes = 0
        found = [head.peak_of(run) for _ in range(12)]
        assert_equal(run.step(), plain)
    assert max(found) <= most and new_plans()[-1].predicted.bytes_offloaded == 0


@pytest.mark.slow
def test_a_head_that_nothing_makes_room_for(peaks: tuple[int, int]) -> None:
    """One warning names the budget that would be met, and it is."""
    least, most = peaks
    head = Head(0)
    run = begin(head, activation_budget=most, disable=("tape_recompute",))
    with held(head), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.steps(3)
        head.nbytes = most
        found = [head.peak_of(run) for _ in range(8)]
    (told,) = [str(w.message) for w in caught if "activation_budget" in str(w.message)]
    plan = new_plans()[-1]
    assert f"({plan.predicted.peak_bytes} bytes)" in told
    assert least + most // 2 < found[-1] <= plan.predicted.peak_bytes


@pytest.mark.slow_except("1GiB")
@pytest.mark.parametrize("budget", ["1GiB", None])
def test_the_first_plan_knows_the_head(budget: str | None, tmp_path: Any) -> None:
    """Its bytes and its time, with a budget or without; in the gain, in the table, in the plot."""
    test_chain_planning._PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    now = [0.0]

    def time() -> float:
        now[0] += 1.0
        return now[0]

    head = Head(100_000)
    changes: dict[str, Any] = {"max_slowdown": 0.5} if budget is None else {"activation_budget": budget}
    run = begin(head, **changes)
    with held(head), mock.patch.object(engine_for(CPU).calls, "_events", host_events(time)):
        run.steps(3)
    (plan,) = new_plans()
    # An event each is recorded at both ends of a call: between two of them there is one millisecond.
    for found in (plan.predicted, plan.baseline):
        assert found.outside_bytes >= 100_000
        assert found.outside_ms == pytest.approx(2 * LAYERS - 1)
        assert found.step_ms > found.outside_ms and found.peak_bytes > found.outside_bytes
    assert plan.baseline.peak_bytes > 100_000
    gain = 1 - plan.predicted.peak_bytes / plan.baseline.peak_bytes
    if budget is None:
        assert f"{100 * gain:.0f} % less memory" in plan.summary or "next to nothing" in plan.summary
    assert str(plan).count("outside compiled graphs") == 2, "its row, and what sets the peak"
    assert max(b.outside_bytes for b in plan.boundaries) == plan.predicted.outside_bytes
    assert fxoffload.Plan.from_json(plan.to_json()) == plan
    pytest.importorskip("matplotlib")
    plan.plot(tmp_path / "plan.png")


@pytest.mark.slow
def test_the_time_of_a_head_hides_copies(peaks: tuple[int, int]) -> None:
    """Under a slowdown: a step that is known to be longer may hide more."""
    moved = []
    for ms in (1e-9, 10.0):
        torch.compiler.reset()
        test_chain_planning._PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
        now = [0.0]

        def time(ms: float = ms, now: list[float] = now) -> float:
            now[0] += ms
            return now[0]

        head = Head(0)
        run = begin(head, max_slowdown=0.02, disable=("tape_recompute",))
        with held(head), mock.patch.object(engine_for(CPU).calls, "_events", host_events(time)):
            run.steps(3)
        moved.append(new_plans()[-1].predicted.bytes_offloaded)
    assert moved[0] < moved[1]


@pytest.mark.slow
def test_until_the_plan_is_there_graphs_run_as_they_are_within_the_budget(peaks: tuple[int, int]) -> None:
    """A schedule for them is found at once. No bit of a gradient changes."""
    budget = sum(peaks) // 2
    plain = recorded(lambda: Stack(LAYERS), policy="keep_all").steps(1)[0]
    run_on, may_go = ChainPlanning.run, threading.Event()

    def slow(self: ChainPlanning) -> Schedule:
        assert may_go.wait(60)
        return run_on(self)

    background = mock.patch.object(engine_for(CPU).calls.plans, "in_background", True)
    with background, mock.patch.object(ChainPlanning, "run", slow):
        run = recorded(lambda: Stack(LAYERS), steps=1, activation_budget=budget)
        everything = test_chain_planning.moved_by(run)
        moved = test_chain_planning.moved_by(run)
        assert_equal(run.step(), plain)
        assert not new_plans()
        may_go.set()
        for thread in threading.enumerate():
            if thread.name == "fxoffload-chain-plan":
                thread.join()
        assert_equal(run.step(), plain)
    assert 0 < moved < everything
    (plan,) = new_plans()
    assert plan.predicted.peak_bytes <= budget
