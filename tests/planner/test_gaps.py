"""Memory allocated between two calls of a chain, as by FSDP's reduction of gradients: measured, and in the budget."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.compiler import plan_chain
from fxoffload.planner.chain import Chain, ExtraMemory, concatenate, with_turn
from fxoffload.planner.extra_memory import extra_memory_of_segments
from fxoffload.planner.link import ConstantRates
from fxoffload.planner.simulate import Simulation, simulate
from fxoffload.planner.steps import SegmentStep, StorageInfo, TrainingStep
from fxoffload.planner.windows import no_windows, windows_for
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.profiler.step_clock import StepClock
from fxoffload.runtime.profiler.stream_events import host_events
from fxoffload.step.call_order import CallOrder
from fxoffload.step.readings import Readings, Sample
from fxoffload.step.segment_names import TURN, entry_of
from tests.allocator import Allocator
from tests.planner import test_chain_planning
from tests.planner.rehearsal import Watch
from tests.planner.test_chain_planning import Run, alone, recorded
from tests.planner.test_chain_replan import Measured, the_plan
from tests.support import Stack, assert_equal

__all__ = ["alone"]  # the fixture

CPU = torch.device("cpu")
RATES = ConstantRates(50.0, 50.0)
LAYERS = 5


def _call(saved: int = 400) -> TrainingStep:
    return TrainingStep(
        (StorageInfo("h", saved, moved_bytes=saved), StorageInfo("y", 50, is_output=True)),
        forward=(SegmentStep("a", ms=1.0, writes=("h",)), SegmentStep("b", ms=1.0, reads=("h",), writes=("y",))),
        backward=(SegmentStep("a", ms=1.0, temp_bytes=30), SegmentStep("b", ms=1.0, reads=("h",))),
    )


def _chain(calls: int = 3) -> Chain:
    return concatenate([_call() for _ in range(calls)])


def _keep(chain: Chain) -> Simulation:
    step = chain.step
    return simulate(step, [False] * len(step.candidates), copies=RATES, windows=no_windows(step))


def _live(simulation: Simulation, phase: str, segment: str) -> int:
    (found,) = [b.live_bytes for b in simulation.boundaries if (b.phase, b.segment) == (phase, segment)]
    return found


def _readings(gaps: dict[str, int | None], high: int | None = None) -> Readings:
    forward, backward = Sample(1.0), Sample(1.0)
    backward.bounds = None if high is None else (0, high)
    return Readings({"forward": [forward], "backward": [backward]}, (gaps,))


# -- what becomes of it ------------------------------------------------------------------------------------------------


def test_the_peak_of_a_gap_is_what_was_measured() -> None:
    chain = _chain()
    kept = _keep(chain)
    name = entry_of("backward", 1)
    peak = kept.peak_bytes + 1000
    extra_memory = extra_memory_of_segments(chain, kept, _readings({name: peak}))
    assert dict(extra_memory.gaps)[name] == peak - _live(kept, "backward", name)
    found = _keep(chain.with_extra_memory(extra_memory))
    assert (found.peak_bytes, found.peak_segment, found.peak_phase) == (peak, name, "backward")
    assert found.live_bytes == kept.live_bytes
    back = chain.with_extra_memory(extra_memory).with_extra_memory(ExtraMemory()).step
    assert (back.forward, back.backward) == (chain.step.forward, chain.step.backward)


def test_gaps_that_are_hidden_are_like_the_others_of_their_phase() -> None:
    """But no more than the whole step may have had, and what lies at the turn is like nothing else."""
    chain = _chain(4)
    kept = _keep(chain)
    first, second, third = (entry_of("backward", k) for k in (2, 1, 0))
    live = {name: _live(kept, "backward", name) for name in (first, second, third)}
    measured: dict[str, int | None] = {first: live[first] + 500, second: None}
    gaps = dict(extra_memory_of_segments(chain, kept, _readings(measured, kept.peak_bytes + 9999)).gaps)
    assert gaps == {first: 500, second: 500, third: 500}
    high = live[second] + 120
    gaps = dict(extra_memory_of_segments(chain, kept, _readings(measured, high)).gaps)
    assert gaps == {first: 500, second: 120, third: min(500, high - live[third])}
    assert extra_memory_of_segments(chain, kept, _readings({TURN: 10**6})).gaps == (), "this step has no segment for it"
    down: dict[str, int | None] = {entry_of("forward", 1): _live(kept, "forward", entry_of("forward", 1)) + 70}
    gaps = dict(extra_memory_of_segments(chain, kept, _readings(down)).gaps)
    assert gaps == {entry_of("forward", k): 70 for k in range(1, 4)} | {entry_of("forward", 0): 70}


def test_a_peak_that_no_measured_gap_explains_may_be_anywhere() -> None:
    """Gaps that are only taken to be like others explain nothing."""
    chain = _chain()
    kept = _keep(chain)
    first = entry_of("backward", 1)
    readings = _readings({first: _live(kept, "backward", first) + 10}, kept.peak_bytes + 300)
    readings.samples["backward"][0].peak = kept.peak_bytes + 300
    assert extra_memory_of_segments(chain, kept, readings).calls == ((300,) * 3,) * 2
    assert (
        _keep(chain.with_extra_memory(extra_memory_of_segments(chain, kept, readings))).peak_bytes
        == kept.peak_bytes + 300
    )


def test_less_than_is_thought_is_nothing() -> None:
    chain = _chain()
    assert extra_memory_of_segments(chain, _keep(chain), _readings({entry_of("backward", 0): 0})).gaps == ()


def test_reloads_of_a_call_come_behind_the_gap_before_it() -> None:
    """While FSDP reduces gradients nothing of the next call is there; the last call asked for the reloads ahead."""
    chain = _chain()
    gaps = tuple((entry_of("backward", k), 10_000) for k in (1, 0))
    chain = chain.with_extra_memory(ExtraMemory(gaps=gaps))
    step, offload = chain.step, [True] * len(chain.step.candidates)
    least = simulate(step, offload, copies=RATES, windows=no_windows(step)).peak_bytes
    windows = windows_for(step, offload, least)
    assert windows is not None
    found = simulate(step, offload, copies=RATES, windows=windows)
    assert found.peak_bytes == least
    for k in (1, 0):
        at = chain.backward[k]
        assert windows.ahead[at - 1] == 0 and windows.ahead[at] > 0
        boundary = found.boundaries[len(step.forward) + at - 1]
        assert boundary.segment == entry_of("backward", k) and boundary.ahead_bytes == 0
        events = {e.name: e for e in found.events if e.track == "h2d"}
        assert events[f"call {k}/h"].begin_ms >= boundary.end_ms


# -- how it is measured ------------------------------------------------------------------------------------------------


class Counter:
    """An allocator's numbers."""

    def __init__(self) -> None:
        self.now, self.peak = 1000, 5000

    def read(self) -> Memory:
        return Memory(self.now, self.peak)

    def pass_by(self, nbytes: int) -> None:
        """Allocated and freed."""
        self.peak = max(self.peak, self.now + nbytes)


def _run(
    clock: StepClock,
    counter: Counter,
    between: list[int],
    *,
    compiles: list[int] | None = None,
    between_compiles: tuple[int, list[int]] | None = None,
) -> None:
    step = clock.begin_step()
    order: list[tuple[Any, int]] = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    for at, (phase, number) in enumerate(order):
        if step is not None:
            recorder = step.begin(phase, number)
            assert recorder is not None
            recorder.before("a")
            counter.now += 100
            counter.pass_by(0)
            recorder.after("a")
            if compiles is not None:
                compiles[0] += 1
            recorder.end()
        if at < 3:
            counter.pass_by(between[at])
        if between_compiles is not None and at == between_compiles[0]:
            between_compiles[1][0] += 1
    counter.now -= 400
    if step is not None:
        step.end()


def test_a_gap_is_seen_where_the_peak_rises_in_it() -> None:
    """In the first step, of which nothing else counts: something was compiled in it. Later the same peak hides it."""
    counter, epoch = Counter(), [0]
    clock = StepClock(2, skip=1, count=2, events=host_events(), memory=counter.read, epoch=lambda: epoch[0])
    _run(clock, counter, [10, 6000, 6500], compiles=epoch)
    assert not clock._counted
    _run(clock, counter, [10, 6000, 6500])
    _run(clock, counter, [10, 6000, 6500])
    assert clock.ready()
    found = clock.readings()
    # Above what there was when the step began.
    assert found.gap_peaks() == {TURN: 200 + 6000, entry_of("backward", 0): 300 + 6500}
    assert found.peak_bytes() is None
    assert found.peak_bounds_bytes() == (400, 300 + 6500)
    assert all(s.gap_peaks[TURN] is None for s in found.samples["backward"])


def test_a_gap_in_which_something_is_compiled_tells_nothing() -> None:
    """A loss of its own, say: what tunes its kernels comes once."""
    counter, epoch = Counter(), [0]
    clock = StepClock(2, skip=1, count=1, events=host_events(), memory=counter.read, epoch=lambda: epoch[0])
    _run(clock, counter, [10, 9000, 9500], between_compiles=(1, epoch))
    _run(clock, counter, [10, 10, 10])
    assert clock.ready()
    assert clock.readings().gap_peaks() == {entry_of("backward", 0): 300 + 9500}


def test_a_gap_in_a_step_that_counts() -> None:
    counter = Counter()
    clock = StepClock(2, skip=0, count=1, events=host_events(), memory=counter.read)
    _run(clock, counter, [7000, 10, 10])
    assert clock.ready() and clock.readings().gap_peaks() == {entry_of("forward", 1): 7100}


def test_what_was_gathered_for_the_step_counts_in_gaps() -> None:
    """As in everything else: above the bytes that are there whether the step runs or not."""
    counter = Counter()
    clock = StepClock(2, skip=0, count=1, events=host_events(), memory=counter.read)
    gathered = torch.ones(16)
    begin_step = clock.begin_step

    def begin() -> Any:
        step = begin_step()
        assert step is not None
        step.given(0, [gathered])
        gathered.untyped_storage().resize_(0)
        step.given(1, [])
        return step

    with mock.patch.object(clock, "begin_step", begin):
        _run(clock, counter, [7000, 10, 10])
    assert clock.ready() and clock.readings().gap_peaks() == {entry_of("forward", 1): 7100 + 64}


def test_steps_that_are_no_chain_tell_nothing_of_gaps() -> None:
    counter = Counter()
    clock = StepClock(2, skip=1, count=1, events=host_events(), memory=counter.read)
    step = clock.begin_step()
    assert step is not None and step.only_gaps
    recorder = step.begin("forward", 0)
    assert recorder is not None
    recorder.end()
    counter.pass_by(9000)
    assert step.begin("backward", 0) is None
    step.end()
    _run(clock, counter, [1, 1, 1])
    assert clock.ready() and clock.readings().skipped_gaps == ()


def test_without_an_allocator_skipped_steps_are_not_recorded() -> None:
    clock = StepClock(2, skip=1, count=1, events=host_events())
    assert clock.begin_step() is None


def test_a_gap_is_known_from_a_record_where_the_process_has_had_more() -> None:
    """The record is of the first step alone, and ends with its last backward."""
    allocator = Allocator()
    events = host_events()
    clock = StepClock(2, skip=1, count=1, events=events, memory=allocator.read, history=allocator.history)
    base = allocator.allocated
    step = clock.begin_step()
    assert step is not None and allocator.events is not None
    order: list[tuple[Any, int]] = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    for (phase, number), gap in zip(order, (512, 1024 * 512, 2048 * 512, 0), strict=True):
        recorder = step.begin(phase, number)
        assert recorder is not None and allocator.events is not None
        allocator.pass_by(10**6)  # in the call
        allocator.allocate(1024)
        recorder.end()
        allocator.pass_by(gap)
    assert allocator.events is None and allocator.stops == 1
    allocator.allocated -= 4 * 1024
    step.end()
    assert allocator.allocated == base
    second = clock.begin_step()
    assert second is not None and allocator.events is None, "once is enough"
    for phase, number in order:
        recorder = second.begin(phase, number)
        assert recorder is not None
        recorder.end()
    second.end()
    assert clock.ready()
    assert clock.readings().gap_peaks() == {
        entry_of("forward", 1): 1024 + 512,
        TURN: 2048 + 1024 * 512,
        entry_of("backward", 0): 3072 + 2048 * 512,
    }


def test_a_record_of_a_step_that_is_no_chain_ends_with_it() -> None:
    allocator = Allocator()
    clock = StepClock(2, skip=1, count=1, events=host_events(), memory=allocator.read, history=allocator.history)
    step = clock.begin_step()
    assert step is not None and allocator.events is not None
    assert step.begin("backward", 0) is None
    assert allocator.events is None and allocator.stops == 1
    step.end()
    assert allocator.stops == 1


# -- from the step to the plan -----------------------------------------------------------------------------------------


class Rehearsed(Measured):
    """As there, and the allocator is what the watch sees, with a peak of its own. After each layer's backward but the
    last, something is allocated and freed.

    Args:
        nbytes: of it.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(1e-3)
        self.nbytes = nbytes
        self.watch = Watch()
        self.peak = 0

    def model(self) -> Stack:
        def between(i: int, x: Tensor) -> Tensor:
            if i < LAYERS - 1:
                x.register_hook(self.pass_by)
            return x

        return Stack(LAYERS, between=between)

    def pass_by(self, gradient: Tensor) -> None:
        self.peak = max(self.peak, self.now_live() + self.nbytes)

    def peak_of(self, run: Run) -> int:
        """Most bytes in a step."""
        before, self.peak = self.peak, 0
        run.step()
        found, self.peak = self.peak, max(before, self.peak)
        return found

    def now_live(self) -> int:
        self.watch._drop_dead()
        return sum(nbytes for _, nbytes, name in self.watch.alive.values() if name not in self.watch.callers)

    def read(self) -> Memory:
        now = self.now_live()
        self.peak = max(self.peak, now)
        return Memory(now, self.peak)

    def _clock(self, num_calls: int, order: CallOrder | None) -> StepClock:
        self.events.append(host_events(self._time))
        self.clocks.append(StepClock(num_calls, order=order, skip=1, count=2, events=self.events[-1], memory=self.read))
        return self.clocks[-1]


@pytest.mark.slow
def test_a_budget_holds_what_is_allocated_between_calls() -> None:
    """The first plan does not know of it and exceeds its budget; the one made from measured steps keeps it, and says
    how much that takes. No bit of a gradient changes."""
    least, most = test_chain_planning.range_of_peaks("stack")
    test_chain_planning._PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    plain = recorded(lambda: Stack(LAYERS), policy="keep_all").steps(1)[0]
    budget = most  # all of it could be kept
    found = Rehearsed((most - least) * 2 // 3)
    with mock.patch.object(plan_chain, "replan_for_chain", found.follow):
        run = recorded(found.model, activation_budget=budget, disable=("tape_recompute",))
        found.watch = run.watch
        assert found.peak_of(run) > 1.2 * budget
        run.steps(2)
        assert the_plan().calibrated is None
        assert_equal(run.step(), plain)
        plan = the_plan()
        assert plan.calibrated is not None
        assert found.peak_of(run) == plan.calibrated.peak_bytes <= budget
    assert plan.predicted.bytes_offloaded == 0 < plan.calibrated.bytes_offloaded
    assert plan.calibrated.peak_bytes > 0.9 * budget


class Recorded(Rehearsed):
    """As there, but the process has had far more before: only a record of the allocator's events tells.

    Args:
        nbytes: that are allocated and freed.
        at_turn: whether this happens before the last layer's backward, and not before the others'.
        extra_memory: extra bytes from the second call of a step on.
    """

    def __init__(self, nbytes: int, *, at_turn: bool, extra_memory: int = 0) -> None:
        super().__init__(nbytes)
        self.at_turn = at_turn
        self.extra_memory = extra_memory
        self.is_beside = False
        self.levels: list[int] = []  # after each event
        self.begun = self.ended = 0
        self.is_open = False
        self.fails = False

    def model(self) -> Stack:
        def between(i: int, x: Tensor) -> Tensor:
            if self.fails and i == 2:
                raise RuntimeError("in the middle of a forward")
            self.is_beside = True
            if (i == LAYERS - 1) is self.at_turn:
                x.register_hook(self.pass_by)
            return x

        def begins(*_: object) -> None:
            self.is_beside = False

        model = Stack(LAYERS, between=between)
        model.register_forward_pre_hook(begins)
        return model

    def pass_by(self, gradient: Tensor) -> None:
        super().pass_by(gradient)
        self.levels.append(self.now_live() + self.nbytes)

    def now_live(self) -> int:
        return super().now_live() + self.extra_memory * self.is_beside

    def read(self) -> Memory:
        self.levels.append(super().read().allocated)
        return Memory(self.levels[-1], 1 << 50, len(self.levels))

    def history(self) -> Any:
        assert not self.is_open
        self.begun += 1
        self.is_open = True
        return self

    def end(self, *, read: bool = True) -> None:
        self.ended += read and self.is_open
        self.is_open = False

    def freed_bytes_after(self, *args: Any) -> int:
        return 0

    def carried_bytes(self, *args: Any) -> int:
        return 0

    def peak_between(self, first: Memory, last: Memory) -> int:
        return max(self.levels[first.num_allocations - 1 : last.num_allocations])


@pytest.mark.slow
@pytest.mark.parametrize("extra_memory", [0, 1], ids=["nothing else", "gathered parameters"])
@pytest.mark.parametrize("at_turn", [False, True])
def test_the_first_plan_knows_what_is_allocated_between_calls(at_turn: bool, extra_memory: int) -> None:
    """From the record of the step before it."""
    least, most = test_chain_planning.range_of_peaks("stack")
    test_chain_planning._PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    plain = recorded(lambda: Stack(LAYERS), policy="keep_all").steps(1)[0]
    # Permanent memory takes the same bytes from the budget as from the device.
    gathered = extra_memory * (most - least) // 3
    budget, calls = most + gathered, engine_for(CPU).calls
    found = Recorded((most - least) * 2 // 3, at_turn=at_turn, extra_memory=gathered)
    now = 0.0  # passes between two steps only
    with mock.patch.object(calls, "_events", host_events(lambda: now)):
        run = recorded(found.model, steps=1, activation_budget=budget, disable=("tape_recompute",))
        found.watch = run.watch
        now += 40.0  # an optimizer's first step
        with mock.patch.object(calls, "_memory", found.read), mock.patch.object(calls, "_history", found.history):
            run.step()
            now += 7.0
    with mock.patch.object(calls, "_memory", found.read), mock.patch.object(calls, "_history", found.history):
        assert (found.begun, found.ended) == (1, 1)
        peak = found.peak_of(run)
        plan = the_plan()
        assert_equal(run.step(), plain)
    assert (found.begun, found.ended) == (1, 1), "of the second step that is recorded, and no other"
    assert 0.9 * budget < peak <= plan.predicted.peak_bytes <= budget
    assert plan.predicted.bytes_offloaded > 0
    assert plan.baseline.peak_bytes > budget
    assert plan.between_steps_ms == 7.0 and plan.predicted.outside_ms == 0.0
    assert "from one backward to the next forward: 7.0 ms, the optimizer" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize("at_turn", [False, True])
def test_what_was_known_before_counts_where_measured_steps_do_not_tell(at_turn: bool) -> None:
    """As where the record is taken meanwhile."""
    least, most = test_chain_planning.range_of_peaks("stack")
    test_chain_planning._PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    found = Recorded((most - least) * 2 // 3, at_turn=at_turn)
    with recording(found), mock.patch.object(plan_chain, "replan_for_chain", found.follow):
        run = recorded(found.model, steps=1, activation_budget=most, disable=("tape_recompute",))
        found.watch = run.watch
        run.step()
        first = found.peak_of(run)
        run.steps(6)
        plan = the_plan()
        assert plan.calibrated is not None
        assert all(not clock.readings().gap_peaks() for clock in found.clocks)
        assert 0.9 * most < first <= most
        assert 0.9 * most < found.peak_of(run) <= plan.calibrated.peak_bytes <= most


@contextlib.contextmanager
def recording(found: Recorded) -> Iterator[None]:
    """The engine reads the allocator there."""
    calls = engine_for(CPU).calls
    with mock.patch.object(calls, "_memory", found.read), mock.patch.object(calls, "_history", found.history):
        yield


@pytest.mark.parametrize(("how", "next_ones"), [("hooks", (1, 2, 2)), ("fails", (2, 2, 2))])
def test_a_record_ends_with_a_step_that_is_no_chain(how: str, next_ones: Sequence[int]) -> None:
    """At once, or when the next one begins. After a step with a backward that was no chain, two are recorded anew."""
    test_chain_planning._PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    found = Recorded(1000, at_turn=True)
    with recording(found):
        run = recorded(found.model, steps=1, activation_budget="1GiB", disable=("tape_recompute",))
        assert found.begun == 0, "of the first step nothing is to be known"
        if how == "hooks":
            layers = run.model.layers
            assert isinstance(layers, nn.ModuleList)
            x = layers[0](run.x)
            assert found.is_open
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                x = layers[1](x)
            assert not found.is_open
            x.sum().backward()
        else:
            found.fails = True
            with pytest.raises(RuntimeError, match="in the middle"):
                run.step()
            assert found.is_open
            found.fails = False
        for begun in next_ones:
            run.step()
            assert (found.begun, found.is_open) == (begun, False)
    assert found.ended == 1 and the_plan().calibrated is None


@pytest.mark.slow
def test_without_a_budget_there_is_one_record_too() -> None:
    """A gain is stated for the step."""
    found = Recorded(1000, at_turn=True)
    with recording(found):
        recorded(found.model, steps=4, max_slowdown=0.5)
    assert found.begun == found.ended == 1


def test_without_a_segment_for_the_turn_the_first_backward_has_room_for_it() -> None:
    """As far as it does not take as much itself; whatever runs, and without a trace where it is taken away again."""
    chain = _chain()
    first = chain.step.backward[0]
    assert first.temp_bytes == 30
    for calls, turn, expected in (
        ((), 20, 30),
        ((), 100, 100),
        (((7,) * 3,) * 2, 20, 37),
        (((90,) * 3,) * 2, 100, 120),
    ):
        changed = chain.with_extra_memory(ExtraMemory(calls, ((TURN, turn),)))
        assert changed.step.backward[0].temp_bytes == expected
        assert (
            changed.with_extra_memory(ExtraMemory(calls, ((TURN, turn + 500),))).step.backward[0].temp_bytes
            == turn + 500
        )
        back = changed.with_extra_memory(ExtraMemory()).step
        assert (back.forward, back.backward) == (chain.step.forward, chain.step.backward)
    with_segment = chain.with_step(with_turn(chain.step)).with_extra_memory(ExtraMemory((), ((TURN, 100),))).step
    assert with_segment.backward == chain.step.backward
    assert with_segment.forward[-1].temp_bytes == 100
