"""Extra memory outside the graphs is measured at each size, where it can be read and a budget asks for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload.compiler import chain_planning
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.host_memory import arena as host_arena
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.tracker import chains
from fxoffload.runtime.tracker.step_memory import LiveBytes
from tests.planner import test_chain_planning
from tests.planner.rehearsal import CPU
from tests.planner.test_chain_planning import Run, new_plans
from tests.planner.test_chain_sizes import LONG, MIDDLE, SHORT, Plain, at, moved_at, planned_lengths, varying
from tests.support import Stack, batch

alone = test_chain_planning.alone

DEPTH = 6
# What eager code takes for each row of a batch.
EACH = 1 << 14
# Bytes that are there whether steps run or not.
ALWAYS = 1 << 30
# Of the grid, the next below ``LONG``.
BELOW = 44

_READ = LiveBytes.read


def model() -> nn.Module:
    return Stack(DEPTH)


class Allocator:
    """Has bytes in proportion to the length of the batch, from the second call of a step on, above ``ALWAYS``."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.read: list[int] = []  # lengths of the batches, when a call begins

    def __call__(self) -> Memory:
        step = engine_for(CPU).calls._step
        assert step is not None and self.run is not None
        nbytes = ALWAYS + (EACH * self.run.x.shape[1] if len(step.live_bytes) else 0)
        return Memory(nbytes, nbytes)

    def begins(self, live: LiveBytes, *args: Any) -> None:
        """A call does, and is read."""
        assert self.run is not None
        self.read.append(self.run.x.shape[1])
        _READ(live, *args)

    def measured(self, run: Run, lengths: Sequence[int]) -> list[int]:
        """Those of these steps in which every call was read."""
        found = []
        for length in lengths:
            before = len(self.read)
            at(run, length).step()
            now = self.read[before:]
            assert len(now) in (0, 2 * DEPTH)
            found += now[:1]
        return found


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    found = Allocator()
    read = mock.patch.object(LiveBytes, "read", lambda live, *args: found.begins(live, *args))
    with mock.patch.object(engine_for(CPU).calls, "_memory", found), read:
        yield found


def watched(allocator: Allocator, **changes: Any) -> Run:
    allocator.run = varying(model, **changes)
    return allocator.run


@pytest.fixture(scope="module")
def peaks() -> tuple[int, int]:
    """The least of the long batch's graphs, and that of keeping everything for the middle one."""
    torch.compiler.reset()
    before = fxoffload.plans()  # some of them may go meanwhile
    run = varying(model, activation_budget=1)
    with pytest.warns(UserWarning, match="expected an activation_budget"):
        for length in (LONG, LONG, LONG, MIDDLE):
            at(run, length).step()
    long, middle = (p for p in fxoffload.plans() if not any(p is known for known in before))
    return long.predicted_peak_bytes, middle.baseline_peak_bytes


@pytest.fixture
def budget(peaks: tuple[int, int]) -> int:
    """The long batch has to offload for it. The middle one fits, but not with the extra memory of a long one."""
    least, middle = peaks
    assert least < middle
    return EACH * LONG + (least + middle) // 2


def in_background() -> mock._patch[bool]:
    """Plans are made as on a GPU."""
    return mock.patch.object(engine_for(CPU).calls.plans, "in_background", True)


def wait_for_plans() -> None:
    for thread in threading.enumerate():
        if thread.name == "fxoffload-chain-plan":
            thread.join()


@pytest.mark.slow
def test_a_short_batch_that_fits_moves_nothing(allocator: Allocator, budget: int) -> None:
    """The first step of a size offloads as first steps do, the next one follows a plan of its own."""
    run, plain = watched(allocator, activation_budget=budget), Plain(varying(model, policy="keep_all"))
    everything, _, long, middle, *moved = moved_at(run, plain, (LONG, LONG, LONG, MIDDLE, MIDDLE, LONG, SHORT, SHORT))
    assert 0 < long < everything
    assert middle == everything * MIDDLE // LONG
    assert moved == [0, long, everything * SHORT // LONG, 0]
    assert allocator.read == [n for n in (LONG, LONG, MIDDLE, SHORT) for _ in range(2 * DEPTH)]
    assert planned_lengths() == ["2, 48", "2, 32", "2, 15"]
    assert all(p.predicted_peak_bytes <= budget for p in new_plans())
    # What lies between two sizes of the grid is of the larger one.
    assert moved_at(run, plain, (31, 45, 13, 13)) == [0, long * 45 // LONG, everything * 13 // LONG, 0]


@pytest.mark.slow
def test_until_its_plan_is_there_a_size_follows_a_larger_one(allocator: Allocator, budget: int) -> None:
    run, plain = watched(allocator, activation_budget=budget), Plain(varying(model, policy="keep_all"))
    moved = []
    with in_background():
        for length in (LONG, LONG, LONG, LONG, MIDDLE, MIDDLE, MIDDLE, LONG, MIDDLE):
            moved += moved_at(run, plain, (length,))
            wait_for_plans()
    everything, long = moved[1:3]  # the third step waits for the plan
    assert 0 < long < everything
    assert moved[4:] == [everything * MIDDLE // LONG, long * MIDDLE // LONG, 0, long, 0]
    assert planned_lengths() == ["2, 48", "2, 32"]


@pytest.mark.slow
def test_training_begins_with_plans_of_all_lengths_that_were_profiled(allocator: Allocator, budget: int) -> None:
    run, plain = watched(allocator, activation_budget=budget), Plain(varying(model, policy="keep_all"))
    with in_background():
        found = [len(fxoffload.profile_step(at(run, length).step)) for length in (LONG, MIDDLE, MIDDLE)]
        middle, long = moved_at(run, plain, (MIDDLE, LONG))
    assert found == [1, 1, 0]
    assert middle == 0 < long
    assert allocator.read == [n for n in (LONG, LONG, MIDDLE) for _ in range(2 * DEPTH)]


@pytest.mark.slow
def test_sizes_that_were_recorded_are_not_measured_again(allocator: Allocator) -> None:
    """But for the longer one, if it came first: something may have been compiled in it."""
    with pytest.warns(UserWarning, match="expected an activation_budget"):
        run = watched(allocator, activation_budget=1)
        assert allocator.measured(run, (LONG, SHORT, SHORT, LONG, LONG, SHORT, 64, 64)) == [LONG, SHORT, LONG, 64]
    assert planned_lengths() == ["2, 15", "2, 48", "2, 64"]
    extra_memory = [chain.extra_memory for chain in test_chain_planning.CHAINS]
    # The last forward began with what those before it had saved offloaded: only its own input was there.
    assert [b.calls[0][-1] for b in extra_memory] == [EACH * n - 2 * n * 16 * 4 for n in (SHORT, LONG, 64)]


@pytest.mark.slow
def test_a_plan_for_more_than_was_measured_leaves_room_for_what_grows(allocator: Allocator) -> None:
    """Lengths that are between two of the grid: the allocator has as much as at the length that is planned for."""
    with pytest.warns(UserWarning, match="expected an activation_budget"):
        run = watched(allocator, activation_budget=1)
        assert allocator.measured(run, (45, 45, 41, 41, 13, 13)) == [45, 45, 41, 13]
    assert planned_lengths() == ["2, 48", "2, 44", "2, 13"]
    own = EACH - 2 * 16 * 4  # for each row, but for what the graphs have of it
    found = [chain.extra_memory.calls[0][-1] for chain in test_chain_planning.CHAINS]
    # Nothing else was known of the first one. Of it all grows here, so the next ones are exact.
    assert found == [own * 48, own * 44, own * 13]


@pytest.fixture(scope="module")
def below(peaks: tuple[int, int]) -> int:
    """What ``BELOW`` takes when it keeps everything."""
    return (peaks[1] + EACH * MIDDLE) * BELOW // MIDDLE


@pytest.mark.slow
@pytest.mark.parametrize(("share", "moves"), [(1.01, False), (0.99, True)], ids=["it fits", "it does not"])
def test_what_moves_below_the_longest_leaves_some_of_the_budget(
    allocator: Allocator, below: int, share: float, moves: bool
) -> None:
    budget = int(share * below)
    run, plain = watched(allocator, activation_budget=budget), Plain(varying(model, policy="keep_all"))
    everything, _, long, _, moved = moved_at(run, plain, (LONG, LONG, LONG, BELOW, BELOW))
    assert long > 0
    assert moved < everything * BELOW // LONG and (moved > 0) == moves
    long_plan, plan = new_plans()
    assert (plan.predicted_peak_bytes <= budget * 15 // 16) == moves
    assert budget * 15 // 16 < long_plan.predicted_peak_bytes <= budget
    assert ["a sixteenth of it left" in p.summary for p in (long_plan, plan)] == [False, moves]


@pytest.mark.slow
def test_the_longest_until_now_takes_the_whole_budget(allocator: Allocator, below: int) -> None:
    """Its plan stays when a longer one comes."""
    run, plain = watched(allocator, activation_budget=int(0.99 * below)), Plain(varying(model, policy="keep_all"))
    *_, alone, _, longer, again = moved_at(run, plain, (BELOW, BELOW, BELOW, LONG, LONG, BELOW))
    assert 0 < alone == again < longer
    assert new_plans()[0].predicted_peak_bytes > 0.99 * below * 15 / 16


@pytest.mark.slow
def test_what_fits_only_into_the_whole_budget_takes_it(allocator: Allocator, budget: int) -> None:
    with mock.patch.object(chain_planning, "_SPARE", 0.9):
        run, plain = watched(allocator, activation_budget=budget), Plain(varying(model, policy="keep_all"))
        *_, long, _, below = moved_at(run, plain, (LONG, LONG, LONG, BELOW, BELOW))
    assert below > 0 < long
    assert all(p.predicted_peak_bytes <= budget for p in new_plans())
    assert not any("left" in p.summary or "no plan fits" in p.summary for p in new_plans())


@pytest.mark.slow
@pytest.mark.parametrize("without", ["budget", "memory"])
def test_where_nothing_is_to_be_known_no_step_is_lost(allocator: Allocator, without: str) -> None:
    changes: dict[str, Any] = {} if without == "budget" else {"activation_budget": "1GiB"}
    memory = None if without == "memory" else allocator
    with mock.patch.object(engine_for(CPU).calls, "_memory", memory):
        run = watched(allocator, **changes)
        assert allocator.measured(run, (LONG, LONG, LONG, SHORT)) == ([] if memory is None else [LONG, LONG])
    assert planned_lengths() == ["2, 48", "2, 15"]


@pytest.mark.parametrize(("first", "expected"), [(LONG, {}), (SHORT, {("backward", 0): 400})])
def test_what_the_first_of_two_steps_had_between_its_calls_does_not_count(first: int, expected: object) -> None:
    """Where it was the longer one, all else does: but something may have been tuned there."""

    def record(length: int) -> chains.Record:
        live = LiveBytes()
        live.read(("forward", 0), [], Memory(length, length))
        live.call_ended(Memory(length, length))
        live.read(("backward", 0), [], Memory(length + 100, length + 500))
        live.end()
        return chains.Record((), (), live, ((length,),))

    seen = record(first).merged(record(MIDDLE))
    assert seen is not None and seen.sizes == ((max(first, MIDDLE),),)
    assert seen.live_bytes == {("forward", 0): 0, ("backward", 0): 100}
    assert seen.gap_bytes == expected


def hooked(run: Run, length: int) -> None:
    """A step in which other code takes the saved values of the last layers."""
    at(run, length)
    layers = run.model.layers
    assert isinstance(layers, nn.ModuleList)
    x = run.x
    for layer in layers[:3]:
        x = layer(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        for layer in layers[3:]:
            x = layer(x)
    x.square().mean().backward()


@pytest.mark.slow
def test_a_size_whose_steps_are_irregular_is_measured_a_few_times(allocator: Allocator) -> None:
    run = watched(allocator, activation_budget="1GiB")
    allocator.measured(run, (LONG, LONG, LONG))
    reads = []
    for _ in range(5):
        before = len(allocator.read)
        hooked(run, SHORT)
        reads.append(len(allocator.read) - before)
    assert reads == [3] * chains._MOST_MEASURED + [0, 0]
    assert planned_lengths() == ["2, 48", "2, 15"]
    assert (
        test_chain_planning.CHAINS[1].extra_memory == test_chain_planning.CHAINS[0].extra_memory
    )  # as known of the long one


@pytest.mark.slow
def test_a_step_that_is_irregular_is_followed_by_one_that_is_measured(allocator: Allocator, budget: int) -> None:
    run = watched(allocator, activation_budget=budget)
    allocator.measured(run, (LONG, LONG, LONG))
    hooked(run, MIDDLE)
    assert planned_lengths() == ["2, 48"]
    assert allocator.measured(run, (MIDDLE, MIDDLE)) == [MIDDLE]
    assert moved_at(run, Plain(varying(model, policy="keep_all")), (MIDDLE,)) == [0]


@pytest.mark.slow
def test_while_the_policy_is_overridden_nothing_is_measured(allocator: Allocator, budget: int) -> None:
    run = watched(allocator, activation_budget=budget)
    allocator.measured(run, (LONG, LONG, LONG))
    with fxoffload.override_policy("keep_all"):
        assert allocator.measured(run, (MIDDLE,) * 5) == []
    assert allocator.measured(run, (MIDDLE, MIDDLE)) == [MIDDLE]


@pytest.mark.slow
@pytest.mark.parametrize(("most", "value"), [("_MOST_MEASURED_IN_ALL", 2), ("_MOST_PLANS_IN_ALL", 3)])
def test_so_many_sizes_are_measured_in_all(allocator: Allocator, most: str, value: int) -> None:
    """And none again, whether its plan is remembered or not."""
    with mock.patch.object(chains, most, value), mock.patch.object(chains, "_MOST_SIZES", 2):
        run = watched(allocator, activation_budget="1GiB")
        lengths = (LONG, LONG, 40, SHORT, 40, MIDDLE, MIDDLE, 9, SHORT, 64, 40, LONG, 9, MIDDLE)
        assert allocator.measured(run, lengths) == [LONG, LONG, 40, SHORT]


@pytest.mark.slow
def test_steps_that_are_measured_take_no_more_of_the_host_than_the_longest(
    allocator: Allocator, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_for(CPU).release_host_memory()
    monkeypatch.setattr(host_arena, "_PAGE", 1 << 12)
    run = watched(allocator, activation_budget=budget)
    allocator.measured(run, (LONG, LONG, LONG))
    before = fxoffload.stats()
    lengths = (47, 30, 33, SHORT, 43, 9, 39, 21, LONG, 12)
    assert len(allocator.measured(run, lengths)) == 8
    after = fxoffload.stats()
    assert after.host_bytes_reserved == before.host_bytes_reserved > 0
    assert after.num_host_growths == before.num_host_growths
    assert after.bytes_offloaded > before.bytes_offloaded


@pytest.mark.slow
def test_a_plan_that_was_forgotten_is_made_again_without_a_measured_step(allocator: Allocator, budget: int) -> None:
    run = watched(allocator, activation_budget=budget)
    with mock.patch.object(chains, "_MOST_SIZES", 2):
        lengths = (LONG, LONG, MIDDLE, MIDDLE, SHORT, SHORT, MIDDLE)
        assert allocator.measured(run, lengths) == [LONG, LONG, MIDDLE, SHORT]
    extra_memory = [chain.extra_memory for chain in test_chain_planning.CHAINS]
    assert len(extra_memory) == 4
    assert extra_memory[1] == extra_memory[3] != extra_memory[2]


@pytest.mark.slow
def test_steps_that_go_another_way_are_recorded_again(allocator: Allocator) -> None:
    """Though no plan was there to miss."""
    run = watched(allocator, activation_budget="1GiB")
    allocator.measured(run, (LONG, LONG, LONG))
    whole = run.model.layers
    assert isinstance(whole, nn.ModuleList)
    steps = [SHORT, SHORT, SHORT, SHORT, MIDDLE, MIDDLE]
    run.model.layers = whole[:-1]
    reads = []
    for length in steps:
        before = len(allocator.read)
        at(run, length).step()
        reads.append(len(allocator.read) - before)
    less = 2 * (DEPTH - 1)
    # Two steps that are another chain: it is known when the backward begins. Two recorded. The size of the second is
    # planned then, another one is measured first.
    assert reads == [DEPTH - 1, DEPTH - 1, less, less, less, 0]
    assert planned_lengths() == ["2, 15", "2, 32"]


@pytest.mark.slow
def test_microbatches_that_outgrow_their_plan_are_measured_anew(allocator: Allocator) -> None:
    """The plan for a size serves what its measured step was: also where the second call was longer than known."""
    run = watched(allocator, activation_budget="1GiB")

    def two(lengths: Sequence[int]) -> tuple[int, int]:
        """Bytes that are moved, and reads."""
        run.model.zero_grad(set_to_none=True)
        before = len(allocator.read)
        fxoffload.reset_stats()
        losses = [test_chain_planning.loss_of(run.model(batch(n, length=n))) for n in lengths]
        for loss in reversed(losses):
            loss.backward()
        return fxoffload.stats().bytes_offloaded > 0, (len(allocator.read) - before) // (2 * DEPTH)

    at(run, LONG)
    assert [two((24, 24)) for _ in range(3)] == [(True, 2), (True, 2), (False, 0)]
    # Another size of the first call, and a second one that is longer.
    assert [two((32, 40)) for _ in range(2)] == [(True, 2), (False, 0)]
    assert [two((24, 40)) for _ in range(3)] == [(True, 0), (True, 2), (False, 0)]
    assert [two((32, 64)) for _ in range(3)] == [(True, 0), (True, 2), (False, 0)]
