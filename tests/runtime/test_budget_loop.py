"""A budget is held, step by step: scripted steps of compiled graphs, on an allocator that is made up."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fxoffload.runtime import background
from fxoffload.runtime.profiler.allocator_history import AllocatorHistory
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.profiler.step_peak import PeakWatch, StepPeak
from fxoffload.runtime.step_first import STEP_FIRST
from fxoffload.runtime.tracker.budget_loop import BudgetLoop
from fxoffload.runtime.tracker.chains import ChainPlan, Chains, Meanwhile, Seen, Sizes
from fxoffload.runtime.tracker.step_tracker import StepTracker
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.runtime.transactions import Latch
from fxoffload.runtime.transfer import Group
from fxoffload.step.choice import Choice
from fxoffload.step.edges import Edges
from tests.allocator import Allocator
from tests.support import set_when_a_step_waits

UNIT = 512
CALLS, SAVED = 4, 10  # units that a call keeps, if it does


class Watched(Allocator):
    """Knows the true peak of each step, as only a test can."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_seen = 0
        self.has_record = True

    def _note(self, is_allocation: bool, nbytes: int, size: int, address: int) -> None:
        super()._note(is_allocation, nbytes, size, address)
        self.peak_seen = max(self.peak_seen, self.allocated)

    def begin(self) -> AllocatorHistory | None:
        return self.history() if self.has_record else None


@dataclass
class Step:
    """Allocations of eager code between the last forward and the first backward, in units. ``passing`` is freed at
    once, ``held`` when the step ends, ``output`` when the next step has made another one."""

    passing: int = 0
    held: int = 0
    output: int = 0


class Model:
    """Calls that keep or offload their saved values, under a budget. Its planner fills the budget with kept values, by
    the extra memory that was read. It does not know that graphs that keep as much take ``error`` units more. Backwards
    run in reverse, or ``oldest_first``.

    Attributes:
        plans: how many units each plan keeps.
        records: whether each step was recorded.
        peaks: of each step, in units above the bytes at its beginning.
    """

    def __init__(
        self,
        allocator: Watched,
        calls: StepTracker,
        budget: int,
        *,
        error: Callable[[int], int] = lambda _: 0,
        oldest_first: bool = False,
    ) -> None:
        self.first_backward = 0 if oldest_first else -1
        self.allocator, self.budget, self.error = allocator, budget, error
        self.plans: list[int] = []
        self.peaks: list[int] = []
        self.records: list[bool] = []
        self._output: tuple[int, int] | None = None  # address and bytes of what the caller holds
        self.tracked_graphs = [calls.track() for _ in range(CALLS)]
        for tracked in self.tracked_graphs:
            tracked.description, tracked.planner, tracked.has_budget = object(), self.plan, True
            tracked.may_follow = lambda: True
            tracked.edges = Edges((), (), (), (), saved=(0,))
            tracked.at_first = Choice((True,))

    def plan(
        self,
        tracked_graphs: Sequence[TrackedGraph],
        seen: Seen,
        sizes: Sequence[Sizes],
        /,
        meanwhile: Meanwhile | None = None,
    ) -> ChainPlan:
        at = ("backward", range(len(tracked_graphs))[self.first_backward])
        beside = max(seen.live_bytes.get(at, 0) + seen.gap_bytes.get(at, 0), 0) + seen.margin_bytes
        room = self.budget - beside // UNIT
        num_kept = max(min(room // SAVED, len(tracked_graphs)), 0)
        if room < 0:
            warnings.warn(f"expected a budget of at least {beside // UNIT}", stacklevel=1)
        self.plans.append(num_kept * SAVED)
        choices = [Choice((k >= num_kept,)) for k in range(len(tracked_graphs))]
        return ChainPlan(
            tuple(map(weakref.ref, tracked_graphs)),
            tuple(choices),
            budget_bytes=self.budget * UNIT,
            is_least=room < 0,
            spare_bytes=max(room - num_kept * SAVED, 0) * UNIT,
            least=(Choice((True,)),) * len(tracked_graphs),
            costs_time=num_kept < len(tracked_graphs),
            order=seen.order,
        )

    def step(self, between: Step | None = None, *, num_calls: int | None = None) -> int:
        """Returns the peak in units."""
        between = between or Step()
        memory, start = self.allocator, self.allocator.allocated
        left = 0 if self._output is None else self._output[1]  # by the step before
        before, memory.peak_seen = memory.peak_seen, start
        saved: list[tuple[TrackedGraph, Tensor, int, int]] = []
        for tracked in self.tracked_graphs[:num_calls]:
            tracked.forward_begins([])
            followed = tracked.followed or Choice((True,))
            nbytes = 0 if followed.offload[0] else SAVED * UNIT
            address = memory.allocate(nbytes) if nbytes else 0
            saved.append((tracked, torch.ones(1), nbytes, address))
            tracked.forward_ends(Group(), [saved[-1][1]])
        self.records.append(memory.events is not None)
        held = memory.allocate(between.held * UNIT) if between.held else 0
        if between.output:
            output = memory.allocate(between.output * UNIT)
            self._let_go()
            self._output = output, between.output * UNIT
        if between.passing:
            memory.pass_by(between.passing * UNIT)
        kept = sum(n for _, _, n, _ in saved) // UNIT
        if kept and self.error(kept):
            memory.pass_by(self.error(kept) * UNIT)
        while saved:
            tracked, _, nbytes, address = saved.pop(self.first_backward)
            tracked.backward_begins(Group(), [])
            if nbytes:
                memory.free(nbytes, address=address)
            tracked.backward_ends([])
        if between.held:
            memory.free(between.held * UNIT, address=held)
        peak = (memory.peak_seen - start + left) // UNIT
        memory.peak_seen = max(before, memory.peak_seen)
        self.peaks.append(peak)
        return peak

    def _let_go(self) -> None:
        if self._output is not None:
            address, nbytes = self._output
            self.allocator.free(nbytes, address=address)
            self._output = None

    def steps(self, count: int, between: Step | None = None) -> list[int]:
        return [self.step(between) for _ in range(count)]


@dataclass
class World:
    allocator: Watched = field(default_factory=Watched)

    def __post_init__(self) -> None:
        self.calls = StepTracker(
            lambda: {}, in_background=False, memory=self.allocator.read, history=self.allocator.begin
        )

    def model(self, budget: int, **changes: Any) -> Model:
        return Model(self.allocator, self.calls, budget, **changes)


@pytest.fixture(params=[False, True], ids=["the peak is the process's", "the process has had more"])
def world(request: pytest.FixtureRequest) -> World:
    """Two steps are recorded, and the third follows a plan."""
    found = World()
    if not request.param:
        found.allocator.peak = found.allocator.allocated
    return found


HEAD = Step(passing=5)


def test_a_plan_that_is_met_is_left_alone(world: World) -> None:
    """And of its steps only the first is recorded."""
    model = world.model(30)
    assert model.steps(9, HEAD) == [5, 5] + [25] * 7
    assert model.plans == [20]
    assert model.records == [False, True, True] + [False] * 6


@pytest.mark.parametrize("more", [Step(passing=16), Step(held=16), Step(passing=5, held=11)])
@pytest.mark.parametrize("first", [2, 5])
def test_eager_memory_that_grows_or_appears_late(world: World, first: int, more: Step) -> None:
    """The third step from then on meets the budget, and so does every later one."""
    model = world.model(30)
    model.steps(first, HEAD)
    found = model.steps(8, more)
    assert found[0] > 30 or first == 2
    assert max(found[2:]) <= 30
    assert found[-1] == 26 and model.plans[-1] == 10
    assert model.records[-4:] == [False] * 4


@pytest.mark.parametrize("first", [2, 5])
def test_a_step_in_another_order_is_held_to_its_budget(world: World, first: int) -> None:
    """The backwards in the order of the forwards: observed, judged and corrected as any other step."""
    model = world.model(30, oldest_first=True)
    model.steps(first, HEAD)
    found = model.steps(8, Step(passing=16))
    assert found[0] > 30 or first == 2
    assert max(found[2:]) <= 30
    assert found[-1] == 26 and model.plans[-1] == 10


def test_outputs_that_are_not_held_any_more(world: World) -> None:
    """Their room is used again, and none of it is taken for something else."""
    model = world.model(30)
    model.steps(8, Step(output=8))
    assert model.plans[-1] == 10
    found = model.steps(2, Step(output=1))
    model._let_go()
    found += model.steps(14, HEAD)
    assert max(found) <= 30 and found[-1] == 25 and model.plans[-1] == 20
    assert len(model.plans) <= 3


@pytest.mark.parametrize("first", [2, 5])
def test_outputs_that_the_caller_holds_until_there_are_others(world: World, first: int) -> None:
    """Logits of the step before: they are there when a step begins, but not for good."""
    model = world.model(30)
    model.steps(first, HEAD)
    found = model.steps(9, Step(output=8))
    assert max(found[3:]) <= 30
    assert found[-1] == 26 and model.plans[-1] == 10, "twice the output, while both are there"


def test_eager_memory_that_goes_away_is_used(world: World) -> None:
    model = world.model(30)
    model.steps(4, Step(passing=16))
    assert model.plans == [10]
    found = model.steps(20, HEAD)
    assert max(found) <= 30
    assert model.plans == [10, 20] and found[-1] == 25


def test_eager_memory_that_comes_and_goes(world: World) -> None:
    """Every third step logs something. The budget is met for good, and the plan stays."""
    model = world.model(30)
    model.steps(5, HEAD)
    found = [model.step(Step(passing=18) if i % 3 == 0 else HEAD) for i in range(60)]
    assert max(found[6:]) <= 30
    num_plans = len(model.plans)
    found = [model.step(Step(passing=18) if i % 3 == 0 else HEAD) for i in range(60)]
    assert max(found) <= 30 and len(model.plans) == num_plans


def test_memory_that_goes_away_and_comes_back_is_left_room_for(world: World) -> None:
    """Long after the plan was made to use it."""
    model = world.model(30)
    model.steps(5, HEAD)
    found = [model.step(Step(passing=18) if i % 20 == 0 else HEAD) for i in range(200)]
    assert sum(peak > 30 for peak in found) <= 4
    assert max(found[100:]) <= 30


def test_a_plan_that_is_wrong_about_its_graphs(world: World) -> None:
    """Bytes that no extra memory explains are left free."""
    model = world.model(30, error=lambda kept: 14)
    found = model.steps(10)
    assert found[2] == 44 and max(found[3:]) <= 30
    assert model.plans == [30, 10] and found[-1] == 24


@pytest.mark.filterwarnings("default")
def test_where_nothing_can_meet_it_one_warning_says_what_would(world: World) -> None:
    model = world.model(30)
    model.steps(4, HEAD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = model.steps(12, Step(passing=40))
    assert [str(w.message) for w in caught] == ["expected a budget of at least 40"]
    assert found[-8:] == [40] * 8 and model.plans == [20, 0]
    assert max(model.steps(12, HEAD)[9:]) == 25, "which goes away again"


def test_a_plan_that_does_not_settle_is_warned_of_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it keeps, its steps take a unit more than the budget."""
    monkeypatch.setattr(sys.modules[__name__], "CALLS", 10)
    model = world.model(100, error=lambda kept: 101 - kept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = model.steps(40)
    (message,) = [str(w.message) for w in caught]
    assert "expected steps of 10 calls" in message and f"activation_budget={101 * UNIT} would be met" in message
    assert found[-10:] == [101] * 10 and len(model.plans) == 7


@pytest.mark.parametrize("high", [0, 10**9])
def test_an_evaluation_with_longer_batches_changes_nothing(world: World, high: int) -> None:
    model = world.model(30)
    model.steps(4, HEAD)
    world.allocator.pass_by(high or 200 * UNIT)
    assert model.steps(6, HEAD) == [25] * 6
    assert model.plans == [20] and not any(model.records[4:])
    world.allocator.pass_by(high or 200 * UNIT)
    found = model.steps(6, Step(passing=16))
    assert max(found[2:]) <= 30


def test_steps_that_become_others_while_a_plan_is_made_again(world: World) -> None:
    """They are recorded, and planned, as ever."""
    model = world.model(30)
    model.steps(4, HEAD)
    model.step(Step(passing=16))
    model.step(Step(passing=16))
    for _ in range(3):
        model.step(HEAD, num_calls=2)
    found = [model.step(HEAD, num_calls=2) for _ in range(6)]
    assert found[-1] == 25 and model.plans[-1] == 20


def test_another_model_in_the_process(world: World) -> None:
    """Each has its own budget. What one has between its steps is nothing to the other."""
    one, other = world.model(30), world.model(50)
    for i in range(12):
        one.step(HEAD if i < 6 else Step(passing=16))
        world.allocator.allocate(100 * UNIT)
        other.step(HEAD)
        world.allocator.free((100 if i % 2 else 50) * UNIT)
    assert max(one.peaks[2:6] + one.peaks[8:]) <= 30
    assert other.plans == [40] and set(other.peaks[2:]) == {45}
    assert one.plans[-1] == 10


def test_the_users_peak_is_never_reset(world: World) -> None:
    model = world.model(30)
    seen = []
    for i in range(12):
        model.step(HEAD if i < 6 else Step(passing=16))
        seen.append(world.allocator.peak)
    assert seen == sorted(seen)


def test_a_peak_that_the_user_resets(world: World) -> None:
    model = world.model(30)
    for i in range(12):
        model.step(HEAD if i < 6 else Step(passing=16))
        world.allocator.peak = world.allocator.allocated
    assert max(model.peaks[8:]) <= 30


def test_without_a_record_it_is_seen_where_it_can_be() -> None:
    """The record is taken, and the process has had more: held memory shows, passing memory does not."""
    world = World()
    world.allocator.has_record = False
    model = world.model(30)
    model.steps(5, HEAD)
    found = model.steps(6, Step(held=16))
    assert max(found[2:]) <= 30


# -- until the plan is there -------------------------------------------------------------------------------------------


def test_plans_are_told_while_the_host_launches_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for name in ("launches", "launched"):
        monkeypatch.setattr(STEP_FIRST, name, partial(told.append, name))
    world = World()
    model = world.model(30)
    model.steps(2, HEAD)
    assert told.count("launched") == 2 and told[-1] == "launched"
    # When a forward begins and has ended, and when a backward begins.
    assert told[: told.index("launched")].count("launches") >= 3 * CALLS


def planning_in_background() -> World:
    """As on a GPU."""
    world = World()
    world.calls = StepTracker(
        lambda: {}, in_background=True, memory=world.allocator.read, history=world.allocator.begin
    )
    return world


def is_asked() -> bool:
    """Whether this thread stands still while a step is launched."""
    return sys.getprofile() is not None


def test_a_quick_plan_is_followed_until_the_plan_is_there() -> None:
    """Made on the same thread as the plan, which gives way to steps from then on. The third step waits for it."""
    world = planning_in_background()
    model = world.model(30)
    quick, whole = threading.Event(), threading.Event()
    given = threading.Event()
    asked: list[bool] = []

    def planner(tracked_graphs: Any, seen: Any, sizes: Any, /, meanwhile: Meanwhile | None = None) -> ChainPlan:
        assert meanwhile is not None
        assert quick.wait(60)
        asked.append(is_asked())
        found = model.plan(tracked_graphs, seen, sizes)
        meanwhile(replace(found, choices=(Choice((False,)), *[Choice((True,))] * (CALLS - 1)), budget_bytes=None))
        asked.append(is_asked())
        given.set()
        assert whole.wait(60)
        return found

    for tracked in model.tracked_graphs:
        tracked.planner = planner
    assert model.steps(2, HEAD) == [5] * 2
    set_when_a_step_waits(quick)
    assert model.steps(3, HEAD) == [15] * 3
    assert given.wait(60)
    assert asked == [False, True]
    whole.set()
    for thread in threading.enumerate():
        if thread.name == "fxoffload-chain-plan":
            thread.join()
    assert model.steps(3, HEAD) == [25] * 3


@pytest.mark.parametrize("ends", ["with a plan", "without one", "with an error"])
def test_where_no_quick_plan_meets_the_budget_a_step_waits_for_the_plan(ends: str) -> None:
    world = planning_in_background()
    model = world.model(30)
    given, whole = threading.Event(), threading.Event()
    asked: list[bool] = []

    def planner(tracked_graphs: Any, seen: Any, sizes: Any, /, meanwhile: Meanwhile | None = None) -> ChainPlan | None:
        given.set()
        assert whole.wait(60)
        asked.append(is_asked())
        if ends == "with an error":
            raise RuntimeError("on purpose")
        return model.plan(tracked_graphs, seen, sizes) if ends == "with a plan" else None

    for tracked in model.tracked_graphs:
        tracked.planner = planner
    fails = pytest.warns(UserWarning, match="on purpose") if ends == "with an error" else contextlib.nullcontext()
    with fails:
        assert model.steps(2, HEAD) == [5] * 2
        set_when_a_step_waits(whole)
        assert model.steps(2, HEAD) == [25 if ends == "with a plan" else 5] * 2
    assert whole.is_set()
    assert asked == [False]


def test_while_a_plan_is_made_anew_no_step_waits() -> None:
    """The choices of the least memory are followed."""
    world = planning_in_background()
    model = world.model(30)
    assert model.steps(4, HEAD)[2:] == [25] * 2
    whole = threading.Event()

    def planner(*args: Any, **_: Any) -> ChainPlan:
        assert whole.wait(60)
        return model.plan(*args[:3])

    for tracked in model.tracked_graphs:
        tracked.planner = planner
    late = threading.Timer(30.0, whole.set)
    late.start()
    model.steps(6, Step(passing=15))
    assert not whole.is_set()
    late.cancel()
    whole.set()


def test_an_exception_that_comes_while_a_step_waits_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a signal handler that ends a step after some time. The next step waits again."""
    world = planning_in_background()
    model = world.model(30)
    given, whole = threading.Event(), threading.Event()

    def planner(tracked_graphs: Any, seen: Any, sizes: Any, /, meanwhile: Meanwhile | None = None) -> ChainPlan | None:
        given.set()
        assert whole.wait(60)
        return model.plan(tracked_graphs, seen, sizes)

    def interrupted(self: Latch, seconds: float | None = None) -> bool:
        raise TimeoutError("on purpose")

    for tracked in model.tracked_graphs:
        tracked.planner = planner
    assert model.steps(2, HEAD) == [5] * 2
    with monkeypatch.context() as now, pytest.raises(TimeoutError, match="on purpose"):
        now.setattr(Latch, "wait", interrupted)
        model.steps(1, HEAD)
    threading.Timer(0.1, whole.set).start()
    assert model.steps(2, HEAD) == [25] * 2


def test_a_step_of_other_sizes_does_not_wait() -> None:
    world = World()
    model = world.model(30)
    (tracked, *_), chains = model.tracked_graphs, model.tracked_graphs[0].chains
    sizes: dict[int, Sizes] = {8: (8,), 16: (16,)}
    tracked.sizes = SimpleNamespace(told_by=lambda args: sizes[args[0]], rounded_up=lambda found: found)  # type: ignore[assignment]
    tracked.may_follow = lambda: True
    chains.at(sizes[16])
    chains.await_plan(chains.at(sizes[8]))
    assert world.calls.plans.awaited(tracked, [16]) is None
    assert world.calls.plans.awaited(tracked, [8]) is chains.at(sizes[8]).awaited is not None
    # It leaves that to those of the first size.
    world.calls.plans.prepare(tracked, [16])
    assert chains.may_prepare
    # Nor one that may follow the plan for larger sizes.
    chains.at(sizes[16]).plan = ChainPlan((), ())
    assert world.calls.plans.awaited(tracked, [8]) is None


def test_a_chain_that_steps_wait_for_is_not_forgotten() -> None:
    found = Chains()
    found.await_plan(found.at((1,)))
    for n in range(2, 200):
        found.at((n,))
    chain = found.get((1,))
    assert chain is not None and chain.awaited is not None
    found._num_plans = 1 << 20  # no more are made
    assert found.at((1,)) is chain is found.get((1,))


def test_where_no_thread_can_start_the_next_step_may_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    world = planning_in_background()
    model = world.model(30)

    def no_thread(*args: Any, **more: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as now:
        now.setattr(background, "start_planning", no_thread)
        assert model.steps(3, HEAD) == [5] * 3
    assert not model.tracked_graphs[0].chains.is_planning
    model.steps(3, HEAD)
    for thread in threading.enumerate():
        if thread.name == "fxoffload-chain-plan":
            thread.join()
    assert model.steps(1, HEAD) == [25]


# -- the peak of a step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [None, "third call", "turn", "end"])
def test_what_the_first_call_is_given_for_the_step_alone_counts_once(gone: str | None) -> None:
    """Its plan keeps it, and another step has moved it; or it is gone later."""
    given = torch.ones(16)
    watch = PeakWatch(Memory(1064, 5000, 1, 1, 5000), [given], left_bytes=64 if gone is None else 0)

    def let_go(when: str) -> None:
        if gone == when:
            given.untyped_storage().resize_(0)

    watch.forward_begins()
    let_go("third call")
    watch.forward_begins()
    let_go("turn")
    watch.first_backward_begins(Memory(1064, 5000, 1, 1, 5000))
    let_go("end")
    assert watch.end(Memory(1100, 5000, 2, 1, 5100)).highest == 100


def test_what_is_there_again_in_the_backward_was_gone_when_that_began() -> None:
    """Parameters that are gathered again."""
    given = torch.ones(16)
    watch = PeakWatch(Memory(1064, 5000, 1, 1, 5000), [given])
    watch.forward_begins()
    given.untyped_storage().resize_(0)
    watch.first_backward_begins(Memory(1000, 5000, 1, 1, 5000))
    given.untyped_storage().resize_(64)
    assert watch.end(Memory(1100, 5000, 2, 1, 5100)).highest == 100


def test_the_batch_of_a_single_graph_is_the_callers() -> None:
    given = torch.ones(16)
    watch = PeakWatch(Memory(1064, 5000, 1, 1, 5000), [given])
    given.untyped_storage().resize_(0)
    watch.first_backward_begins(Memory(1064, 5000, 1, 1, 5000))
    assert watch.end(Memory(1100, 5000, 2, 1, 5100)).highest == 36


def test_bounds_of_a_peak() -> None:
    watch = PeakWatch(Memory(100, 1000, 1, 1, 5000), others_bytes=10)
    watch.first_backward_begins(Memory(130, 1000, 3, 1, 5040))
    found = watch.end(Memory(105, 1000, 4, 3, 5070))
    assert found == StepPeak(40, 80, 40, 70, 0, 100)
    assert found.most == 80 and not found.is_exact
    # One that allocated as much has no higher a peak, one that allocated less exceeds it by that.
    assert found.bounded_by(StepPeak(45, 45, 40, 70, 10, 100)) == 45
    assert found.bounded_by(StepPeak(45, 45, 40, 50, 10, 100)) == 65
    assert found.bounded_by(StepPeak(45, 45, 20, 70, 10, 100)) == 65
    assert found.bounded_by(StepPeak(45, 45, 40, 70, 10, 80)) == 65


def test_an_exact_peak() -> None:
    watch = PeakWatch(Memory(100, 1000, 1, 1, 5000))
    assert watch.end(Memory(100, 1200, 2, 2, 6100)) == StepPeak(1100, 1100, 0, 1100, 0, 100)


@pytest.mark.parametrize("total", [0, 5000])
def test_a_peak_that_was_reset(total: int) -> None:
    watch = PeakWatch(Memory(100, 1000, 1, 1, total))
    found = watch.end(Memory(120, 400, 2, 1, total and total + 50))
    assert found.most == (50 if total else None)


def test_records_that_never_tell_are_given_up() -> None:
    loop = BudgetLoop(50)
    wanted: list[bool] = []
    for _ in range(5):
        wanted.append(loop.records_next)
        assert loop.ended(StepPeak(10, 90, 10, 90), is_recorded=True) == 0
    assert wanted == [True, True, True, False, False]
    assert loop.ended(StepPeak(60, 90, 60, 90), is_recorded=False) == 10
