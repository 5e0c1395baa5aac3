"""One plan for a step over several compiled graphs, from recorded steps to the bytes on the device, on the CPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._dynamo import utils as dynamo_utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxoffload
from fxoffload.analysis.labels import STORAGE_KEY
from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler import chain_planning, pacing, plan_chain, step_member
from fxoffload.compiler import planning as graph_planning
from fxoffload.compiler.variant_maker import VariantMaker
from fxoffload.planner.chain import Chain
from fxoffload.planner.schedule import Schedule
from fxoffload.planner.simulate import Simulation, simulate
from fxoffload.planner.windows import no_windows, windows_for
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.tracker import step_memory
from fxoffload.runtime.tracker.step_state import StepState
from tests.marks import slow
from tests.planner.rehearsal import CPU, Seen, Watch, watching
from tests.support import Block, Stack, assert_equal, assert_nothing_held, batch, compile_counts, effects, heavy_layers

LENGTH = 48
_PLANS_BEFORE: set[int] = set()
CHAINS: list[Chain] = []  # that were planned


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One thread, nothing compiled before, and no plans of other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()
    gc.collect()
    _PLANS_BEFORE.clear()
    _PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    CHAINS.clear()

    describe = chain_planning.ChainPlanning.describe

    def described(planning: Any, schedule: Schedule) -> fxoffload.Plan:
        CHAINS.append(planning.chain)
        return describe(planning, schedule)

    with mock.patch.object(chain_planning.ChainPlanning, "describe", described):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[False, True], ids=["whole", "cut"])
def heavy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Layers that are one segment, and layers that are cut in the forward."""
    with heavy_layers() if request.param else contextlib.nullcontext():
        yield


def new_plans() -> list[fxoffload.Plan]:
    return [p for p in fxoffload.plans() if p.graph not in _PLANS_BEFORE]


def options(**changes: Any) -> dict[str, Any]:
    return {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, **changes}


def per_layer(model: nn.Module, **changes: Any) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="fxoffload", options=options(**changes))
    return model


WATCHES: list[Watch] = []


def eager(x: Tensor) -> Tensor:
    """What eager code makes is seen where it enters a graph."""
    for watch in WATCHES:
        watch.see("eager", x)
    return x


class Gate(nn.Module):
    """A graph of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sigmoid() * x


class TwoGraphs(nn.Module):
    """Two graphs in each layer, and eager code between them that makes their saved values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(m for _ in range(3) for m in (Block(), Gate()))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(0, len(self.layers), 2):
            x = self.layers[i](eager(x))
            x = x * 0.5 + self.layers[i + 1](eager(x + 1.0))
        return x


class Collecting(Stack):
    """Returns every layer's output, so that the caller holds them all."""

    def forward(self, x: Tensor) -> Any:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return sum((f.mean() for f in found), self.head(x).square().mean()), found


class Shared(nn.Module):
    """What one graph returns is saved by two others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(0, len(self.layers), 3):
            x = self.layers[i](eager(x))
            x = self.layers[i + 1](x) + self.layers[i + 2](x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": lambda: Stack(5),
    "dropout": lambda: Stack(5, dropout=0.1),
    "two graphs": TwoGraphs,
    "collecting": lambda: Collecting(4),
    "shared": Shared,
}


def loss_of(found: Any) -> Tensor:
    """Of what a model returns."""
    return found[0] if isinstance(found, tuple) else found.square().mean()


@dataclass
class Run:
    """A model whose layers are compiled each on its own, watched."""

    model: nn.Module
    x: Tensor
    watch: Watch = field(default_factory=Watch)

    def step(self, seed: int = 7) -> dict[str, Tensor]:
        """One training step; its effects."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        self.watch.clear()
        self.watch.phase = "forward"
        self.watch.callers.add("given")
        self.watch.see("given", self.x)
        WATCHES[:] = [self.watch]
        with watching(self.watch):
            found = self.model(self.x)
            loss = loss_of(found)
            self.watch.phase = "backward"
            loss.backward()
        return {"loss": loss.detach().clone(), **effects(self.model)}

    def steps(self, count: int) -> list[dict[str, Tensor]]:
        """Several."""
        return [self.step() for _ in range(count)]


def recorded(make: Callable[[], nn.Module], *, steps: int = 2, **changes: Any) -> Run:
    """A model after the steps that are recorded: the next one is planned."""
    alive = set(fxoffload.graphs())
    run = Run(per_layer(make(), **changes), batch(length=LENGTH))
    run.steps(steps)
    for graph in set(fxoffload.graphs()) - alive:
        _tell_callers(run.watch, graph)
    return run


def _tell_callers(watch: Watch, graph: CompiledGraph) -> None:
    """A graph's inputs are not the step's own tensors."""
    for ran in (graph, *graph.variants):
        assert ran.backward is not None
        given = [n for n in ran.forward.graph.nodes if n.op in ("placeholder", "get_attr")]
        names = {n.name for n in given}
        watch.callers |= {f"forward/{n.meta.get(STORAGE_KEY)}" for n in given}
        watch.callers |= {
            f"backward/{n.meta.get(STORAGE_KEY)}"
            for n in ran.backward.graph.find_nodes(op="placeholder")
            if n.name in names
        }


def expected(chain: Chain, simulation: Simulation) -> list[Seen]:
    """What the watch is to see: no entries, and not the tangents that eager code makes."""
    entries = {s.name for s in chain.step.forward if not s.reads and s.name.endswith("entry")}
    entries |= {s.name for s in chain.step.backward if s.name.endswith("backward entry")}
    foreign: dict[int, int] = {}  # bytes of eager code's tangents, per backward segment
    nbytes = {s.name: s.nbytes for s in chain.step.storages}
    made = [n for s in (chain.step.forward[-1], *chain.step.backward) for n in s.writes]
    for name in {n for n in made if "tangents" in n}:
        readers = [i for i, s in enumerate(chain.step.backward) if name in s.reads]
        makers = [i for i, s in enumerate(chain.step.backward) if name in s.writes]
        for i in range(makers[0] + 1 if makers else 0, max(readers, default=-1) + 1):
            foreign[i] = foreign.get(i, 0) + nbytes[name]
    found = []
    for at, b in enumerate(simulation.boundaries):
        if b.segment in entries:
            continue
        off = foreign.get(at - len(chain.step.forward), 0) if b.phase == "backward" else 0
        name = b.segment.split("/", 1)[1]
        found.append(Seen(b.phase, name, b.live_bytes - off, 0, b.in_flight_bytes, b.ahead_bytes))
    return found


def seen(run: Run) -> list[Seen]:
    return [Seen(s.phase, s.segment, s.live_bytes, 0, s.in_flight_bytes, s.ahead_bytes) for s in run.watch.seen]


def range_of_peaks(name: str) -> tuple[int, int]:
    """The least peak of a model's step, and that with everything kept."""
    run = recorded(MODELS[name], activation_budget=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.step()
    (plan,) = new_plans()
    torch.compiler.reset()
    return plan.predicted_peak_bytes, plan.baseline_peak_bytes


def check_bytes(run: Run, simulation: Simulation) -> None:
    """A step agrees with the simulation."""
    fxoffload.reset_stats()
    run.step()
    assert_nothing_held()
    stats = fxoffload.stats()
    assert seen(run) == expected(CHAINS[-1], simulation)
    assert (stats.bytes_offloaded, stats.bytes_reloaded, stats.bytes_reclaimed, stats.num_prefetch_misses) == (
        simulation.bytes_offloaded,
        simulation.bytes_reloaded,
        simulation.bytes_reclaimed,
        simulation.num_prefetch_misses,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stack", "two graphs", "shared"])
@pytest.mark.parametrize("share", [0.5, slow(1.0)])
@pytest.mark.usefixtures("heavy")
def test_every_byte_whatever_is_decided(name: str, share: float) -> None:
    """Random decisions, and windows so wide that copies of several calls are under way when the forward ends."""
    generator = random.Random(name)
    plain = recorded(MODELS[name], policy="keep_all").steps(1)[0]
    reclaimed = 0
    for factor in (0.9, 1.0, 1.5):
        found: list[Simulation] = []

        def decide(planning: Any, factor: float = factor, found: list[Simulation] = found) -> Schedule:
            step = planning.chain.step
            offload = tuple(bool(c.moved_bytes) and generator.random() < share for c in step.candidates)
            limit = int(factor * planning.baseline.peak_bytes)
            windows = windows_for(step, offload, limit) or no_windows(step)
            found.append(simulate(step, offload, copies=planning.rates, windows=windows))
            return Schedule(offload, windows, found[0])

        torch.compiler.reset()
        with mock.patch.object(chain_planning.ChainPlanning, "run", decide):
            run = recorded(MODELS[name], steps=2, activation_budget="1GiB")
            assert_equal(run.step(), plain)
            check_bytes(run, found[0])
        reclaimed += found[0].bytes_reclaimed
    assert reclaimed > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow(n) if n == "shared" else n for n in MODELS])
@pytest.mark.usefixtures("heavy")
def test_every_byte(name: str) -> None:
    """A budget between the least peak and that of keeping everything: some is kept, some is offloaded. Bytes on the
    device are the simulated ones, and no bit of a gradient changes."""
    least, most = range_of_peaks(name)
    assert least < most
    before = {p.graph for p in new_plans()}
    budget = (least + most) // 2
    run = recorded(MODELS[name], activation_budget=budget)
    plain = recorded(MODELS[name], policy="keep_all").steps(1)[0]
    for _ in range(2):
        assert_equal(run.step(), plain)
    (plan,) = [p for p in new_plans() if p.graph not in before]
    simulation = plan.simulation
    assert simulation is not None
    check_bytes(run, simulation)
    assert plan.predicted_peak_bytes <= budget < plan.baseline_peak_bytes
    assert simulation.bytes_offloaded > 0
    actions = {d.action for d in plan.decisions}
    assert {"keep", "offload"} <= actions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "factor"), [("stack", 0.9), ("two graphs", 1.5), slow("collecting", 0.9), slow("shared", 1.5)]
)
@pytest.mark.usefixtures("heavy")
def test_every_byte_whatever_is_recomputed(name: str, factor: float) -> None:
    """Each call runs a variant of its graph at random, with random decisions; several in one step."""
    generator = random.Random(name)
    plain = recorded(MODELS[name], policy="keep_all").steps(1)[0]
    ran: set[int] = set()
    found: list[Simulation] = []

    def decide(planning: Any) -> Schedule:
        ways = planning.chain_search
        variants = {kind: [None, *variants[-2:]] for kind, variants in ways._variants_by_kind.items()}
        variants = tuple(generator.choice(variants[kind]) for kind in ways._kinds)
        assert len(set(variants)) > 1
        planning.choice = ways.with_variants(variants, None)
        step = planning.chain.step
        offload = tuple(bool(c.moved_bytes) and generator.random() < 0.7 for c in step.candidates)
        limit = int(factor * planning.baseline.peak_bytes)
        windows = windows_for(step, offload, limit) or no_windows(step)
        found.append(simulate(step, offload, copies=planning.rates, windows=windows))
        return Schedule(offload, windows, found[0])

    torch.compiler.reset()
    alive = set(fxoffload.graphs())
    with mock.patch.object(chain_planning.ChainPlanning, "run", decide):
        run = recorded(MODELS[name], steps=3, activation_budget="1GiB")
        assert_equal(run.step(), plain)
        for graph in set(fxoffload.graphs()) - alive:
            _tell_callers(run.watch, graph)
            ran.update(v.number for v in graph.variants)
        check_bytes(run, found[0])
        assert_equal(run.step(), plain)
    (plan,) = [p for p in new_plans() if p.simulation is found[0]]
    assert "recompute" in {d.action for d in plan.decisions}
    assert ran


@pytest.mark.slow
def test_what_only_recomputation_fits_into_is_recomputed() -> None:
    """The host has next to no room."""
    plain = recorded(MODELS["stack"], policy="keep_all").steps(1)[0]
    least, most = range_of_peaks("stack")
    _PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    before = compile_counts()["segments"]
    run = recorded(MODELS["stack"], activation_budget=(least + 2 * most) // 3, host_budget="1KiB")
    compiled = compile_counts()["segments"] - before  # of the two graphs
    for _ in range(3):
        assert_equal(run.step(), plain)
    (plan,) = new_plans()
    assert plan.predicted_peak_bytes <= plan.activation_budget < plan.baseline_peak_bytes
    assert "recompute more" in plan.summary
    assert compile_counts()["segments"] > before + compiled
    assert {d.action for d in plan.decisions} >= {"keep", "recompute"}
    assert fxoffload.Plan.from_json(plan.to_json()).decisions == plan.decisions
    # Without it the budget cannot be met.
    torch.compiler.reset()
    run = recorded(
        MODELS["stack"],
        activation_budget=plan.activation_budget,
        host_budget="1KiB",
        disable=("tape_recompute",),
    )
    with pytest.warns(UserWarning, match="expected an activation_budget of at least"):
        run.step()


def test_where_only_variants_meet_the_budget_a_step_waits_for_them() -> None:
    """As on a GPU, where plans are made while steps run."""
    least, most = range_of_peaks("stack")
    may_end, run_planning = threading.Event(), chain_planning.ChainPlanning.run

    def run_slowly(planning: chain_planning.ChainPlanning) -> Any:
        assert may_end.wait(60)
        return run_planning(planning)

    with (
        mock.patch.object(engine_for(CPU).calls.plans, "in_background", True),
        mock.patch.object(chain_planning.ChainPlanning, "run", run_slowly),
    ):
        budget = (least + 2 * most) // 3
        run = recorded(MODELS["stack"], activation_budget=budget, host_budget="1KiB", inner="aot_eager")
        chains = [t.chains for t in engine_for(CPU).calls._tracked_graphs]
        threading.Timer(0.1, may_end.set).start()
        run.step()
        (chain,) = [c for found in chains for c in found.all if c.plan]
    assert may_end.is_set() and chain.plan is not None and chain.awaited is None
    assert any(choice.variant for choice in chain.plan.choices) and chain.meanwhile is None
    (plan,) = new_plans()
    assert "recompute more" in plan.summary and plan.predicted_peak_bytes <= budget


@pytest.mark.parametrize("limits", [{"activation_budget": 1}, {"max_slowdown": 0.02}])
def test_only_a_budget_makes_a_step_wait(limits: dict[str, Any]) -> None:
    awaited: list[bool] = []

    def planner(tracked_graphs: Any, *_: Any) -> None:
        awaited.append(any(chain.awaited for tracked in tracked_graphs for chain in tracked.chains.all))

    with (
        mock.patch.object(engine_for(CPU).calls.plans, "in_background", True),
        mock.patch.object(step_member, "plan_chain", planner),
    ):
        recorded(MODELS["stack"], inner="aot_eager", steps=3, **limits)
        for thread in threading.enumerate():
            if thread.name == "fxoffload-chain-plan":
                thread.join()
    assert awaited == ["activation_budget" in limits]


def test_a_variant_that_cannot_be_compiled() -> None:
    """The plan for the graphs as they were compiled is followed instead."""
    plain = recorded(MODELS["stack"], policy="keep_all").steps(1)[0]
    run = recorded(MODELS["stack"], activation_budget=1)
    with (
        mock.patch("fxoffload.compiler.variant_maker.VariantMaker._compile", _raise),
        pytest.warns(UserWarning, match="on purpose"),
    ):
        assert_equal(run.step(), plain)
    moved = moved_by(run)
    assert moved > 0
    assert moved_by(run) == moved
    assert not any(g.variants for g in fxoffload.graphs())
    gc.collect()
    (plan,) = new_plans()
    assert "variants could not be compiled" in plan.summary
    assert plan.predicted.bytes_offloaded == moved
    assert "recompute" not in {d.action for d in plan.decisions}


@pytest.mark.parametrize(("inner", "fails"), [slow("aot_eager", False), ("aot_eager", True), slow("inductor", False)])
def test_variants_are_compiled_while_steps_run(inner: str, fails: bool) -> None:
    """As on a GPU. Until then steps follow a plan for the graphs as they are, and draw the same random numbers."""
    plain = recorded(MODELS["stack"], policy="keep_all", inner=inner).step()
    begun, may_end, compile_variant = threading.Event(), threading.Event(), VariantMaker._compile

    def decide(planning: Any) -> Schedule:
        ways = planning.chain_search
        planning.compiled = replace(planning.compiled, schedule=planning.compiled.scheduler.smallest())
        planning.choice = ways.with_variants(tuple(ways._variants_by_kind[kind][-1] for kind in ways._kinds))
        return planning.choice.scheduler.smallest()

    def slowly(*args: Any) -> Any:
        with dynamo_utils.preserve_rng_state():  # as Inductor does
            begun.set()
            assert may_end.wait(60)
            return _raise() if fails else compile_variant(*args)

    with (
        mock.patch.object(engine_for(CPU).calls.plans, "in_background", True),
        mock.patch.object(chain_planning.ChainPlanning, "run", decide),
        mock.patch.object(VariantMaker, "_compile", slowly),
        pytest.warns(UserWarning, match="on purpose") if fails else contextlib.nullcontext(),
    ):
        torch.compiler.reset()
        run = recorded(MODELS["stack"], inner=inner)
        assert_equal(run.step(), plain)
        assert begun.wait(60)
        (chain,) = [c for t in engine_for(CPU).calls._tracked_graphs for c in t.chains.all if c.meanwhile]
        assert chain.plan is None and moved_by(run) > 0
        torch.manual_seed(3)
        state = torch.get_rng_state()
        may_end.set()
        for thread in threading.enumerate():
            if thread.name == "fxoffload-chain-plan":
                thread.join()
        assert torch.equal(torch.get_rng_state(), state)
        for _ in range(3):
            assert_equal(run.step(), plain)
    assert chain.plan is not None and chain.plan.prepare is chain.meanwhile is None
    assert any(c.variant for c in chain.plan.choices) != fails


class InPlace(nn.Module):
    """Frozen layers, whose input autograd does not need, and a caller that adds to it."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Frozen() for _ in range(4))
        self.embed = nn.Parameter(torch.randn(16))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.embed
        for layer in self.layers:
            if self.writes:
                x += 0.1 * layer(x)
            else:
                x = x + 0.1 * layer(x)
        return x


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("writes", [False, True])
def test_an_input_that_the_program_modifies_is_saved_by_no_variant(writes: bool) -> None:
    """As compiled the graphs do not save it, so the program may."""
    plain = recorded(lambda: InPlace(writes), policy="keep_all").steps(1)[0]
    run = recorded(lambda: InPlace(writes), activation_budget=1, host_budget="1KiB", steps=3)
    for _ in range(3):
        assert_equal(run.step(), plain)
    (plan,) = new_plans()
    assert ("recompute more" in plan.summary) is not writes


def test_layers_of_one_graph_that_move_nothing_are_planned() -> None:
    """While they are recorded the host has no room: what waits for its backward is known all the same."""
    model = InPlace(False)
    run = Run(per_layer(model, activation_budget=1, host_budget="1B"), batch(length=LENGTH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.steps(4)
    (plan,) = new_plans()
    assert "4 calls of 1 graph" in plan.summary


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_first_steps_take_the_least_that_offloading_does(name: str) -> None:
    """Under a budget; without one only in the second step, in which the allocator is read."""

    def first_peaks(**changes: Any) -> list[int]:
        torch.compiler.reset()
        run = Run(per_layer(MODELS[name](), **changes), batch(length=LENGTH))
        found = []
        for _ in range(2):
            run.step()
            found.append(max(s.in_flight_bytes + s.ahead_bytes for s in run.watch.seen))
        return found

    # Only the caller's tensors are still held after the segment that read them.
    least, (first, second) = first_peaks(activation_budget="1GiB"), first_peaks()
    assert 2 * max(least) <= first and second == least[1]


# -- plans, and when they are made -------------------------------------------------------------------------------------


def in_between(name: str = "stack") -> int:
    """A budget under which some is kept and some offloaded."""
    least, most = range_of_peaks(name)
    _PLANS_BEFORE.update(p.graph for p in fxoffload.plans())
    return (least + most) // 2


def moved_by(run: Run) -> int:
    """Bytes that one step offloads."""
    fxoffload.reset_stats()
    run.step()
    assert_nothing_held()
    return fxoffload.stats().bytes_offloaded


@pytest.mark.slow
def test_where_no_sizes_vary_all_of_the_budget_is_for_the_plan() -> None:
    recorded(MODELS["stack"], steps=3, activation_budget=in_between())
    (first,) = new_plans()
    _PLANS_BEFORE.add(first.graph)
    torch.compiler.reset()
    recorded(MODELS["stack"], steps=3, activation_budget=first.predicted_peak_bytes)
    (plan,) = new_plans()
    assert plan.predicted_peak_bytes > first.predicted_peak_bytes * 15 / 16
    assert "left" not in plan.summary


@pytest.mark.slow
def test_the_third_step_follows_the_plan_and_nothing_is_compiled() -> None:
    budget = in_between()
    run = recorded(MODELS["stack"], steps=1, activation_budget=budget)
    everything = moved_by(run)
    assert not new_plans()
    counts = compile_counts()
    moved = [moved_by(run) for _ in range(3)]
    assert moved[0] == moved[1] == moved[2] < everything
    assert {**compile_counts(), "segments": 0} == {**counts, "segments": 0}
    (plan,) = new_plans()
    assert plan.predicted.bytes_offloaded == moved[0]
    assert "over 5 calls of 2 graphs" in plan.summary
    assert {layer for d in plan.decisions for layer in d.layers} == {f"call {k}" for k in range(5)}
    assert plan.activation_budget == budget
    assert "5 calls" in str(plan)
    assert fxoffload.Plan.from_json(plan.to_json()).predicted == plan.predicted


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_step_may_be_profiled_before_training(in_background: bool) -> None:
    """Three steps: two are recorded, the third follows the plan. The next one does too, with the numbers of any."""
    plain = recorded(MODELS["stack"], policy="keep_all").steps(1)[0]
    budget = in_between()
    torch.compiler.reset()
    run = Run(per_layer(MODELS["stack"](), activation_budget=budget), batch(length=LENGTH))
    count = 0

    def step(add: int) -> None:
        nonlocal count
        count += add
        loss_of(run.model(run.x)).backward()
        torch.rand(1)

    torch.manual_seed(3)
    generator = torch.get_rng_state()
    with mock.patch.object(engine_for(CPU).calls.plans, "in_background", in_background):
        (plan,) = fxoffload.profile_step(step, add=1)
    assert torch.equal(torch.get_rng_state(), generator)
    assert count == 3
    fxoffload.reset_stats()
    assert_equal(run.step(), plain)
    assert fxoffload.stats().bytes_offloaded == plan.predicted.bytes_offloaded > 0
    assert fxoffload.profile_step(step, 1) == [] and count == 4


@pytest.mark.slow
def test_the_plan_goes_with_its_graphs() -> None:
    before = {g.index for g in fxoffload.graphs()}  # others may have left some
    run = recorded(MODELS["stack"], steps=3)
    assert new_plans()
    del run
    WATCHES.clear()
    torch.compiler.reset()
    gc.collect()
    assert not new_plans()
    assert {g.index for g in fxoffload.graphs()} <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharded", "disable", "paces"), [(True, (), True), (True, ("pacing",), False), (False, (), False)]
)
def test_calls_under_collectives_are_paced(
    monkeypatch: pytest.MonkeyPatch, sharded: bool, disable: tuple[str, ...], paces: bool
) -> None:
    """Tiny layers, for once taken to be worth it."""
    monkeypatch.setattr(pacing, "_LEAST_MS", 0.0)
    monkeypatch.setattr(pacing, "_BUSY", 0.0)
    monkeypatch.setattr(pacing, "fsdp2_is_used", lambda: sharded)
    paced: list[str] = []
    monkeypatch.setattr(engine_for(CPU).streams, "pace", lambda: paced.append("pace"), raising=False)
    run = recorded(MODELS["stack"], activation_budget=1, disable=disable)
    assert not paced, "nothing is paced before there is a plan"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(8):  # the first of them are measured, and planned again
            paced.clear()
            run.step()
            assert len(paced) == (len(run.model.layers) if paces else 0)  # type: ignore[arg-type]


@pytest.mark.slow
def test_without_options_the_least_peak_within_a_slowdown() -> None:
    run = recorded(lambda: Stack(8), steps=3)
    (plan,) = new_plans()
    assert plan.max_slowdown == 0.02 and plan.source == "default"
    assert plan.predicted_step_ms <= plan.baseline_step_ms * 1.02
    assert moved_by(run) == plan.predicted.bytes_offloaded


def test_a_budget_that_everything_fits_into_moves_nothing() -> None:
    run = recorded(MODELS["stack"], activation_budget="1GiB")
    assert moved_by(run) == 0
    (plan,) = new_plans()
    assert plan.predicted_peak_bytes == plan.baseline_peak_bytes


@pytest.mark.slow
def test_a_budget_that_nothing_fits_into_warns_once_and_takes_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    around = 512
    for module in (chain_planning, graph_planning):
        monkeypatch.setattr(module, "around_bytes", lambda device: around)
    run = recorded(MODELS["stack"], activation_budget=1)
    with pytest.warns(UserWarning, match="expected an activation_budget of at least"):
        run.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step()
    (plan,) = new_plans()
    assert plan.predicted_peak_bytes + around == plan.smallest_budget_bytes
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes


def test_a_plan_made_on_a_thread_of_its_own_is_followed_from_a_later_step_on() -> None:
    """As on a GPU: without a budget nothing waits for it."""
    release = threading.Event()

    def planner(*args: Any) -> Any:
        assert release.wait(60)
        return plan_chain.plan_chain(*args)

    calls = engine_for(CPU).calls
    with mock.patch.object(calls.plans, "in_background", True), mock.patch.object(step_member, "plan_chain", planner):
        run = recorded(MODELS["stack"], max_slowdown=1e-9)
        everything = moved_by(run)
        assert everything > 0
        assert moved_by(run) == everything
        release.set()
        for thread in threading.enumerate():
            if thread.name == "fxoffload-chain-plan":
                thread.join()
        moved = moved_by(run)
        (plan,) = new_plans()
        assert moved == plan.predicted.bytes_offloaded < everything


def test_a_plan_that_fails() -> None:
    run = recorded(MODELS["stack"], activation_budget="1GiB")
    with (
        mock.patch.object(chain_planning, "Scheduler", _raise),
        pytest.warns(UserWarning, match="goes on without a plan: RuntimeError: on purpose"),
    ):
        moved = moved_by(run)
    assert moved_by(run) == moved > 0
    assert not new_plans()


def test_graphs_of_different_options_are_not_planned() -> None:
    model = Stack(4)
    for i, layer in enumerate(model.layers):
        layer.compile(backend="fxoffload", options=options(activation_budget="1GiB" if i else "2GiB"))
    run = Run(model, batch(length=LENGTH))
    run.steps(3)
    assert moved_by(run) > 0
    assert not new_plans()


@pytest.mark.slow_except("planner", "prefetch")
@pytest.mark.parametrize("piece", ["tape_plan", "planner", "prefetch", "cross_graph_prefetch"])
def test_pieces_that_switch_it_off(piece: str) -> None:
    run = recorded(MODELS["stack"], activation_budget="1GiB", disable=(piece,))
    everything = moved_by(run)
    assert everything > 0
    assert moved_by(run) == everything
    assert not new_plans()


def test_other_policies_are_not_planned() -> None:
    run = recorded(MODELS["stack"], policy="offload_all")
    assert moved_by(run) == moved_by(run) > 0
    assert not new_plans()


@pytest.mark.slow
def test_a_policy_for_a_while() -> None:
    """It outweighs the plan, which is followed again afterwards."""
    run = recorded(MODELS["stack"], activation_budget=in_between())
    planned = moved_by(run)
    with fxoffload.override_policy("keep_all"):
        assert [moved_by(run) for _ in range(3)] == [0, 0, 0]
    with fxoffload.override_policy("offload_all"):
        assert moved_by(run) > planned
    assert moved_by(run) == planned
    assert len(new_plans()) == 1


# -- steps that are not the chain --------------------------------------------------------------------------------------


def plain_run(name: str) -> Run:
    return recorded(MODELS[name], policy="keep_all")


class Paths(nn.Module):
    """Layers of several kinds; which ones run is chosen from outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Gate(), Block(), Gate(), Block()])
        self.path = (0, 1, 2, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.path:
            x = self.layers[i](x)
        return x


def compare(planned: Run, plain: Run, *, do: Callable[[Run], Any]) -> None:
    """``do`` has the same effects with and without a plan, and leaves nothing behind."""
    found, expected_ = do(planned), do(plain)
    if found is not None:
        assert_equal(found, expected_)
    assert_equal(effects(planned.model), effects(plain.model))
    assert_nothing_held()


def test_another_path_falls_back_and_comes_back() -> None:
    """The one path is planned; others run without a plan; a path that stays is planned anew."""
    plain = Run(per_layer(Paths(), policy="keep_all"), batch(length=LENGTH))
    run = Run(per_layer(Paths(), activation_budget="1GiB"), batch(length=LENGTH))
    found = []

    def step(path: Sequence[int]) -> Callable[[Run], Any]:
        def do(on: Run) -> Any:
            on.model.path = path  # type: ignore[assignment]
            return on.step()

        return do

    whole, other, shorter, longer = (0, 1, 2, 3, 4), (0, 1, 3, 3, 4), (0, 1, 2), (0, 1, 2, 3, 4, 4)
    for path in (whole, whole, whole, other, whole, shorter, whole, longer, whole, other, other, other, other, other):
        fxoffload.reset_stats()
        compare(run, plain, do=step(path))
        found.append(fxoffload.stats().bytes_offloaded)
    keeps = [moved == 0 for moved in found]
    #               recorded       planned             back         back         back         recorded      planned
    assert keeps == [False, False, True, False, True, True, True, False, True, False, False, False, False, True]


def test_microbatches() -> None:
    """Two forwards, then two backwards: a chain of its own, planned once it repeats."""

    def two(on: Run) -> None:
        on.model.zero_grad(set_to_none=True)
        losses = [loss_of(on.model(x)) for x in (on.x, batch(1, length=LENGTH))]
        for loss in reversed(losses):
            loss.backward()

    def two_in_order(on: Run) -> None:
        on.model.zero_grad(set_to_none=True)
        losses = [loss_of(on.model(x)) for x in (on.x, batch(1, length=LENGTH))]
        for loss in losses:
            loss.backward()

    def pipelined(on: Run) -> None:
        on.model.zero_grad(set_to_none=True)
        losses = [loss_of(on.model(x)) for x in (on.x, batch(1, length=LENGTH))]
        losses.pop(0).backward()
        losses.append(loss_of(on.model(on.x)))
        for loss in losses:
            loss.backward()

    plain = plain_run("stack")
    run = recorded(MODELS["stack"], steps=3, activation_budget="1GiB")
    assert len(new_plans()) == 1
    for do in (
        pipelined,
        Run.step,
        two,
        two_in_order,
        Run.step,
        two_in_order,
        two_in_order,
        two_in_order,
        two,
        two,
        two,
        two,
    ):
        compare(run, plain, do=do)  # type: ignore[arg-type]
    assert [p.label for p in new_plans()] == ["a step over 10 calls of 2 graphs"]


@pytest.mark.slow
def test_steps_that_raise() -> None:
    plain = plain_run("stack")
    run = recorded(MODELS["stack"], steps=3, activation_budget=in_between())
    planned = moved_by(run)

    def raise_in_forward(on: Run) -> None:
        on.model.between = lambda i, x: x if i < 2 else _raise(x)
        with pytest.raises(RuntimeError, match="on purpose"):
            on.step()
        on.model.between = None  # type: ignore[assignment]
        on.model.zero_grad(set_to_none=True)

    def raise_in_backward(on: Run) -> None:
        x = on.x.clone().requires_grad_()
        found = x
        for i, layer in enumerate(on.model.layers):  # type: ignore[arg-type]
            found = layer(found)
            if i == 2:
                found.register_hook(_raise)
        with pytest.raises(RuntimeError, match="on purpose"):
            found.sum().backward()
        on.model.zero_grad(set_to_none=True)

    for do in (raise_in_backward, Run.step, Run.step, raise_in_forward, Run.step, Run.step, Run.step):
        compare(run, plain, do=do)  # type: ignore[arg-type]
    assert moved_by(run) == planned


def _raise(*_: Any, **__: Any) -> Any:
    raise RuntimeError("on purpose")


@pytest.mark.slow
def test_forwards_without_a_backward() -> None:
    plain = plain_run("stack")
    run = recorded(MODELS["stack"], steps=3, activation_budget=in_between())
    planned = moved_by(run)

    def without_grad(on: Run) -> dict[str, Tensor]:
        on.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            return {"out": on.model(on.x)}

    def dropped(on: Run) -> dict[str, Tensor]:
        on.model.zero_grad(set_to_none=True)
        return {"out": on.model(on.x).detach().clone()}

    for do in (without_grad, Run.step, dropped, dropped, dropped, Run.step, Run.step):
        compare(run, plain, do=do)  # type: ignore[arg-type]
    assert moved_by(run) == planned


def follows(model: nn.Module, x: Tensor) -> bool:
    """Whether a training step follows a plan to its end."""
    model(x).square().mean().backward()
    step = engine_for(CPU).calls._step
    assert step is not None
    return step.began is StepState.FOLLOWING and step.state is StepState.COMPLETE


@pytest.mark.slow_except("40")
@pytest.mark.parametrize("dropped", [1, 40])
def test_forwards_without_a_backward_are_no_steps_that_were_watched(dropped: int) -> None:
    """A validation pass that forgot no_grad, before training."""
    model = per_layer(Stack(3), activation_budget="1GiB")
    for _ in range(dropped):
        model(batch())
    assert [follows(model, batch()) for _ in range(5)] == [False, False, True, True, True]


def test_a_forward_that_raises_half_way_costs_no_other_step() -> None:
    """All layers are calls of one graph: nothing but saved values tells that the next forward is another one."""
    model = per_layer(Stack(4), activation_budget="1GiB")
    x = batch().requires_grad_()
    for _ in range(3):
        follows(model, x)
    found = []
    for _ in range(6):
        model.between = lambda i, x: x if i < 1 else _raise(x)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x)
        model.between = None  # type: ignore[assignment]
        found.append(follows(model, x))
    assert found == [True] * 6
    (tracked,) = {call.tracked() for call in engine_for(CPU).calls._step.calls}  # type: ignore[union-attr]
    assert tracked is not None
    assert [chain.num_plans for chain in tracked.chains.all] == [1]


class Linear(nn.Module):
    """Its graph saves nothing but inputs."""

    def __init__(self, width: int, *_: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_forwards_without_a_backward_of_layers_that_save_only_inputs() -> None:
    model = per_layer(Stack(4, block=Linear), activation_budget="1GiB")
    for _ in range(4):
        follows(model, batch())
    for _ in range(50):
        model(batch())
    step = engine_for(CPU).calls._step
    assert step is not None and len(step.calls) == 4
    assert all(follows(model, batch()) for _ in range(4))


class Tanh(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).tanh() + self.up(x).exp()


class Branches(nn.Module):
    """Steps of two kinds, through the same layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.other = Gate(), Tanh()
        self.layers = Stack(6).layers
        self.uses_other = False

    def forward(self, x: Tensor) -> Tensor:
        x = (self.other if self.uses_other else self.first)(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_two_chains_with_the_same_layers_are_planned_one_after_the_other() -> None:
    """A graph has few variants: what the first plan takes, the second one has to know of."""
    model = Branches()
    for description in (model.first, model.other, *model.layers):
        description.compile(backend="fxoffload", options=options(activation_budget=1, host_budget="1KiB"))
    for model.uses_other in (False, True):  # compiles everything
        model(batch(length=LENGTH))
    run = chain_planning.ChainPlanning.run
    both, at_once = threading.Barrier(2), []

    def slow(planning: Any) -> Schedule:
        found = run(planning)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(2)  # time for the other one to choose too, if it may
            at_once.append(True)
        return found

    with (
        mock.patch.object(engine_for(CPU).calls.plans, "in_background", True),
        mock.patch.object(chain_planning.ChainPlanning, "run", slow),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", message="fxoffload could not plan")
        for i in range(6):
            model.uses_other = i % 4 > 1
            model(batch(length=LENGTH)).square().mean().backward()
        for thread in threading.enumerate():
            if thread.name == "fxoffload-chain-plan":
                thread.join()
    assert not at_once
    assert len(new_plans()) == 2


@pytest.mark.slow
def test_a_graph_that_is_kept() -> None:
    """``retain_graph``: the second backward of the same step finds its values, and gets the same bits."""

    def twice(on: Run) -> None:
        on.model.zero_grad(set_to_none=True)
        loss = loss_of(on.model(on.x))
        loss.backward(retain_graph=True)
        loss.backward()

    plain = plain_run("stack")
    run = recorded(MODELS["stack"], steps=3, activation_budget=in_between())
    planned = moved_by(run)
    for do in (twice, Run.step, twice, twice, twice, Run.step):
        compare(run, plain, do=do)  # type: ignore[arg-type]
    assert moved_by(run) == planned


@pytest.mark.slow
def test_hooks_on_saved_tensors() -> None:
    def hooked(on: Run) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return on.step()

    plain = plain_run("stack")
    run = recorded(MODELS["stack"], steps=3, activation_budget=in_between())
    planned = moved_by(run)
    for do in (hooked, Run.step, hooked, hooked, Run.step):
        compare(run, plain, do=do)
    assert moved_by(run) == planned


@pytest.mark.slow
def test_two_models_in_turn() -> None:
    """Each is a chain of its own, which begins with a graph of its own."""
    first = recorded(MODELS["stack"], activation_budget="1GiB")
    second = Run(per_layer(Paths(), activation_budget="1GiB"), batch(length=LENGTH))
    second.model.path = (1, 2, 3, 4)  # type: ignore[assignment]
    for run in (second, first, second, first, second):
        run.step()
    assert moved_by(first) == moved_by(second) == 0
    assert len(new_plans()) == 2


def test_models_whose_forwards_and_backwards_interleave() -> None:
    """An actor and a critic. Where both go forward first, they are one chain, whichever goes backward first."""
    actor = Run(per_layer(Stack(3), activation_budget="1GiB"), batch(length=LENGTH))
    critic = Run(per_layer(Paths(), activation_budget="1GiB"), batch(1, length=LENGTH))
    critic.model.path = (1, 2, 3, 4)  # type: ignore[assignment]

    def step(order: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for run in (actor, critic):
            run.model.zero_grad(set_to_none=True)
        losses: dict[str, Tensor] = {}
        for one in order:
            run = actor if one.lower() == "a" else critic
            if one.islower():
                losses[one] = loss_of(run.model(run.x))
            else:
                losses[one.lower()].backward()
        for name, run in (("actor", actor), ("critic", critic)):
            found |= {f"{name} {n}": v for n, v in effects(run.model).items()}
        return found

    moved = []
    with fxoffload.override_policy("keep_all"):
        plain = step("abAB")
    orders = ["abAB"] * 3 + ["abBA", "abAB", "aAbB", "abAB"] + ["abBA"] * 5
    for order in orders:
        fxoffload.reset_stats()
        assert_equal(step(order), plain)
        assert_nothing_held()
        moved.append(fxoffload.stats().bytes_offloaded > 0)
        assert fxoffload.stats().num_wrong_predictions <= 1
        if len(moved) in (3, 12):
            assert [p.label for p in new_plans()] == ["a step over 7 calls of 4 graphs"]
    # Forwards follow the plan whatever order the backwards take; a backward in between ends the chain. After two steps
    # in the other order, that one is observed and planned.
    assert moved == [True, True, False, False, False, True, False, False, False, True, True, False]


@pytest.mark.slow
def test_each_length_that_is_compiled_has_a_plan_of_its_own() -> None:
    lengths = (20, 24, 28)
    model = Stack(4)
    for layer in model.layers:
        layer.compile(backend="fxoffload", dynamic=False, options=options(activation_budget="1GiB"))
    run = Run(model, batch(length=LENGTH))
    plain = {}
    for length in lengths:
        run.x = batch(length=length)
        with fxoffload.override_policy("keep_all"):
            plain[length] = run.step()
    moved = []
    for length in lengths * 4:
        run.x = batch(length=length)
        fxoffload.reset_stats()
        assert_equal(run.step(), plain[length])
        assert_nothing_held()
        moved.append(fxoffload.stats().bytes_offloaded > 0)
    assert moved == [True] * 6 + [False] * 6
    assert len(new_plans()) == len(lengths)


def test_gradients_that_add_up() -> None:
    """The first step's gradients stay; later ones are added to them and die: the plan counts what stays longest."""

    def add(on: Run) -> None:
        loss_of(on.model(on.x)).backward()

    plain = plain_run("stack")
    run = recorded(MODELS["stack"], activation_budget="1GiB", steps=1)
    for do in (add, add, add):
        compare(run, plain, do=do)
    (plan,) = new_plans()
    gradients = sum(p.numel() * 4 for layer in run.model.layers for p in layer.parameters())  # type: ignore[union-attr]
    assert plan.simulation is not None
    assert plan.simulation.boundaries[-1].gradient_bytes > gradients / 2


# -- with FSDP2 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    """Of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fully_sharded_layers() -> None:
    """Gradients are reduced and dropped layer by layer: the plan knows, and a budget that would not hold them all is
    met."""

    def sharded(**changes: Any) -> Run:
        torch.compiler.reset()
        model = per_layer(Stack(5), **changes)
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return Run(model, batch(length=LENGTH))

    def gradients(run: Run) -> dict[str, Tensor]:
        run.step()
        return {n: p.grad.full_tensor().clone() for n, p in run.model.named_parameters()}  # type: ignore[union-attr]

    plain = gradients(sharded(policy="keep_all"))
    run = sharded(activation_budget=120_000)
    for _ in range(4):
        assert_equal(gradients(run), plain)
    (plan,) = new_plans()
    assert 0 < moved_by(run) == plan.predicted.bytes_offloaded
    assert plan.predicted_peak_bytes <= 120_000
    assert plan.predicted_peak_bytes == plan.predicted.peak_without_gradients_bytes


def test_what_a_policy_wants_on_the_host_goes_there_in_every_step() -> None:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            contexts = functools.partial(create_selective_checkpoint_contexts, to_host)
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

    def to_host(_context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        wanted = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_CPU_OFFLOAD if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    torch.manual_seed(0)
    model = per_layer(Stack(4, block=lambda *_: Checkpointed()), activation_budget="1GiB")
    moved = []
    for step in range(4):
        fxoffload.reset_stats()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(batch()).square().mean().backward()
        told = [str(w.message) for w in caught if "can be planned together" in str(w.message)]
        assert bool(told) == (step == 0)
        assert all("found one that cannot: a policy says MUST_CPU_OFFLOAD" in text for text in told)
        moved.append(fxoffload.stats().bytes_offloaded)
    assert min(moved) > 0
    assert not new_plans()


@pytest.mark.parametrize("piece", ["planner", "tape_plan"])
def test_a_budget_that_is_not_heeded_says_so(piece: str) -> None:
    with pytest.warns(UserWarning, match=f"found one that cannot: {piece}: switched off. In steps with it all"):
        recorded(MODELS["stack"], activation_budget="40KiB", disable=(piece,))


def test_a_chain_that_cannot_be_planned_does_not_stand_in_another_s_way() -> None:
    model = per_layer(Stack(4), activation_budget="1GiB")
    for _ in range(3):  # one call alone
        model.layers[0](batch()).square().mean().backward()  # type: ignore[operator,index]
    assert not new_plans()
    for _ in range(4):
        model(batch()).square().mean().backward()
    assert len(new_plans()) == 1


def test_forwards_without_a_backward_are_not_remembered() -> None:
    model = per_layer(Stack(2))
    model(batch()).square().mean().backward()
    gate = Gate()
    gate.compile(backend="fxoffload", options=options())
    model(batch())
    for _ in range(300):
        gate(batch())
    step = engine_for(torch.device("cpu")).calls._step
    assert step is not None and len(step.calls) <= 64


def test_watching_that_fails_harms_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = per_layer(Stack(2))
    model(batch()).square().mean().backward()
    expected_grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    monkeypatch.setattr(step_memory, "StorageRef", _raise)
    for _ in range(3):
        model(batch()).square().mean().backward()
        for p, g in zip((p for p in model.parameters() if p.grad is not None), expected_grads, strict=True):
            assert torch.equal(p.grad, g)  # type: ignore[arg-type]
        model.zero_grad()
    assert not new_plans()


def test_a_gpu_s_budget_leaves_room_for_what_runs_between_the_graphs() -> None:
    gib = 1 << 30
    assert chain_planning.bytes_for_graphs(gib, torch.device("cpu")) == gib
    assert chain_planning.bytes_for_graphs(gib, torch.device("cuda")) == gib - (64 << 20)
    assert chain_planning.bytes_for_graphs(1 << 20, torch.device("cuda")) == 1  # too small: refused, not an accident


class Reducing(Block):
    """As with tensor parallelism: a collective in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(funcol.all_reduce(x, "sum", dist.group.WORLD))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", [Block, Reducing])
def test_graphs_with_collectives_have_no_variants(kind: type[Block]) -> None:
    """Ranks choose for themselves: their collectives would not be the same ones."""

    def make() -> nn.Module:
        model = Stack(3)
        model.layers = nn.ModuleList(kind() for _ in range(3))
        return model

    run = recorded(make, activation_budget="1GiB", steps=1)
    step = engine_for(CPU).calls._step
    assert step is not None
    descriptions = [tracked.description for c in step.calls if (tracked := c.tracked()) is not None]
    assert len(descriptions) == 3
    assert all((p.variant_maker is None) is (kind is Reducing) for p in descriptions)
    del run
