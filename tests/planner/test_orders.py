"""Steps whose forwards begin after backwards: their bytes, windows and plans, on data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxoffload.planner import ConstantRates, SegmentStep, TrainingStep, simulate
from fxoffload.planner.chain import Chain, concatenate
from fxoffload.planner.formulate import problem_of
from fxoffload.planner.program import program_of
from fxoffload.planner.schedule import Scheduler
from fxoffload.planner.simulate import Boundary, Simulation
from fxoffload.planner.solve import least_time
from fxoffload.planner.solve_schedule import Loads
from fxoffload.planner.windows import least_peak_bytes, no_windows, windows_for
from fxoffload.runtime.tracker.step_memory import EdgeWatch
from fxoffload.step.call_order import CallOrder
from fxoffload.step.choice import Windows
from fxoffload.step.edges import CallAt, EdgeMemory, Moment, later
from fxoffload.step.segment_names import lies_between
from tests.planner.chains import training_steps
from tests.planner.test_chain import layer
from tests.planner.test_chain_search import rates
from tests.planner.test_windows import many

RATES = ConstantRates(50.0, 50.0)
WIDE = 1 << 50


def order_of(text: str) -> CallOrder:
    """From "FF0F12": F is the next forward, a digit the backward of that one."""
    calls: list[CallAt] = []
    for one in text:
        calls.append(("backward", int(one)) if one != "F" else ("forward", sum(p == "forward" for p, _ in calls)))
    return CallOrder(tuple(calls))


def microbatches(text: str) -> Chain:
    """Each goes through one layer. The caller holds their inputs to the end, and adds their weights' gradients up."""
    order = order_of(text)
    count = len(order.backwards)
    found = [EdgeMemory(((k, "x"),), None) for k in range(count)]
    found += [EdgeMemory(((k, "y"),), Moment("forward", k)) for k in range(count)]
    found += [EdgeMemory(((k, "dx"),), Moment("backward", k)) for k in range(count)]
    return concatenate([layer()] * count, found, order)


def calls_of(found: Simulation) -> list[Boundary]:
    return [b for b in found.boundaries if not lies_between(b.segment)]


def live(chain: Chain, *offloaded: str, windows: Windows | None = None) -> dict[str, int]:
    """Bytes before each call, in order; with nothing under way unless ``windows`` say so."""
    decisions = chain.step.decide(dict.fromkeys(offloaded, True))
    found = simulate(chain.step, decisions, copies=RATES, windows=windows or no_windows(chain.step))
    return {f"{b.phase[0]}{b.segment[5]}": b.live_bytes for b in calls_of(found)}


# -- orders ------------------------------------------------------------------------------------------------------------


def test_runs() -> None:
    order = order_of("FFF0F1F234")
    assert order.runs == (((0, 1, 2), (0,)), ((3,), (1,)), ((4,), (2, 3, 4)))
    assert order.backwards == (0, 1, 2, 3, 4)
    assert [order.following(k) for k in range(5)] == [(), (), (3, 4), (4,), ()]
    assert (order.at(3), order.at(9), order.at(10)) == (("backward", 0), ("backward", 4), None)


def test_the_usual_order_is_none() -> None:
    assert CallOrder.of(order_of("FFF210").calls) is None
    assert CallOrder.of(order_of("FF01").calls) == order_of("FF01")


@pytest.mark.parametrize("calls", ["", "F", "0F", "FF0", "FF00", "F0F0"])
def test_what_is_no_order(calls: str) -> None:
    with pytest.raises(ValueError, match="expected each forward"):
        order_of(calls)


def test_moments_follow_the_order() -> None:
    a, b = Moment("forward", 2), Moment("backward", 0)
    assert (later(a, b), later(a, b, order_of("FF0F12").positions)) == (b, a)
    assert a.is_before(b) and b.is_before(a, order_of("FF0F12").positions)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_each_storage_lives_from_its_forward_to_its_backward() -> None:
    """h is 30, y, dy and dx 10 each, dw 1."""
    #  b0: h h and dy; f2: h of 1, dw of 0; b1: h h, dy, dw; b2: h, dy, 2 dw
    assert live(microbatches("FF0F12")) == {"f0": 0, "f1": 30, "b0": 70, "f2": 31, "b1": 71, "b2": 42}
    assert live(microbatches("FF01")) == {"f0": 0, "f1": 30, "b0": 70, "b1": 41}


def test_what_was_offloaded_is_back_for_its_own_backward_alone() -> None:
    both = live(microbatches("FF0F12"), "call 0/h", "call 1/h")
    assert both == {"f0": 0, "f1": 0, "b0": 40, "f2": 1, "b1": 71, "b2": 42}
    youngest = live(microbatches("FF0F12"), "call 2/h")
    assert youngest == {"f0": 0, "f1": 30, "b0": 70, "f2": 31, "b1": 41, "b2": 42}


def test_a_run_of_backwards_takes_back_its_own_values_and_reloads_no_others() -> None:
    chain = microbatches("FF0F12")
    step = chain.step
    wide = Windows((WIDE,) * (len(step.forward) + 1), (WIDE,) * (len(step.backward) + 1))
    names = [f"call {k}/h" for k in range(3)]
    found = simulate(step, step.decide(dict.fromkeys(names, True)), copies=RATES, windows=wide)
    # 0 is taken back, 1 is dropped after the first segment of 0's backward, and reloaded. 2 is taken back.
    assert (found.bytes_offloaded, found.bytes_reclaimed, found.bytes_reloaded) == (90, 60, 30)
    assert [b.in_flight_bytes for b in calls_of(found)] == [0, 30, 30, 0, 0, 0]
    assert live(chain, *names, windows=wide) == {"f0": 0, "f1": 30, "b0": 70, "f2": 1, "b1": 71, "b2": 42}


def test_a_value_that_a_later_forward_reads_stays() -> None:
    """The output of the first call is the saved input of another, whose backward comes before the last forward."""
    order = order_of("FF1F20")
    members = ((0, "y"), (1, "x"), (2, "x"))
    assert concatenate([layer()] * 3, [EdgeMemory(members, None)], order).candidates[1] == (None, "call 1/h")
    until_later = [EdgeMemory(((1, "x"),), Moment("forward", 2))]
    assert concatenate([layer()] * 3, until_later, order).candidates[1] == (None, "call 1/h")
    until_before = [EdgeMemory(((1, "x"),), Moment("forward", 1))]
    assert concatenate([layer()] * 3, until_before, order).candidates[1] == ("call 1/x", "call 1/h")


def test_an_output_that_is_saved_stays_for_a_later_forward() -> None:
    """The backward that saved it comes before the forward that reads it."""
    plain = layer()
    storages = {s.name: s for s in plain.storages}
    saves = replace(
        plain,
        storages=tuple({**storages, "y": replace(storages["y"], moved_bytes=10)}.values()),
        backward=(replace(plain.backward[0], reads=("dy", "x", "h", "y")),),
    )
    reads = replace(
        plain,
        storages=tuple({**storages, "x": replace(storages["x"], moved_bytes=None)}.values()),
        backward=(replace(plain.backward[0], reads=("dy", "h")),),
    )
    passed = [EdgeMemory(((0, "y"), (2, "x")), Moment("forward", 2))]
    for text, name in (("FF0F12", None), ("FFF210", "call 0/y")):
        assert concatenate([saves, plain, reads], passed, order_of(text)).candidates[0][-1] == name


def test_an_input_that_cannot_be_watched_is_not_taken_back() -> None:
    for watched in (True, False):
        held = [EdgeMemory(((k, "x"),), Moment("forward", k), watched=watched) for k in range(2)]
        step = concatenate([layer()] * 2, held).step
        found = simulate(step, step.decide({"call 1/x": True}), copies=RATES, windows=_wide(step))
        assert (found.bytes_reclaimed, found.bytes_reloaded) == ((10, 0) if watched else (0, 10))


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        (((2, 2), (4, 3)), "runs of all segments"),
        (((4, 4), (2, 2), (0, 0)), "an empty one"),
        (((4, 3), (2, 3)), "one that does not"),
    ],
)
def test_runs_that_contradict_the_step(runs: tuple[tuple[int, int], ...], found: str) -> None:
    step = microbatches("FF0F12").step
    assert step.runs == ((4, 2), (2, 4))
    with pytest.raises(ValueError, match=found):
        program_of(replace(step, runs=runs))


def test_what_is_read_before_it_is_written_in_this_order() -> None:
    step = microbatches("FF0F12").step
    early = replace(step.backward[1], reads=(*step.backward[1].reads, "call 2/h"))
    with pytest.raises(ValueError, match="written before, found call 2/h in backward segment call 0/b"):
        program_of(replace(step, backward=(step.backward[0], early, *step.backward[2:])))


# -- any chain ---------------------------------------------------------------------------------------------------------


@st.composite
def orders(draw: st.DrawFn, count: int) -> CallOrder:
    """Any order of ``count`` calls."""
    calls: list[CallAt] = []
    waiting: list[int] = []
    begun = 0
    while begun < count or waiting:
        if begun < count and (not waiting or draw(st.booleans())):
            calls.append(("forward", begun))
            waiting.append(begun)
            begun += 1
        else:
            calls.append(("backward", waiting.pop(draw(st.integers(0, len(waiting) - 1)))))
    return CallOrder(tuple(calls))


@st.composite
def decided_chains(draw: st.DrawFn) -> tuple[list[TrainingStep], CallOrder, list[bool]]:
    steps = draw(st.lists(training_steps(3), min_size=1, max_size=4))
    count = len(concatenate(steps).step.candidates)
    return steps, draw(orders(len(steps))), draw(st.lists(st.booleans(), min_size=count, max_size=count))


def _wide(step: TrainingStep) -> Windows:
    return Windows((WIDE,) * (len(step.forward) + 1), (WIDE,) * (len(step.backward) + 1))


@many
@given(decided_chains(), st.floats(0, 1.2))
def test_windows_stay_within_the_limit(found: tuple[list[TrainingStep], CallOrder, list[bool]], share: float) -> None:
    steps, order, decisions = found
    step = concatenate(steps, (), order).step
    least = least_peak_bytes(step, decisions)
    limit = round(least + share * simulate(step, decisions, copies=RATES, windows=_wide(step)).peak_bytes)
    assert windows_for(step, decisions, least - 1) is None
    windows = windows_for(step, decisions, limit)
    assert windows is not None
    ran = simulate(step, decisions, copies=RATES, windows=windows)
    assert ran.peak_bytes <= limit
    assert len(ran.boundaries) == len(step.forward) + len(step.backward)
    moved = sum(c.moved_bytes or 0 for c, go in zip(step.candidates, decisions, strict=True) if go)
    assert ran.bytes_offloaded <= moved
    # Nothing is left of what moved, and no reload waits while forwards run.
    at = program_of(step).forward_at
    assert all(ran.boundaries[i].ahead_bytes == 0 for i in at)
    kept = simulate(step, [False] * len(decisions), copies=RATES, windows=no_windows(step))
    assert ran.boundaries[-1].after_bytes == kept.boundaries[-1].after_bytes


@pytest.mark.parametrize("text", ["FF0F12", "FFF0F1F234"])
def test_before_the_first_backward_as_much_may_be_ahead_as_at_its_entry(text: str) -> None:
    chain = microbatches(text)
    decisions = chain.step.decide({name: True for names in chain.candidates for name in names if name})
    windows = windows_for(chain.step, decisions, least_peak_bytes(chain.step, decisions) + 10)
    assert windows is not None
    assert windows.ahead[0] == windows.ahead[1] > windows.ahead[3]


@many
@given(decided_chains())
def test_the_usual_order_has_the_same_bytes_when_it_is_spelled_out(
    found: tuple[list[TrainingStep], CallOrder, list[bool]],
) -> None:
    steps, _, decisions = found
    count = len(steps)
    spelled = CallOrder((*(("forward", k) for k in range(count)), *(("backward", k) for k in reversed(range(count)))))
    usual, other = concatenate(steps).step, concatenate(steps, (), spelled).step
    for windows in (no_windows, _wide):
        a, b = (simulate(s, decisions, copies=RATES, windows=windows(s)) for s in (usual, other))
        assert [(x.segment, x.live_bytes, x.peak_bytes) for x in calls_of(a)] == [
            (x.segment, x.live_bytes, x.peak_bytes) for x in calls_of(b)
        ]
        assert (a.bytes_reclaimed, a.bytes_reloaded) == (b.bytes_reclaimed, b.bytes_reloaded)


# -- the solver --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["FF0F1F23", "FFF0F1F234", "FF01", "FFF1F032"])
def test_the_solver_counts_what_is_in_flight(text: str) -> None:
    """Of four microbatches, two wait at a time: a budget for all of them would be twice as much."""
    step = microbatches(text).step
    problem = problem_of(step, rates())
    kept = simulate(step, [False] * len(step.candidates), copies=RATES, windows=no_windows(step))
    assert Loads(problem, [0], ()).least_bytes() == kept.peak_bytes
    found = least_time(problem, kept.peak_bytes)
    assert found is not None and not found.offloaded
    found = least_time(problem, kept.peak_bytes - 1)
    assert found is not None and found.offloaded


def _one_by_one(step: TrainingStep, limit: int) -> Sequence[int]:
    """The fewest bytes that have to move: all decisions tried."""
    names = [i for i, c in enumerate(step.candidates) if c.nbytes and not c.is_input]
    found = []
    for number in range(1 << len(names)):
        moves = {names[j] for j in range(len(names)) if number >> j & 1}
        decisions = [i in moves for i in range(len(step.candidates))]
        if least_peak_bytes(step, decisions) <= limit:
            found.append(sum(step.candidates[i].nbytes for i in moves))
    return sorted(found)


@pytest.mark.parametrize("text", ["FF0F1F23", "FFF0F1F234", "FFF1F032"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_plans_move_no_more_than_they_must(text: str, share: float) -> None:
    chain = microbatches(text)
    step = replace(chain.step, forward=_slow(chain.step.forward), backward=_slow(chain.step.backward))
    scheduler = Scheduler(step, rates())
    least, most = scheduler.smallest().simulation.peak_bytes, scheduler.keep_all().peak_bytes
    assert least < most
    limit = int(least + share * (most - least))
    plan = scheduler.least_time(limit)
    assert plan is not None
    assert plan.simulation.peak_bytes <= limit
    assert plan.simulation.bytes_offloaded == _one_by_one(step, limit)[0]


def _slow(segments: Sequence[SegmentStep]) -> tuple[SegmentStep, ...]:
    """All copies hide: to move less is all that counts."""
    return tuple(replace(s, ms=0.0 if lies_between(s.name) else 1e3) for s in segments)


def test_of_the_inputs_of_a_forward_those_that_autograd_made_can_be_watched() -> None:
    leaf = torch.ones(4)
    made = torch.ones(4, requires_grad=True) * 2
    watch = EdgeWatch()
    assert watch.watch("forward", 0, ["leaf", "made"], [leaf, made], is_input=True)
    assert watch.watch("forward", 0, ["output"], [torch.ones(4)])
    assert [(item.members[0][1], item.watched) for item in watch.edge_memory()] == [
        ("leaf", False),
        ("made", True),
        ("output", True),
    ]
