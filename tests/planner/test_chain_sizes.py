"""Plans for steps over several graphs whose sizes vary from call to call, on the CPU."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxoffload
from fxoffload.compiler import plan_chain, step_member
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.host_memory import arena as host_arena
from fxoffload.runtime.tracker import chains
from tests.marks import slow
from tests.planner import test_chain_planning
from tests.planner.rehearsal import CPU
from tests.planner.test_chain_planning import MODELS, Run, in_between, moved_by, new_plans, options
from tests.support import Stack, assert_equal, assert_nothing_held, batch, compile_counts

alone, process_group = test_chain_planning.alone, test_chain_planning.process_group

# Sizes of the grid; none is the width of the layers, which Dynamo would take for the same size.
SHORT, MIDDLE, LONG = 15, 32, 48


def varying(make: Callable[[], nn.Module] = MODELS["stack"], *, dynamic: bool | None = True, **changes: Any) -> Run:
    """A model whose layers are compiled each on its own, for all lengths."""
    model = make()
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="fxoffload", dynamic=dynamic, options=options(**changes))
    return Run(model, batch(length=LONG))


def at(run: Run, length: int) -> Run:
    """With a batch of that length."""
    run.x = batch(length, length=length)
    return run


class Plain:
    """What steps of each length do when everything is kept, by the same code."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.known: dict[int, dict[str, Tensor]] = {}

    def at(self, length: int) -> dict[str, Tensor]:
        if length not in self.known:
            with fxoffload.override_policy("keep_all"):
                self.known[length] = at(self.run, length).step()
        return self.known[length]


def moved_at(run: Run, plain: Plain, lengths: Sequence[int]) -> list[int]:
    """Bytes that steps of these lengths offload; each has the effects that it has without."""
    found = []
    for length in lengths:
        expected = plain.at(length)
        at(run, length)
        fxoffload.reset_stats()
        assert_equal(run.step(), expected)
        assert_nothing_held()
        found.append(fxoffload.stats().bytes_offloaded)
    return found


def sharded(run: Run) -> Run:
    """Each layer and the model, by FSDP2, over one rank."""
    mesh = init_device_mesh("cpu", (1,))
    for layer in run.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(run.model, mesh=mesh)
    return run


def gradients_of(run: Run) -> dict[str, Tensor]:
    """Of one step of a sharded model, whole."""
    run.step()
    return {n: p.grad.full_tensor().clone() for n, p in run.model.named_parameters()}  # type: ignore[union-attr]


def tell_callers(run: Run, alive: set[Any]) -> None:
    for graph in set(fxoffload.graphs()) - alive:
        test_chain_planning._tell_callers(run.watch, graph)


def peak_of(run: Run) -> int:
    """The most that was seen when a segment was called."""
    return max(s.live_bytes for s in run.watch.seen)


def planned_lengths() -> list[str]:
    return [p.label.partition("sizes ")[2] for p in new_plans()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "collecting", slow("two graphs"), slow("shared")])
def test_each_length_does_what_its_size_needs(name: str) -> None:
    """Short batches move nothing, long ones only as much as needed. Where the length is one of the grid, bytes on the
    device are the simulated ones."""
    budget = in_between(name)  # for the length that is called long here
    torch.compiler.reset()
    alive = set(fxoffload.graphs())
    run, plain = varying(MODELS[name], activation_budget=budget), Plain(varying(MODELS[name], policy="keep_all"))
    first = moved_at(run, plain, (LONG,))
    for graph in set(fxoffload.graphs()) - alive:
        test_chain_planning._tell_callers(run.watch, graph)
    counts = compile_counts()
    lengths = (SHORT, MIDDLE, LONG, 45, 41, SHORT, 13, LONG, MIDDLE)
    moved = moved_at(run, plain, lengths)
    found = dict(zip(lengths, moved, strict=True))
    # The first two are recorded: everything leaves. From then on, every length follows a plan at once.
    assert found[SHORT] == found[13] == 0 < found[41] < found[45] < found[LONG] < first[0]
    assert moved[0] > 0
    assert {**compile_counts(), "segments": 0} == {**counts, "segments": 0}
    planned = dict(zip(planned_lengths(), zip(new_plans(), test_chain_planning.CHAINS[-5:], strict=True), strict=True))
    assert list(planned) == ["2, 15", "2, 32", "2, 48", "2, 44", "2, 13"]  # 45 fits 48
    for length in (SHORT, MIDDLE, LONG, 44, 13, 43, 37):
        fxoffload.reset_stats()
        at(run, length).step()
        most = max(s.live_bytes for s in run.watch.seen)
        assert most <= budget
        if (known := planned.get(f"2, {length}")) is not None:
            plan, chain = known
            simulation = plan.simulation
            assert simulation is not None
            assert test_chain_planning.seen(run) == test_chain_planning.expected(chain, simulation)
            assert simulation.peak_bytes <= budget
            stats = fxoffload.stats()
            assert (stats.bytes_offloaded, stats.bytes_reloaded, stats.bytes_reclaimed) == (
                simulation.bytes_offloaded,
                simulation.bytes_reloaded,
                simulation.bytes_reclaimed,
            )
    assert {**compile_counts(), "segments": 0} == {**counts, "segments": 0}


@pytest.mark.slow
def test_without_a_budget_each_length_has_the_least_peak_within_a_slowdown() -> None:
    run = varying(lambda: Stack(8), disable=("tape_recompute",))
    plain = Plain(varying(lambda: Stack(8), policy="keep_all"))
    moved = moved_at(run, plain, (SHORT, LONG, LONG, SHORT, 40))
    plans = {p.label: p for p in new_plans()}
    found = [plans[f"a step over 8 calls of 2 graphs, sizes 2, {n}"] for n in (LONG, SHORT, 40)]
    assert moved[2:] == [p.predicted.bytes_offloaded for p in found]
    assert all(p.predicted_step_ms <= p.baseline_step_ms * 1.02 for p in found)


@pytest.mark.slow
def test_the_second_length_makes_sizes_dynamic() -> None:
    """As Dynamo does it by itself: graphs for the first length, then others for all of them."""
    budget = in_between()
    torch.compiler.reset()
    run = varying(dynamic=None, activation_budget=budget, disable=("tape_recompute",))
    plain = Plain(varying(dynamic=None, policy="keep_all"))
    moved_at(run, plain, (LONG, LONG, LONG, MIDDLE))
    counts = compile_counts()
    moved = moved_at(run, plain, (LONG, MIDDLE, SHORT, 64, LONG, SHORT, 64))
    assert {**compile_counts(), "segments": 0} == {**counts, "segments": 0}
    assert moved[2] == moved[5] == 0 < moved[4] < moved[3] == moved[6]
    assert set(planned_lengths()) == {"", "48", "32", "15", "64"}


@pytest.mark.slow
def test_the_host_s_memory_does_not_grow_after_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_for(CPU).release_host_memory()
    monkeypatch.setattr(host_arena, "_PAGE", 1 << 12)
    run = varying(activation_budget=in_between())
    at(run, LONG).step()
    small = fxoffload.stats().host_bytes_reserved
    at(run, 96).step()
    before = fxoffload.stats()
    assert before.host_bytes_reserved > small > 0
    generator = random.Random(3)
    for _ in range(60):
        at(run, generator.randrange(3, 97)).step()
    after = fxoffload.stats()
    assert after.host_bytes_reserved == before.host_bytes_reserved
    assert after.num_host_growths == before.num_host_growths
    assert after.host_bytes_in_use == 0
    assert after.bytes_offloaded > before.bytes_offloaded


@pytest.mark.slow
def test_only_so_many_plans_are_kept_and_the_largest_among_them() -> None:
    run = varying(activation_budget="1GiB")
    lengths = (100, 100, *range(3, 30))
    with mock.patch.object(chains, "_MOST_SIZES", 16):
        for length in lengths:
            at(run, length).step()
        planned = [f"2, {n}" for n in (104, *range(9, 16), *range(16, 31, 2))]
        assert planned_lengths() == planned
        assert len(planned) == 16
        assert moved_by(at(run, 99)) == moved_by(at(run, 3)) == 0


@pytest.mark.slow
def test_a_length_that_gets_no_plan_follows_one_for_more_or_takes_the_least() -> None:
    def lengths(count: int) -> tuple[list[bool], list[int]]:
        moved, under_way = [], []
        with mock.patch.object(chains, "_MOST_PLANS_IN_ALL", count):
            run = varying(activation_budget="1GiB")
            for length in (LONG, LONG, SHORT, 64, LONG, 64):
                moved.append(moved_by(at(run, length)) > 0)
                under_way.append(max(s.in_flight_bytes + s.ahead_bytes for s in run.watch.seen))
        return moved, under_way

    moved, under_way = lengths(1)
    assert moved == [True, True, False, True, False, True]
    assert planned_lengths() == ["2, 48"]
    torch.compiler.reset()
    # Without a budget copies are under way; here only what the caller lends is still held.
    run = varying(disable=("tape_plan",))
    at(run, 64).step()
    free = max(s.in_flight_bytes + s.ahead_bytes for s in run.watch.seen)
    assert 0 < 2 * max(under_way[3], under_way[5]) <= free
    assert under_way[0] == under_way[1] == under_way[3] * LONG // 64


@pytest.mark.slow
def test_while_a_plan_is_made_a_larger_one_is_followed() -> None:
    """On a thread of its own, as on a GPU: one at a time. The third step waits for a schedule that meets the budget, no
    other step does."""
    may_plan = threading.Semaphore(0)

    def planner(*args: Any) -> Any:
        assert may_plan.acquire(timeout=60)
        return plan_chain.plan_chain(*args)

    def joined() -> None:
        for thread in threading.enumerate():
            if thread.name == "fxoffload-chain-plan":
                thread.join()

    def planned() -> None:
        may_plan.release()
        joined()

    budget = in_between()
    plain = Plain(varying(policy="keep_all"))
    steps = engine_for(CPU).calls
    with mock.patch.object(steps.plans, "in_background", True), mock.patch.object(step_member, "plan_chain", planner):
        run = varying(activation_budget=budget)
        may_plan.release()  # the first, of the size that was recorded last
        everything = moved_at(run, plain, (LONG, SHORT, LONG, SHORT, LONG))
        assert everything[0] == everything[2] == everything[4] > everything[1] > 0 == everything[3]
        joined()
        assert moved_at(run, plain, (SHORT, LONG)) == [0, everything[0]]
        assert planned_lengths() == ["2, 15"]
        planned()
        long, middle = moved_at(run, plain, (LONG, MIDDLE))
        assert 0 < middle < long < everything[0]
        assert moved_at(run, plain, (SHORT, 64, MIDDLE)) == [0, everything[0] * 64 // LONG, middle]
        planned()
        assert moved_at(run, plain, (MIDDLE,)) == [new_plans()[-1].predicted.bytes_offloaded]
        assert planned_lengths()[2:] == ["2, 32"]


@pytest.mark.slow
def test_microbatches_of_different_lengths() -> None:
    """The second one is as long as the first until it is not: its plan is made for the longest that came by."""
    run, plain = varying(activation_budget="1GiB"), varying(policy="keep_all")

    def two(on: Run, lengths: Sequence[int]) -> None:
        on.model.zero_grad(set_to_none=True)
        losses = [test_chain_planning.loss_of(on.model(batch(n, length=n))) for n in lengths]
        for loss in reversed(losses):
            loss.backward()

    moved = []
    for lengths in ((24, 24), (32, 32), (32, 32), (24, 24), (32, 40), (32, 40), (24, 36), (32, 16), (32, 48), (32, 48)):
        fxoffload.reset_stats()
        test_chain_planning.compare(run, plain, do=functools.partial(two, lengths=lengths))
        moved.append(fxoffload.stats().bytes_offloaded > 0)
    #                recorded    planned       longer       longer       longer       as planned then
    assert moved == [True, True, False, False, True, False, True, False, True, False]


@pytest.mark.slow
def test_another_path_is_recorded_and_planned_for_all_lengths() -> None:
    run, plain = (
        varying(test_chain_planning.Paths, activation_budget="1GiB"),
        varying(test_chain_planning.Paths, policy="keep_all"),
    )

    def step(on: Run, path: Sequence[int], length: int) -> dict[str, Tensor]:
        on.model.path = path  # type: ignore[assignment]
        return at(on, length).step()

    whole, other = (0, 1, 2, 3, 4), (0, 1, 3, 3, 4)
    moved = []
    for path, length in (
        *((whole, n) for n in (SHORT, MIDDLE, LONG, MIDDLE)),
        *((other, n) for n in (MIDDLE, MIDDLE, SHORT, LONG, MIDDLE, MIDDLE, 64)),
    ):
        fxoffload.reset_stats()
        test_chain_planning.compare(run, plain, do=functools.partial(step, path=path, length=length))
        moved.append(fxoffload.stats().bytes_offloaded > 0)
    assert moved[:4] == [True, True, False, False]
    assert moved[4:6] == [True, True]
    assert moved[-1] is False


@pytest.mark.slow
def test_a_budget_that_nothing_fits_into_warns_once() -> None:
    run = varying(activation_budget=1)
    with pytest.warns(UserWarning, match="expected an activation_budget of at least") as caught:
        for length in (LONG, MIDDLE, LONG, 64, SHORT):
            at(run, length).step()
    (found,) = [str(w.message) for w in caught if "activation_budget" in str(w.message)]
    assert "sizes 2, 32" in found
    assert len(new_plans()) == 4
    assert all(p.predicted_peak_bytes < p.baseline_peak_bytes for p in new_plans())


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fully_sharded_layers() -> None:
    def gradients(run: Run, length: int) -> dict[str, Tensor]:
        return gradients_of(at(run, length))

    budget = 120_000
    plain = sharded(varying(policy="keep_all"))
    run = sharded(varying(activation_budget=budget, disable=("tape_recompute",)))
    moved = []
    for length in (LONG, SHORT, MIDDLE, LONG, 64, SHORT, LONG):
        expected = gradients(plain, length)
        fxoffload.reset_stats()
        assert_equal(gradients(run, length), expected)
        moved.append(fxoffload.stats().bytes_offloaded)
    plans = dict(zip(planned_lengths(), new_plans(), strict=True))
    assert moved[2:] == [plans[f"2, {n}"].predicted.bytes_offloaded for n in (MIDDLE, LONG, 64, SHORT, LONG)]
    assert moved[5] == 0 < moved[2] < moved[3] < moved[4]
    assert all(p.predicted_peak_bytes <= budget for p in plans.values())


class Dropless(nn.Module):
    """As many rows as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = (rows[:, 0] > 0).nonzero().squeeze(1)
        return x + torch.zeros_like(rows).index_add(0, chosen, self.down(self.up(rows[chosen]).relu())).view_as(x)


def test_sizes_that_the_data_decides_are_offloaded_without_a_plan() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        make = lambda: Stack(3, block=lambda *_: Dropless())  # noqa: E731
        run, plain = varying(make, activation_budget="1GiB"), Plain(varying(make, policy="keep_all"))
        moved = moved_at(run, plain, (LONG, MIDDLE, LONG, MIDDLE, LONG))
    assert moved[0] == moved[2] == moved[4] > moved[1] == moved[3] > 0
    assert not new_plans()
