"""One plan for a step over several compiled graphs, from recorded steps to the bytes on the device, on the CPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxoffload
from fxoffload.compiler import tape_plan
from fxoffload.graphs import CompiledGraph
from fxoffload.passes.insert_transfers import STORAGE_KEY
from fxoffload.planner.chain import Chain, concatenate
from fxoffload.planner.link import ConstantRates
from fxoffload.planner.simulate import Simulation, simulate
from fxoffload.runtime.calls import Held
from fxoffload.runtime.engine import engine_for
from tests.planner.rehearsal import CPU, Seen, Watch, watching
from tests.support import Block, Stack, assert_equal, assert_nothing_held, batch, compile_counts, effects

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

    def concatenated(*args: Any) -> Chain:
        CHAINS.append(concatenate(*args))
        return CHAINS[-1]

    with mock.patch.object(tape_plan, "concatenate", concatenated):
        yield
    engine_for(CPU).calls._step = None
    torch.set_num_threads(threads)


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
    """Two graphs in each layer, and eager code between them that makes what they save."""

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
    """What is given to a graph is not what the step makes."""
    assert graph.backward is not None
    given = [n for n in graph.forward.graph.nodes if n.op in ("placeholder", "get_attr")]
    names = {n.name for n in given}
    watch.callers |= {f"forward/{n.meta.get(STORAGE_KEY)}" for n in given}
    watch.callers |= {
        f"backward/{n.meta.get(STORAGE_KEY)}"
        for n in graph.backward.graph.find_nodes(op="placeholder")
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


@pytest.mark.parametrize("name", MODELS)
def test_every_byte(name: str) -> None:
    """A budget between the least peak and that of keeping everything: some is kept, some is offloaded, what is on the
    device is what was simulated, and no bit of a gradient changes."""
    least, most = range_of_peaks(name)
    assert least < most
    before = {p.graph for p in new_plans()}
    budget = (least + most) // 2
    run = recorded(MODELS[name], activation_budget=budget)
    counts = compile_counts()
    plain = recorded(MODELS[name], policy="keep_all").steps(1)[0]
    for _ in range(3):
        fxoffload.reset_stats()
        assert_equal(run.step(), plain)
        assert_nothing_held()
        stats = fxoffload.stats()
        (plan,) = [p for p in new_plans() if p.graph not in before]
        simulation = plan.simulation
        assert simulation is not None
        assert seen(run) == expected(CHAINS[-1], simulation)
        assert (
            stats.bytes_offloaded,
            stats.bytes_reloaded,
            stats.bytes_reclaimed,
            stats.num_prefetch_misses,
        ) == (
            simulation.bytes_offloaded,
            simulation.bytes_reloaded,
            simulation.bytes_reclaimed,
            simulation.num_prefetch_misses,
        )
    assert compile_counts()["frames"] >= counts["frames"]
    assert plan.predicted_peak_bytes <= budget < plan.baseline_peak_bytes
    assert 0 < simulation.bytes_offloaded
    actions = {d.action for d in plan.decisions}
    assert {"keep", "offload"} <= actions
