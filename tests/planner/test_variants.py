"""Batches of different sizes: schedules for each, variants of the graph, and the guards between them."""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache as fresh_inductor_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fxoffload
from fxoffload.compiler import plan_of_graph, schedule_by_size
from fxoffload.compiler.batch_sizes import BatchSizes, GraphBytes
from fxoffload.compiler.schedule_by_size import ScheduleBySize
from fxoffload.compiler.size_variants import MAX_VARIANTS, VARIANTS, SizeVariants, largest_served
from fxoffload.errors import BudgetError
from fxoffload.planner import StorageInfo, TrainingStep
from fxoffload.torch_private.inductor_compiler import FxGraphCache
from fxoffload.torch_private.symbolic_sizes import hints_at
from tests.capture import Sketch, Tower, example_input
from tests.planner.test_planning import Recorded, recorded, scenario, tower
from tests.support import assert_close, assert_equal, assert_nothing_held, num_dynamo_graphs

aten = torch.ops.aten
OPTIONS = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def made() -> Iterator[list[ScheduleBySize]]:
    """What schedules the calls of each graph that is compiled."""
    found: list[ScheduleBySize] = []

    def make(*args: Any) -> ScheduleBySize:
        found.append(ScheduleBySize(*args))
        return found[-1]

    with mock.patch.object(plan_of_graph, "ScheduleBySize", make):
        yield found


def dynamic(model: nn.Module, **changes: Any) -> Any:
    return torch.compile(model, backend="fxoffload", dynamic=True, options={**OPTIONS, **changes})


@functools.cache
def kept_peak(batch: int) -> int:
    """Of a tower's step with everything kept. Proportional to the batch, but for the gradients."""
    return (
        Recorded(tower(), lambda call: call(example_input(batch)).square().mean())
        .plan(1 << 60)
        .plan.baseline_peak_bytes
    )


def check_bits(model: nn.Module, call: Any, batch: int) -> fxoffload.Stats:
    """The step's stats; its gradients are those of the same code with everything kept, and close to eager's."""
    run = scenario(model, call, batch)
    fxoffload.reset_stats()
    found = run()
    stats = fxoffload.stats()
    with fxoffload.override_policy("keep_all"):
        assert_equal(found, run())
    assert_close(found, scenario(model, model, batch)())
    assert_nothing_held()
    return stats


# -- sizes -------------------------------------------------------------------------------------------------------------


def sizes(*hints: int, upper: tuple[int | None, ...] | None = None) -> BatchSizes:
    number = len(hints)
    symbols = tuple(f"s{i}" for i in range(number))
    return BatchSizes(symbols, tuple(range(number)), hints, upper or (None,) * number)


@given(st.integers(1, 1 << 40))
def test_a_size_is_rounded_up_by_at_most_an_eighth(size: int) -> None:
    (found,) = sizes(5).rounded_up((size,))
    assert size <= found <= size * 9 / 8
    assert sizes(5).rounded_up((found,)) == (found,)


def test_few_sizes_stand_for_all() -> None:
    assert len({sizes(5).rounded_up((n,)) for n in range(1024, 8193)}) == 25


def test_a_size_is_not_rounded_beyond_what_it_can_be() -> None:
    assert sizes(5, 5, upper=(1030, None)).rounded_up((1025, 1025)) == (1030, 1152)
    # The least of other calls' sizes that are known to the guards may be larger than what this symbol's range says.
    assert sizes(5, upper=(1000,)).rounded_up((1025,)) == (1025,)


def test_larger_sizes_are_tried_one_symbol_at_a_time() -> None:
    found = sizes(10, 7, upper=(24, None))
    assert found.scaled(2.0, 0) == (20, 7)
    assert found.scaled(2.5, 0) is None
    assert found.scaled(2.5, 1) == (10, 18)
    assert found.one_more(1) == (10, 8)


@pytest.mark.parametrize("at", [(7, 5), (3, 11), (64, 128)])
def test_bytes_of_a_graph_at_other_sizes(at: tuple[int, int]) -> None:
    """Told by the symbols as they would be counted with real tensors; no guard is added."""
    env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)  # type: ignore[call-arg]
    sketch = Sketch()
    sketch.mode = FakeTensorMode(shape_env=env)
    given = sketch.input("x", 7, 5)
    x = given.meta["val"] = sketch.mode.from_tensor(torch.empty(7, 5), symbolic_context=context)
    relu = sketch.op(aten.relu.default, given)
    graph_bytes = GraphBytes.of(sketch.module([sketch.op(aten.mm.default, relu, sketch.op(aten.t.default, relu))]))
    assert graph_bytes is not None
    rows, columns = (s.node.expr for s in x.shape)
    n, m = at
    assert graph_bytes.at({rows: n, columns: m}) == 4 * (n * m + n * m + n * n)
    with hints_at({rows: n}):
        assert graph_bytes.at({columns: m}) == 4 * (7 * m + 7 * m + 49)
    assert not env.guards


@pytest.mark.slow
def test_a_step_at_another_size_is_that_size_s_step() -> None:
    """All bytes, working sets and estimated times, as if that size had been compiled for."""

    def bare(step: TrainingStep) -> Any:
        place = {s.name: i for i, s in enumerate(step.storages)}

        def plain(s: StorageInfo) -> Any:
            return (s.nbytes, s.moved_bytes, s.is_gradient, s.is_output, s.copied_after, s.rank)

        segments = [
            (c.layer, c.ms, c.temp_bytes, [place[n] for n in c.reads], [place[n] for n in c.writes])
            for c in (*step.forward, *step.backward)
        ]
        return [plain(s) for s in step.storages], segments

    dynamic_one = Recorded(tower(), lambda call: call(example_input(4)).square().mean(), dynamic=True)
    found = dynamic_one.plan(1 << 60, recompute="default").partitioning
    varying = BatchSizes.of(dynamic_one.last.joint)
    assert varying is not None and varying.hints == (4, 8)
    for batch in (4, 9, 32):
        static = Recorded(tower(), lambda call, b=batch: call(example_input(b)).square().mean())
        expected = static.plan(1 << 60, recompute="default").partitioning.step
        assert expected is not None
        step = found.step_at(varying.named((batch, 8)), dynamic_one.last.settings)
        assert bare(step) == bare(expected)


# -- ranges ------------------------------------------------------------------------------------------------------------


class Linear:
    """Stands for ``GraphBytes``: as many bytes as the sizes' product."""

    def at(self, named: dict[Any, int]) -> int:
        product = 1
        for value in named.values():
            product *= value
        return product


@given(st.integers(2, 10_000), st.floats(0.5, 100))
def test_the_range_ends_before_the_first_size_that_is_not_served(hint: int, served: float) -> None:
    limit = int(hint * served)
    asked: list[int] = []

    def serves(found: tuple[int, ...]) -> bool:
        asked.append(found[0])
        return found[0] <= limit

    end = largest_served(sizes(hint), Linear(), serves)  # type: ignore[arg-type]
    assert len(asked) <= 5
    if end is None:
        assert limit >= 32 * hint
    else:
        assert end == hint or end <= limit
        # The next size that was tried is not served.
        assert limit < max(2 * end + 1, 1.15 * hint + 1)


def test_the_range_of_two_sizes_ends_at_the_nearer_end() -> None:
    def end(first: int, second: int) -> int | None:
        return largest_served(sizes(10, 10), Linear(), lambda s: s[0] <= first and s[1] <= second)  # type: ignore[arg-type]

    assert end(10_000, 10_000) is None
    assert end(10_000, 20) == 10 * 20
    assert end(15, 20) == 10 * 15
    assert end(10, 20) == 10 * 10


def test_a_size_that_must_vary_is_not_fixed() -> None:
    assert largest_served(sizes(2), Linear(), lambda s: False) == 2  # type: ignore[arg-type]
    assert largest_served(sizes(2), Linear(), lambda s: False, may_be_fixed=False) == 3  # type: ignore[arg-type]


def test_ranges_follow_each_other() -> None:
    found = SizeVariants()
    for key in ("a", "b"):
        assert found.begin(key, 100) is None
        for number in range(MAX_VARIANTS - 1):
            assert found.may_end(key)
            found.end(key, 100 * (number + 1))
        assert not found.may_end(key)
    assert found.begin("a", 100) is None
    assert found.begin("a", 101) == 100
    assert found.begin("a", 1000) == 100 * (MAX_VARIANTS - 1)
    found.forget()
    assert found.begin("a", 1000) is None
    assert found.may_end("a")


@pytest.mark.slow
def test_a_reset_of_the_compiler_forgets_ranges() -> None:
    model = tower()
    dynamic(model, activation_budget=kept_peak(7))(example_input(4))
    assert VARIANTS._ends
    torch.compiler.reset()
    assert not VARIANTS._ends


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_call_is_scheduled_for_its_size(made: list[ScheduleBySize]) -> None:
    """One graph, whatever recomputation could do: the runtime moves the simulated values for the size of each call."""
    smallest = recorded("tower").smallest(recompute="default").smallest_bytes
    budget = smallest * 2
    model = tower()
    before = num_dynamo_graphs()
    call = dynamic(model, activation_budget=budget, recompute="default", max_slowdown=9.0)
    moved = []
    for batch in (6, 7, 5, 4, 2, 7):
        stats = check_bits(model, call, batch)
        (by_size,) = made
        plan = by_size._plan
        schedule = plan.schedule((batch, 8)) if batch != 6 else plan.planned.schedule
        assert schedule is not None
        assert schedule.simulation.peak_bytes <= budget
        assert stats.bytes_offloaded == schedule.simulation.bytes_offloaded
        assert stats.bytes_reloaded == schedule.simulation.bytes_reloaded
        assert stats.bytes_reclaimed == schedule.simulation.bytes_reclaimed
        assert stats.num_prefetch_misses == schedule.simulation.num_prefetch_misses
        moved.append(stats.bytes_offloaded)
    assert num_dynamo_graphs() - before == 1
    assert moved[1] == moved[5] > moved[0] > 0
    # A short batch needs nothing.
    assert moved[4] == 0
    assert len(by_size._choices) == 4


@pytest.mark.slow
def test_only_so_many_sizes_keep_their_schedule(made: list[ScheduleBySize], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing fits, and each size has one of its own."""
    monkeypatch.setattr(schedule_by_size, "_MOST_CHOICES", 5)
    smallest = recorded("tower").smallest(recompute="default").smallest_bytes
    model = tower()
    call = dynamic(model, activation_budget=2 * smallest, recompute="default", max_slowdown=9.0)
    check_bits(model, call, 6)
    (by_size,) = made
    batch, width = by_size._plan.sizes.positions

    def choice(size: int) -> object:
        return by_size.choice({batch: size, width: 8})  # type: ignore[arg-type]

    with pytest.warns(UserWarning, match="whatever is offloaded"):
        first = choice(97)
    for size in range(98, 102):
        choice(size)
    assert choice(97) is first
    assert list(by_size._choices) == [(98, 8), (99, 8), (100, 8), (101, 8), (97, 8)]
    choice(102)
    assert len(by_size._choices) == 5 and choice(97) is first
    assert (98, 8) not in by_size._choices


@pytest.mark.slow
def test_the_first_call_leaves_room_for_tuning(made: list[ScheduleBySize]) -> None:
    """Also where its sizes are not those that were planned for. Later calls have the whole budget."""
    smallest = recorded("tower").smallest(recompute="default").smallest_bytes
    call = dynamic(tower(), activation_budget=2 * smallest, recompute="default", max_slowdown=9.0)
    call(example_input(6))
    (plan,) = (by_size._plan for by_size in made)
    order = range(len(plan.planned.scheduler.names))
    tuned = replace(plan, planned=replace(plan.planned, first=plan.planned.schedule))
    room = smallest // 4
    with mock.patch.object(schedule_by_size, "TUNING_BYTES", room):
        by_size = ScheduleBySize(tuned, order)
        args = {plan.sizes.positions[0]: 7, plan.sizes.positions[1]: 8}
        first, later = by_size.choice(args), by_size.choice(args)  # type: ignore[arg-type]
    expected = plan.schedule((7, 8), spare_bytes=room)
    assert expected is not None and first is not None and later is not None
    assert expected.simulation.peak_bytes <= 2 * smallest - room
    assert (first.offload, first.windows) == (expected.offload, expected.windows) != (later.offload, later.windows)


@pytest.mark.slow
def test_a_slowdown_holds_at_every_size(made: list[ScheduleBySize]) -> None:
    model = tower()
    call = dynamic(model, max_slowdown=0.5)
    check_bits(model, call, 4)
    for batch in (8, 2, 32):
        check_bits(model, call, batch)
        plan = made[0]._plan
        found = plan.schedule((batch, 8))
        assert found is not None
        assert found.simulation.step_ms <= 1.5 * plan._plain((batch, 8)).compute_ms
    assert len(made) == 1


@pytest.mark.slow
def test_a_longer_batch_gets_a_variant_and_a_short_one_keeps_its_own(made: list[ScheduleBySize]) -> None:
    budget = kept_peak(7)
    model = tower()
    before = num_dynamo_graphs()
    call = dynamic(model, activation_budget=budget)

    def run(batch: int) -> tuple[int, int]:
        stats = check_bits(model, call, batch)
        return num_dynamo_graphs() - before, stats.bytes_offloaded

    # Plain Inductor will do, and does for slightly larger sizes.
    assert run(4) == (1, 0)
    assert run(5) == (1, 0)
    assert [p.summary for p in fxoffload.plans()][-1].endswith("nothing is done")
    # Not any more: another plan for the same code.
    number, moved = run(8)
    assert number == 2
    assert moved > 0
    assert len(made) == 1
    # And one more, the last.
    number, moved = run(16)
    assert number == 3
    assert moved > 0
    for batch in (4, 8, 16, 9, 15, 5):
        number, moved = run(batch)
        assert number == 3
        assert (moved > 0) == (batch > 5)
    for by_size in made:
        for schedule in by_size._choices.values():
            assert schedule.windows is not None


@pytest.mark.slow
def test_what_no_variant_can_serve_runs_with_the_least_memory() -> None:
    budget = kept_peak(7)
    model = tower()
    call = dynamic(model, activation_budget=budget)
    for batch in (4, 8, 16):
        call(example_input(batch)).square().mean().backward()
    with pytest.warns(UserWarning, match="more than the activation_budget"):
        assert check_bits(model, call, 48).bytes_offloaded > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_bits(model, call, 64)  # said once


@pytest.mark.slow
def test_a_budget_that_a_longer_batch_cannot_meet() -> None:
    """Before a variant is compiled in vain; the shorter batches go on."""
    budget = recorded("tower").smallest().smallest_bytes
    model = tower()
    call = dynamic(model, activation_budget=budget)
    check_bits(model, call, 4)
    with pytest.raises(BudgetError, match="expected an activation_budget of at least"):
        call(example_input(32))
    check_bits(model, call, 4)
    assert_nothing_held()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 4])
def test_sizes_that_are_marked_as_varying(batch: int) -> None:
    """Dynamo raises where a guard fixes them; ours leave them more than one value."""
    model = tower()
    call = torch.compile(model, backend="fxoffload", options={**OPTIONS, "activation_budget": kept_peak(batch) + 64})
    for n in (batch, batch + 1, batch):
        x = example_input(n)
        torch._dynamo.mark_dynamic(x, 0)
        call(x).square().mean().backward()


@pytest.mark.slow
def test_bounded_sizes_are_planned_for_the_largest(made: list[ScheduleBySize]) -> None:
    """``mark_dynamic(max=...)``: one graph for all, within the budget at the largest; Dynamo allows no guard."""
    budget = kept_peak(7)
    model = tower()
    before = num_dynamo_graphs()
    call = torch.compile(model, backend="fxoffload", options={**OPTIONS, "activation_budget": budget})

    def bounded(batch: int) -> Tensor:
        x = example_input(batch)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=12)
        return x

    moved = []
    for batch in (4, 12, 9, 12):
        fxoffload.reset_stats()
        call(bounded(batch)).square().mean().backward()
        moved.append(fxoffload.stats().bytes_offloaded)
    assert num_dynamo_graphs() - before == 1
    assert moved[0] == 0 < moved[2] < moved[1] == moved[3]
    (by_size,) = made
    assert by_size._plan.sizes.hints == (12,)
    (plan,) = [p for p in fxoffload.plans() if p.graph == max(q.graph for q in fxoffload.plans())]
    assert plan.predicted_peak_bytes <= budget < plan.baseline_peak_bytes


@pytest.mark.slow
def test_another_objective_for_the_same_code_has_its_own_variants() -> None:
    tight, wide = kept_peak(4), kept_peak(7)
    model = tower()
    check_bits(model, dynamic(model, activation_budget=tight), 6)
    other = dynamic(model, activation_budget=wide)
    before = num_dynamo_graphs()
    for batch in (12, 3):  # no range begins where one of the first goal's ends
        check_bits(model, other, batch)
    assert num_dynamo_graphs() - before == 1


@pytest.mark.slow
def test_sizes_found_out_by_dynamo() -> None:
    """The first call is compiled for its sizes alone; from the second on they vary."""
    budget = kept_peak(7)
    model = tower()
    before = num_dynamo_graphs()
    call = torch.compile(model, backend="fxoffload", options={**OPTIONS, "activation_budget": budget})
    for batch in (4, 5, 12, 3, 4, 13, 12):
        stats = check_bits(model, call, batch)
        assert (stats.bytes_offloaded > 0) == (batch > 7)
    # Dynamo may know from before that they vary.
    assert num_dynamo_graphs() - before in (2, 3)


@pytest.mark.slow
def test_a_level_that_the_user_chose_has_no_variants() -> None:
    budget = 3 * kept_peak(4)
    model = tower()
    before = num_dynamo_graphs()
    call = dynamic(model, activation_budget=budget, recompute="cheap")
    for batch in (13, 4, 24):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            check_bits(model, call, batch)
    assert num_dynamo_graphs() - before == 1


@pytest.mark.slow
def test_variants_of_what_inductor_compiles() -> None:
    """Generated kernels take other sizes than those they were compiled for, and the wrapper's guards hold with ours."""
    budget = kept_peak(7)
    model = tower()
    before = num_dynamo_graphs()
    call = dynamic(model, activation_budget=budget, inner="inductor")
    for batch in (12, 6, 11, 5, 13):
        stats = check_bits(model, call, batch)
        assert (stats.bytes_offloaded > 0) == (batch > 7)
    assert num_dynamo_graphs() - before <= 2


@pytest.mark.slow
def test_a_segment_in_inductor_s_cache_knows_no_range() -> None:
    """Else a later compilation would find it together with the range of another plan."""
    small, large = kept_peak(7), kept_peak(9)
    model = tower()
    with fresh_inductor_cache():
        for budget, batches in ((small, (12, 6)), (large, (12, 6, 13, 9))):
            torch.compiler.reset()
            before = num_dynamo_graphs()
            call = dynamic(model, activation_budget=budget, inner="inductor")
            for batch in batches:
                check_bits(model, call, batch)
            assert num_dynamo_graphs() - before == 1
            (end,) = [e for ends in VARIANTS._ends.values() for e in ends]
            guards = [g for cached in cached_guards() for g in cached.split(" and ")]
            assert guards
            assert not [g for g in guards if str(end) in g]


def cached_guards() -> list[str]:
    """Of all graphs in Inductor's cache."""
    found = []
    for path in Path(FxGraphCache._get_tmp_dir()).rglob("*"):
        if path.is_file():
            found.append(pickle.loads(path.read_bytes()).guards_expr)
    return [g for g in found if g]


class Shifted(Tower):
    """Adds an integer that the caller gives."""

    def forward(self, x: Tensor, shift: int = 0) -> Tensor:
        return super().forward(x) * shift


@pytest.mark.slow
def test_an_integer_argument_is_no_size(made: list[ScheduleBySize]) -> None:
    """Dynamo makes it a symbol without bounds; no size depends on it, so one schedule serves all its values."""
    torch.manual_seed(0)
    model = Shifted(4)
    call = torch.compile(model, backend="fxoffload", options={**OPTIONS, "max_slowdown": 9.0})
    for shift in (3, 5, -7, 0):
        fxoffload.reset_stats()
        call(example_input(), shift).square().mean().backward()
        assert fxoffload.stats().bytes_offloaded > 0
    assert not any(by_size._choices for by_size in made)


@pytest.mark.slow
def test_models_of_one_class_have_variants_of_their_own() -> None:
    """All of them are compiled from one code object; the third still keeps its budget for a longer batch."""

    class Wide(Tower):
        def __init__(self, width: int) -> None:
            super().__init__(4)
            self.widen = nn.Linear(self.embed.in_features, width)
            self.narrow = nn.Linear(width, self.embed.in_features)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.narrow(self.widen(x)))

    budget = kept_peak(9)
    torch.manual_seed(0)
    for width in (17, 18, 19):
        model = Wide(width)
        call = dynamic(model, activation_budget=budget)
        assert check_bits(model, call, 4).bytes_offloaded == 0
        assert check_bits(model, call, 13).bytes_offloaded > 0
    assert len(VARIANTS._ends) == 3


def test_positions_of_sizes_are_the_forward_graph_s() -> None:
    """Effect tokens among a joint graph's placeholders are none of the forward's arguments."""
    env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)  # type: ignore[call-arg]

    def graph(*, token: bool) -> torch.fx.GraphModule:
        sketch = Sketch()
        sketch.mode = mode
        if token:
            sketch.input("token", 0)
        for name, value in (("s0", x.shape[0]), ("s1", x.shape[1]), ("x", x)):
            sketch.graph.placeholder(name).meta["val"] = value
        return sketch.module([])

    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.empty(7, 5), symbolic_context=context)
    joint = BatchSizes.of(graph(token=True))
    assert joint is not None and (joint.positions, joint.hints) == ((1, 2), (7, 5))
    forward = joint.in_forward(graph(token=False))
    assert forward is not None and (forward.positions, forward.hints) == ((0, 1), (7, 5))
    assert joint.in_forward(Sketch().module([])) is None
