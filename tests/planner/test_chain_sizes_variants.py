"""Steps over several graphs whose sizes vary, and that recompute more: variants serve all sizes, on the CPU."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxoffload
from fxoffload.compiler import plan_chain, step_member
from fxoffload.compiler import variant_maker as variant_maker
from fxoffload.compiler.segments import SegmentCompiler
from fxoffload.compiler.variant_maker import MOST_VARIANTS, VariantMaker
from fxoffload.plan_report.plan import Plan
from fxoffload.runtime.engine import engine_for
from fxoffload.torch_private.inductor import inductor_config
from fxoffload.torch_private.size_guards import NewGuardError, no_new_guards
from tests.planner import test_chain_planning
from tests.planner.rehearsal import CPU
from tests.planner.test_chain_planning import Run, new_plans, options
from tests.planner.test_chain_sizes import gradients_of, sharded
from tests.support import Stack, assert_equal, assert_nothing_held, compile_counts

alone, process_group = test_chain_planning.alone, test_chain_planning.process_group

WIDTH, DEPTH = 24, 5
# Of the grid. None is a width, which Dynamo would take for the same size.
SHORT, MIDDLE, LONG, LONGER = 15, 36, 52, 104


class Gated(nn.Module):
    """Many of its saved values cost little to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Gated() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(test_chain_planning.eager(x))
        return x


def varying(make: Callable[[], nn.Module] = Model, **changes: Any) -> Run:
    model = make()
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="fxoffload", dynamic=True, options=options(profile="h200", **changes))
    return at(Run(model, torch.empty(0)), LONG)


def at(run: Run, length: int) -> Run:
    generator = torch.Generator().manual_seed(length)
    run.x = torch.randn(2, length, WIDTH, generator=generator).requires_grad_()
    return run


def saved_bytes(run: Run) -> int:
    """Of all calls of a step in which they are offloaded."""
    fxoffload.reset_stats()
    run.step()
    return fxoffload.stats().bytes_offloaded


@functools.cache
def budget() -> int:
    """Within which a long step recomputes more than copies alone would have to wait for, and one of 44 a little."""
    found = saved_bytes(varying(policy="offload_all"))
    torch.compiler.reset()
    return part_of(found)


def part_of(nbytes: int) -> int:
    return int(0.55 * nbytes)


def check(run: Run, plain: Run, lengths: Sequence[int]) -> list[int]:
    """Steps of these lengths have the effects that they have without a plan. Bytes that each moved."""
    moved = []
    for length in lengths:
        expected = at(plain, length).step()
        fxoffload.reset_stats()
        assert_equal(at(run, length).step(), expected)
        assert_nothing_held()
        assert fxoffload.stats().calls_kept == {}
        moved.append(fxoffload.stats().bytes_offloaded)
    return moved


def plan_of(length: int) -> Plan:
    (found,) = [p for p in new_plans() if p.label.endswith(f"sizes 2, {length}")]
    return found


def again(plan: Plan) -> int:
    """How many calls of it recompute more."""
    return len({layer for d in plan.decisions if d.action == "recompute" for layer in d.layers})


def num_variants() -> int:
    return sum(len(graph.variants) for graph in fxoffload.graphs())


def test_variants_serve_every_length_with_the_same_bits() -> None:
    plain = varying(policy="offload_all")
    run = varying(activation_budget=part_of(saved_bytes(plain)))
    check(run, plain, (LONG, LONG))
    assert num_variants() == 0
    check(run, plain, (LONG, LONG))
    assert again(plan_of(LONG)) > 0
    there = num_variants()
    assert 1 <= there <= MOST_VARIANTS
    counts = compile_counts()
    check(run, plain, (SHORT, MIDDLE, LONG, 50, 37, SHORT, MIDDLE, 49))
    assert again(plan_of(SHORT)) == 0
    assert num_variants() == there
    assert compile_counts() == counts, "a length compiled something"


@pytest.mark.slow
def test_inductor_s_variants_serve_every_length() -> None:
    """Kernels of another recompute choice may round otherwise; with the same choice, what moves changes no bit."""
    limit = budget()
    run, plain = varying(activation_budget=limit, inner="inductor"), varying(policy="keep_all", inner="inductor")
    moved = 0
    for length in (LONG, LONG, LONG, LONG, SHORT, MIDDLE, LONG, 50, 44, SHORT, 44, 49):
        expected = at(plain, length).step()
        fxoffload.reset_stats()
        found = at(run, length).step()
        moved += fxoffload.stats().bytes_offloaded
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert num_variants() > 0 < moved
    for length in (LONG, 44, 49):
        found = at(run, length).step()
        with fxoffload.override_policy("keep_all"):
            assert_equal(at(run, length).step(), found)


@pytest.mark.slow
def test_what_is_on_the_device_is_what_was_simulated_for_each_length() -> None:
    """With variants that were partitioned for another length."""
    limit = budget()
    alive = set(fxoffload.graphs())
    run, plain = varying(activation_budget=limit), varying(policy="keep_all")
    check(run, plain, (LONG, LONG, LONG, LONG, 44, 44, LONGER, LONGER, LONGER))
    for graph in set(fxoffload.graphs()) - alive:
        test_chain_planning._tell_callers(run.watch, graph)
    plans = dict(zip((LONG, 44, LONGER), zip(new_plans(), test_chain_planning.CHAINS[-3:], strict=True), strict=True))
    assert again(plans[LONG][0]) > again(plans[44][0]) > 0
    for length, (plan, chain) in plans.items():
        fxoffload.reset_stats()
        at(run, length).step()
        simulation = plan.simulation
        assert simulation is not None
        assert test_chain_planning.seen(run) == test_chain_planning.expected(chain, simulation)
        assert fxoffload.stats().bytes_offloaded == simulation.bytes_offloaded
        assert (simulation.peak_bytes <= limit) is (length != LONGER)


@pytest.mark.slow
def test_a_plan_of_another_length_is_made_ready_too() -> None:
    """The length that wanted the variants does not come again; the next step compiles them all the same."""
    run, plain = varying(activation_budget=budget()), varying(policy="keep_all")
    check(run, plain, (LONG, LONG, MIDDLE))
    assert num_variants() > 0
    moved = check(run, plain, (LONG,))
    assert moved == [plan_of(LONG).predicted.bytes_offloaded]


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fully_sharded_layers() -> None:
    run, plain = sharded(varying(activation_budget=budget())), sharded(varying(policy="keep_all"))
    for length in (LONG, LONG, LONG, SHORT, MIDDLE, LONG, LONGER, LONGER, LONGER, SHORT, 41):
        assert_equal(gradients_of(at(run, length)), gradients_of(at(plain, length)))
    assert num_variants() > 0
    assert again(plan_of(LONG)) > 0


def test_a_new_assumption_about_sizes_is_an_error_and_leaves_nothing_behind() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv()
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = FakeTensorMode(shape_env=env).from_tensor(torch.empty(100, 3), symbolic_context=context)
    size = fake.shape[0]
    assert bool(size > 5)
    before = [str(g.expr) for g in env.guards]
    with no_new_guards(env):
        assert bool(size > 4), "it follows from what is assumed"
        with pytest.raises(NewGuardError, match="expected nothing new to be assumed of sizes"):
            bool(size > 50)
        with env.suppress_guards():
            assert bool(size > 60), "who assumes nothing may ask"
    assert [str(g.expr) for g in env.guards] == before
    with no_new_guards(env):
        assert bool(size < sys.maxsize), "no size is that large"
    before = [str(g.expr) for g in env.guards]
    assert bool(size > 50)
    assert len(env.guards) == len(before) + 1
    with no_new_guards(None):
        pass


@pytest.mark.slow
def test_a_variant_that_would_hold_for_some_sizes_only_is_not_compiled() -> None:
    """Steps go on with the graphs as they are compiled, whatever the lengths are."""
    compile_segment = SegmentCompiler.compile

    def assume(self: SegmentCompiler, gm: Any, segment: Any, *args: Any) -> None:
        sizes = [v.meta["val"].shape[1] for v in segment.inputs if getattr(v.meta.get("val"), "ndim", 0) == 3]
        if sizes:
            bool(sizes[0] > LONG - 3)
        compile_segment(self, gm, segment, *args)

    run, plain = varying(activation_budget=budget()), varying(policy="keep_all")
    check(run, plain, (LONG, LONG))
    with (
        mock.patch.object(SegmentCompiler, "compile", assume),
        pytest.warns(UserWarning, match="could not make ready .* expected nothing new to be assumed of sizes"),
    ):
        check(run, plain, (LONG, LONG, SHORT, MIDDLE, LONG, LONGER, LONGER))
    assert num_variants() == 0
    assert "its variants could not be compiled" in plan_of(LONG).summary


@pytest.mark.slow
def test_inductor_s_cache_is_not_asked_for_them() -> None:
    """What another graph left there may assume more of sizes, and be taken where that holds for the hints."""
    cached: list[bool] = []
    make = VariantMaker._compile

    def compile_variant(self: VariantMaker, number: int, found: Any) -> Any:
        cached.append(inductor_config.fx_graph_cache)
        return make(self, number, found)

    with mock.patch.object(VariantMaker, "_compile", compile_variant), inductor_config.patch(fx_graph_cache=True):
        run, plain = varying(activation_budget=budget()), varying(policy="keep_all")
        check(run, plain, (LONG, LONG, LONG, LONG))
        assert inductor_config.fx_graph_cache is True
    assert cached and not any(cached)


@pytest.mark.slow
def test_a_choice_is_partitioned_once_for_all_lengths() -> None:
    variants: list[object] = []
    make_partitioning = variant_maker.make_partitioning

    def drafted(*args: Any) -> Any:
        variants.append(args[1])
        return make_partitioning(*args)

    run, plain = varying(activation_budget=budget()), varying(policy="keep_all")
    with mock.patch.object(variant_maker, "make_partitioning", drafted):
        check(run, plain, (LONG, LONG, LONG))
        count = len(variants)
        check(run, plain, (44, 48, 56, LONGER, LONGER))
    assert count == len(variants) > 0


@pytest.mark.slow
def test_no_length_ever_has_more_variants_than_a_graph_may_have() -> None:
    found: list[int] = []
    add = VariantMaker.add

    def added(self: VariantMaker, variant: Any) -> int:
        found.append(add(self, variant))
        return found[-1]

    run, plain = varying(activation_budget=budget()), varying(policy="keep_all")
    with mock.patch.object(VariantMaker, "add", added):
        check(run, plain, (40, 40, 40, *range(41, 100, 7), LONGER, LONGER, 40))
    assert found and max(found) <= MOST_VARIANTS
    assert num_variants() <= MOST_VARIANTS


@pytest.mark.slow
def test_plans_made_behind_running_steps() -> None:
    """On a thread of their own, as on a GPU."""

    def join() -> None:
        for thread in threading.enumerate():
            if thread.name == "fxoffload-chain-plan":
                thread.join()

    steps = engine_for(CPU).calls
    run, plain = varying(activation_budget=budget()), varying(policy="keep_all")
    with (
        mock.patch.object(steps.plans, "in_background", True),
        mock.patch.object(step_member, "plan_chain", plan_chain.plan_chain),
    ):
        for length in (LONG, LONG, LONG, MIDDLE, LONG, LONGER, SHORT, LONGER, LONG, MIDDLE, SHORT):
            check(run, plain, (length,))
            join()
    assert num_variants() > 0


@pytest.mark.slow
def test_switched_off() -> None:
    run = varying(activation_budget=budget(), disable=("tape_recompute",))
    plain = varying(policy="keep_all")
    check(run, plain, (LONG, LONG, LONG, MIDDLE, LONG))
    assert num_variants() == 0 and again(plan_of(LONG)) == 0


@pytest.mark.slow
def test_a_layer_that_drops_at_random() -> None:
    """The random numbers of a recomputation are those of the forward, at every length."""
    make = lambda: Stack(DEPTH, WIDTH, dropout=0.3)  # noqa: E731
    run, plain = varying(make, activation_budget=budget() // 3), varying(make, policy="keep_all")
    check(run, plain, (LONG, LONG, LONG, MIDDLE, LONG, SHORT, LONGER, LONGER, MIDDLE))
