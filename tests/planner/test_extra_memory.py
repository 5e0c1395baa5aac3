"""Extra memory outside the graphs of a chain: how it is read, and how plans count it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxoffload
from fxoffload.compiler import chain_planning, plan_chain
from fxoffload.planner.chain import NO_EXTRA_MEMORY, Chain, ExtraMemory, concatenate, with_turn
from fxoffload.planner.extra_memory import (
    extra_memory_of_larger,
    extra_memory_of_segments,
    extra_memory_when_calls_begin,
)
from fxoffload.planner.link import ConstantRates
from fxoffload.planner.simulate import Simulation, simulate
from fxoffload.planner.steps import SegmentStep, StorageInfo, TrainingStep
from fxoffload.planner.windows import no_windows
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.profiler.allocator_trace import Block, Memory
from fxoffload.runtime.profiler.first_arguments import FirstArguments, OnOtherStreams
from fxoffload.step.call_order import CallOrder
from fxoffload.step.edges import CallAt, EdgeMemory, Moment
from fxoffload.step.readings import PHASES, Phase, Readings, Sample
from fxoffload.step.segment_names import TURN, entry_of
from tests.marks import examples
from tests.planner.chains import training_steps

CPU = torch.device("cpu")
_PHASES: dict[str, Phase] = {"f": "forward", "b": "backward"}
RATES = ConstantRates(50.0, 50.0)


def _turned(chain: Chain, decisions: Sequence[bool]) -> Simulation:
    """As plans are told of it: nothing is under way when a call begins."""
    step = with_turn(chain.step)
    return simulate(step, decisions, copies=RATES, windows=no_windows(step))


def _kept(step: TrainingStep) -> Simulation:
    return simulate(step, [False] * len(step.candidates), copies=RATES, windows=no_windows(step))


def _step() -> TrainingStep:
    """Two segments, of which the first makes the saved value."""
    return TrainingStep(
        (StorageInfo("h", 400, moved_bytes=400), StorageInfo("y", 50, is_output=True)),
        forward=(SegmentStep("a", ms=1.0, writes=("h",)), SegmentStep("b", ms=1.0, reads=("h",), writes=("y",))),
        backward=(SegmentStep("c", ms=1.0, reads=("h",), temp_bytes=30), SegmentStep("d", ms=1.0)),
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(training_steps(3), min_size=1, max_size=3), st.data())
def test_what_is_seen_when_calls_begin(steps: list[TrainingStep], data: st.DataObject) -> None:
    """What the graphs take there, and so much more: exactly that is found, and counts in every segment of the call."""
    chain = concatenate(steps)
    decisions = [data.draw(st.booleans()) for _ in chain.step.candidates]
    ran = simulate(chain.step, decisions, copies=RATES, windows=no_windows(chain.step))
    turned = _turned(chain, decisions)
    calls = tuple(tuple(data.draw(st.integers(0, 1 << 20)) for _ in steps) for _ in PHASES)
    extra_memory = ExtraMemory(calls)
    turn = len(chain.step.forward)
    seen = {}
    for k in range(len(steps)):
        seen["forward", k] = turned.boundaries[chain.forward[k]].after_bytes + calls[0][k]
        seen["backward", k] = turned.boundaries[turn + chain.backward[k]].after_bytes + calls[1][k]
    assert extra_memory_when_calls_begin(chain, turned, seen) == extra_memory
    larger = simulate(
        chain.with_extra_memory(extra_memory).step, decisions, copies=RATES, windows=no_windows(chain.step)
    )
    for before, now in zip(ran.boundaries, larger.boundaries, strict=True):
        assert now.live_bytes == before.live_bytes
        assert now.peak_bytes >= before.peak_bytes
    assert larger.peak_bytes <= ran.peak_bytes + max(map(max, calls))
    again = chain.with_extra_memory(extra_memory).with_extra_memory(NO_EXTRA_MEMORY).step
    assert (again.forward, again.backward) == (chain.step.forward, chain.step.backward)


def test_what_is_seen_between_calls_when_they_ran() -> None:
    """Above the bytes at the next one's beginning, extra memory included; an entry also has the tensors made there."""
    step = _step()
    made = (StorageInfo("x", 60, is_input=True), StorageInfo("t", 70, is_tangent=True))
    held = [EdgeMemory(((k, "x"),), Moment("forward", k)) for k in range(3)] + [
        EdgeMemory(((2, "y"),), Moment("forward", 2))
    ]
    chain = concatenate([replace(step, storages=(*step.storages, *made)) for _ in range(3)], held)
    ran = _turned(chain, [False] * len(chain.step.candidates))
    turn = len(chain.step.forward)
    live: dict[CallAt, int] = {
        ("forward", 0): 0,
        ("forward", 2): ran.boundaries[chain.forward[2]].after_bytes + 100,
        ("backward", 2): ran.boundaries[turn].after_bytes + 200,
        ("backward", 1): ran.boundaries[turn + chain.backward[1]].after_bytes + 1000,
    }
    gaps: dict[CallAt, int] = {
        ("forward", 1): 7,
        ("forward", 2): 0,
        ("backward", 2): 11,
        ("backward", 1): 13,
        ("backward", 0): 17,
    }
    found = extra_memory_when_calls_begin(chain, ran, live, gaps)
    behind, two_behind = entry_of("backward", 1), entry_of("backward", 0)
    entries = {entry_of("forward", 1): 7 + 60, entry_of("forward", 2): 100 + 60}
    assert dict(found.gaps) == {**entries, TURN: 211, behind: 1013 + 70, two_behind: 17 + 70}
    assert found.calls == ((0, 0, 100), (0, 1000, 200))
    assert extra_memory_when_calls_begin(chain, ran, {}, gaps) == NO_EXTRA_MEMORY


def test_what_is_seen_in_a_pipeline() -> None:
    """Bytes above the graphs' own when each call begins. An entry stands before each, so there is no turn."""
    order = CallOrder(tuple((_PHASES[p], int(k)) for p, k in ("f0", "f1", "b0", "f2", "b1", "b2")))
    chain = concatenate([_step()] * 3, [EdgeMemory(((k, "y"),), Moment("forward", k)) for k in range(3)], order)
    ran = _turned(chain, [False] * 3)
    assert TURN not in {b.segment for b in ran.boundaries}
    # h of those that wait; before f2, that of 1 is left
    own: dict[CallAt, int] = {("backward", 0): 800, ("forward", 1): 400, ("forward", 2): 400, ("backward", 2): 400}
    live = {at: nbytes + 100 + i for i, (at, nbytes) in enumerate(own.items())}
    gaps: dict[CallAt, int] = {("backward", 0): 11, ("forward", 2): 13}
    found = extra_memory_when_calls_begin(chain, ran, live, gaps)
    assert found.calls == ((0, 101, 102), (100, 0, 103))
    assert dict(found.gaps) == {entry_of("backward", 0): 111, entry_of("forward", 2): 115}
    more = chain.with_extra_memory(found)
    peaks = {b.segment: b.peak_bytes for b in _turned(more, [False] * 3).boundaries}
    before = {b.segment: b.peak_bytes for b in ran.boundaries}
    assert peaks[entry_of("backward", 0)] - before[entry_of("backward", 0)] == 111
    assert more.with_extra_memory(NO_EXTRA_MEMORY).step.backward == chain.step.backward


def test_less_than_the_graphs_take_is_nothing() -> None:
    """The allocator counts requests, a plan rounded sizes: the allocator may show less."""
    chain = concatenate([_step(), _step()])
    ran = _turned(chain, [False] * len(chain.step.candidates))
    assert extra_memory_when_calls_begin(chain, ran, {("forward", 1): 0}) == ExtraMemory(((0, 0), (0, 0)))
    assert extra_memory_when_calls_begin(chain, ran, {}) == NO_EXTRA_MEMORY


@pytest.mark.parametrize("moves", [False, True])
def test_what_the_last_call_saved_is_not_there_any_more_when_its_backward_begins(moves: bool) -> None:
    """Where it moves: its copy is done, and its reload comes later. So no byte on the device is taken for it."""
    chain = concatenate([_step()] * 2, [EdgeMemory(((1, "y"),), Moment("forward", 1))])
    ran = _turned(chain, [moves] * len(chain.step.candidates))
    there = 0 if moves else 2 * 400
    outputs = 50  # of the first call: the caller holds it
    found = extra_memory_when_calls_begin(chain, ran, {("backward", 1): there + outputs + 1000}, {("backward", 1): 30})
    assert found == ExtraMemory(((0, 0), (0, 1000)), ((TURN, 1030),))


def test_extra_memory_of_larger_calls() -> None:
    """Another size tells what grows with it; where none was seen, everything is taken to."""
    seen = ExtraMemory(((0, 100), (700, 90)), (("a", 1000), (TURN, 500)))
    other = ExtraMemory(((0, 60), (700, 110)), (("a", 800),))
    assert extra_memory_of_larger(50, (50, seen), (10, other)) is seen
    assert extra_memory_of_larger(40, (50, seen), (10, other)) is seen
    # By one for each of 40. Memory that is always there, or shrinks, stays as it was seen, and so does memory not seen
    # there.
    assert extra_memory_of_larger(60, (50, seen), (10, other)) == ExtraMemory(
        ((0, 110), (700, 90)), (("a", 1050), (TURN, 500))
    )
    # The same from a larger one: it had 20 more for 40 more.
    larger = ExtraMemory(((0, 120), (700, 90)), (("a", 1000), (TURN, 500)))
    assert extra_memory_of_larger(60, (50, seen), (90, larger)).calls == ((0, 105), (700, 90))
    alone = ExtraMemory(((0, 110), (770, 99)), (("a", 1100), (TURN, 550)))
    assert extra_memory_of_larger(55, (50, seen), None) == extra_memory_of_larger(55, (50, seen), (50, other)) == alone
    assert extra_memory_of_larger(55, (50, NO_EXTRA_MEMORY), (10, other)) == NO_EXTRA_MEMORY


def test_what_is_measured_before_segments_and_the_peak_between_calls() -> None:
    chain = concatenate([_step(), _step()])
    ran = _kept(chain.step)
    live = {(b.phase, b.segment): b.live_bytes for b in ran.boundaries}
    samples = {}
    for i, phase in enumerate(PHASES):
        names = [[s.name for s in segments] for segments in chain.segments_of_calls(phase)]
        found = Sample(1.0)
        found.live_before = {n: live[phase, n] + 100 * (k + 1) + 1000 * i for k, of in enumerate(names) for n in of}
        samples[phase] = [found]
    extra_memory = extra_memory_of_segments(chain, ran, Readings(samples))
    assert extra_memory == ExtraMemory(((100, 200), (1100, 1200)))
    known = _kept(chain.with_extra_memory(extra_memory).step).peak_bytes
    samples["backward"][0].peak = known + 77
    raised = extra_memory_of_segments(chain, ran, Readings(samples))
    assert raised == ExtraMemory(((177, 277), (1177, 1277)))


def test_what_is_gone_when_the_second_call_begins_belongs_to_the_step() -> None:
    """As FSDP2 does it: the storage of gathered parameters is emptied, the tensors stay."""
    stays, emptied, gone = torch.ones(8), torch.ones(16), torch.ones(32)
    lent = FirstArguments([stays, emptied, emptied[1:], gone, None, 3])
    assert lent.left_bytes() == 0
    emptied.untyped_storage().resize_(0)
    assert lent.left_bytes() == 64
    del gone
    assert lent.left_bytes() == 64 + 128
    assert stays.numel() == 8


def test_what_is_filled_again_was_gone_once() -> None:
    """As FSDP1 does it: the parameters of the first layer are gathered again for its backward."""
    given = torch.ones(16)
    first = FirstArguments([given])
    given.untyped_storage().resize_(0)
    assert first.left_bytes() == 64
    given.untyped_storage().resize_(64)
    assert first.left_bytes() == 64


GATHERS, REDUCES = 7, 8  # streams


def test_what_other_streams_have_no_longer_when_the_step_ends_belongs_to_the_step() -> None:
    """As FSDP2 does it: what the first layer was gathered into is kept until the next is; gradients are made."""
    given = torch.ones(8)
    blocks = [
        Block(0, 10, 999),
        Block(GATHERS, 20, 300),
        Block(GATHERS, 30, 40),
        Block(GATHERS, given.data_ptr(), given.nbytes),
        Block(REDUCES, 50, 5),
    ]
    watch = OnOtherStreams(lambda: blocks, 0, [given, None, 3])
    assert watch.gone_bytes() == 0
    given.untyped_storage().resize_(0)  # FSDP1 has it elsewhere meanwhile
    given.untyped_storage().resize_(1 << 22)
    blocks = [
        Block(GATHERS, 30, 40),
        Block(GATHERS, given.untyped_storage().data_ptr(), 1 << 22),
        Block(REDUCES, 50, 5),
        Block(REDUCES, 60, 10_000),
    ]
    assert watch.gone_bytes() == 300


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Layers(nn.Module):
    """Layers that are compiled each on its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


EXTRA = 1 << 20


@pytest.fixture
def allocator() -> Iterator[None]:
    """An allocator that has nothing but ``EXTRA`` bytes outside the graphs, from the second call of a step on."""
    reads = [0]

    def memory() -> Memory:
        step = engine_for(CPU).calls._step
        assert step is not None
        reads[0] += 1
        return Memory(0 if len(step.live_bytes) == 0 else EXTRA, EXTRA)

    torch.compiler.reset()
    with mock.patch.object(engine_for(CPU).calls, "_memory", memory):
        yield
    assert reads[0] == 2 * 16, "only the steps that are recorded are read"


@pytest.fixture
def gathering() -> Iterator[None]:
    """As much in all calls, on another stream: it is there before the first one begins, and gone after the last."""
    calls = engine_for(CPU).calls

    def memory() -> Memory:
        return Memory(EXTRA, EXTRA)

    def blocks() -> list[Block]:
        step = calls._step
        assert step is not None
        return [] if step.has_ended else [Block(GATHERS, 20, EXTRA)]

    torch.compiler.reset()
    with (
        mock.patch.object(calls, "_memory", memory),
        mock.patch.object(calls, "_others", lambda args: OnOtherStreams(blocks, 0, args)),
    ):
        yield


def plan_within(nbytes: int) -> fxoffload.Plan:
    before = {p.graph for p in fxoffload.plans()}
    model = Layers()
    options = {"inner": "aot_eager", "device_types": ("cpu",), "min_bytes": 1, "profile": "h200"}
    for layer in model.layers:
        layer.compile(backend="fxoffload", options={**options, "activation_budget": nbytes})
    for _ in range(4):
        model(torch.ones(64, 32)).backward()
    (plan,) = [p for p in fxoffload.plans() if p.graph not in before]
    return plan


@pytest.mark.slow
def test_a_budget_leaves_room_for_extra_memory(allocator: None) -> None:
    with pytest.warns(UserWarning, match="expected an activation_budget of at least"):
        plan = plan_within(EXTRA // 2)
    assert plan.predicted_peak_bytes > EXTRA // 2
    assert plan.baseline_peak_bytes > EXTRA


def test_a_budget_that_holds_both_moves_nothing(allocator: None) -> None:
    plan = plan_within(2 * EXTRA)
    assert EXTRA < plan.predicted_peak_bytes == plan.baseline_peak_bytes < 2 * EXTRA
    assert plan.predicted.bytes_offloaded == 0


@pytest.mark.parametrize("reads", [0, 1])
def test_a_plan_is_made_where_nobody_can_say_what_other_streams_have(allocator: None, reads: int) -> None:
    """From the beginning, or not when the step ends."""
    left: list[int] = []

    def blocks() -> list[Block]:
        if not left:
            raise RuntimeError("no snapshot")
        left.pop()
        return [Block(GATHERS, 20, EXTRA)]

    def others(args: Sequence[object]) -> OnOtherStreams:
        left[:] = range(reads)
        return OnOtherStreams(blocks, 0, args)

    with mock.patch.object(engine_for(CPU).calls, "_others", others):
        assert plan_within(2 * EXTRA).predicted.bytes_offloaded == 0


def test_what_was_gathered_before_the_first_call_is_in_the_budget_too(gathering: None) -> None:
    told: list[int] = []

    def follow(planning: chain_planning.ChainPlanning, *others: object) -> None:
        told.append(planning.others_bytes)

    with mock.patch.object(plan_chain, "replan_for_chain", follow):
        plan = plan_within(2 * EXTRA)
    assert told == [EXTRA], "what the steps that are measured are told"
    assert EXTRA < plan.predicted_peak_bytes == plan.baseline_peak_bytes < 2 * EXTRA
    assert plan.predicted.bytes_offloaded == 0
