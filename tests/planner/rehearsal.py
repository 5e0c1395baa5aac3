"""One step of a model on the CPU rehearsal, watched: every storage that the step holds at each segment boundary."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxoffload
from fxoffload.analysis.labels import STORAGE_KEY
from fxoffload.compiler import build
from fxoffload.planner import ConstantRates, Simulation, from_graphs, simulate
from fxoffload.runtime import outer_program
from fxoffload.runtime.engine import CopyEngine, engine_for
from fxoffload.step.choice import Choice, Windows
from fxoffload.step.offload_candidate import OffloadCandidate
from tests.capture import rehearsal_options

CPU = torch.device("cpu")
# What a simulation and the counters both have.
_MOVED = (
    "bytes_offloaded",
    "bytes_reloaded",
    "bytes_reclaimed",
    "num_prefetch_misses",
)
Decisions: TypeAlias = dict[str, bool] | str  # by name, or a policy


@dataclass(frozen=True)
class Seen:
    """Storages on the device right before a segment was called."""

    phase: str
    segment: str
    live_bytes: int
    saved_bytes: int
    in_flight_bytes: int
    ahead_bytes: int


@dataclass
class Watch:
    """Hooks at an outer program's segment boundaries. Storages are seen by weak references, and weighed by their real
    size.

    ``saved``: storage classes of the forward whose storages count as saved, filled in when the graphs are known.
    """

    seen: list[Seen] = field(default_factory=list)
    alive: dict[int, tuple[StorageWeakRef, int, str]] = field(default_factory=dict)  # cdata -> ref, bytes, class
    callers: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    phase: str = "forward"

    def clear(self) -> None:
        self.seen.clear()
        self.alive.clear()

    def see(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            self._drop_dead()
            self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes(), name))

    def _drop_dead(self) -> None:
        for key in [k for k, (ref, *_) in self.alive.items() if ref.expired()]:
            del self.alive[key]

    def look(self, segment: str) -> None:
        self._drop_dead()
        engine = engine_for(CPU)
        self.seen.append(
            Seen(
                self.phase,
                segment,
                sum(nbytes for _, nbytes, name in self.alive.values() if name not in self.callers),
                sum(nbytes for _, nbytes, name in self.alive.values() if name in self.saved),
                engine._in_flight_bytes,
                engine._ahead_bytes,
            )
        )


def items(node: fx.Node) -> list[fx.Node]:
    return [u for u in node.users if u.target is operator.getitem]


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Hooks into everything compiled and run meanwhile."""

    def watched(make: Callable[..., Any], *, is_segment: bool) -> Callable[..., Any]:
        def build(node: fx.Node, steps: Any) -> Any:
            step = make(node, steps)
            results = [(item, steps.slot(item)) for item in items(node)] if is_segment else []

            def run(slots: list[Any], call: Any) -> None:
                if is_segment:
                    watch.look(str(node.target))
                step(slots, call)
                for item, slot in results:
                    watch.see(f"{watch.phase}/{item.meta.get(STORAGE_KEY)}", slots[slot])

            return run

        return build

    def reload(engine: CopyEngine, transfer: Any, *target: Any) -> None:
        start_reload(engine, transfer, *target)
        watch.see("reloaded", transfer.there.buffer)

    start_reload = CopyEngine._reload
    with (
        mock.patch.object(CopyEngine, "_reload", reload),
        mock.patch.object(outer_program, "_segment_step", watched(outer_program._segment_step, is_segment=True)),
    ):
        yield


class Rehearsal:
    """A model, compiled once; ``run`` makes a step under some decisions and windows and returns its observations.

    Args:
        model: in training mode.
        call: the compiled model -> the caller's result.
        loss: of that -> the loss; the result is kept alive while the backward runs.
        options: other options of the rehearsal.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[Any], Any],
        loss: Callable[[Any], Tensor],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.watch = Watch()
        self.call, self.loss = call, loss
        self.model = model
        self.offload_candidates: list[OffloadCandidate] = []
        self.num_user_outputs = 0
        alive = set(fxoffload.graphs())
        with self._building(), watching(self.watch):
            self.compiled = torch.compile(model, backend="fxoffload", options=rehearsal_options(**options or {}))
            for _ in range(2):  # transformers sets flags in the first call on which the second one is compiled again
                model.zero_grad()
                self.loss(self.call(self.compiled)).backward()
        self.graph = [g for g in fxoffload.graphs() if g not in alive][-1]
        assert self.graph.backward is not None
        self.step = from_graphs(
            self.graph.forward, self.graph.backward, self.offload_candidates, num_user_outputs=self.num_user_outputs
        )
        outer = {n.name: f"forward/{n.meta.get(STORAGE_KEY)}" for n in self.graph.forward.graph.nodes}
        given = {n.name for n in self.graph.forward.graph.nodes if n.op in ("placeholder", "get_attr")}
        self.watch.callers = {outer[name] for name in given} | {
            f"backward/{n.meta.get(STORAGE_KEY)}"
            for n in self.graph.backward.graph.find_nodes(op="placeholder")
            if n.name in given
        }
        saved = {outer[n.name] for c in self.graph.saved.candidates for n in c.nodes}
        self.watch.saved = (saved - self.watch.callers) | {"reloaded"}

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Finds out what the session tells an outer program."""
        rehearsal = self

        class Recording(build.OuterProgram):
            def __init__(self, outer: fx.GraphModule, **kwargs: Any) -> None:
                super().__init__(outer, **kwargs)
                if kwargs.get("offload_candidates"):
                    rehearsal.offload_candidates = kwargs["offload_candidates"]

        original = build.run_passes

        def run_passes(steps: Any, state: Any, what: str) -> Any:
            if what == "forward":
                rehearsal.num_user_outputs = state.num_user_outputs
            return original(steps, state, what)

        with mock.patch.object(build, "OuterProgram", Recording), mock.patch.object(build, "run_passes", run_passes):
            yield

    def run(self, decisions: Decisions, windows: Windows) -> tuple[list[Seen], fxoffload.Stats]:
        """A step under decisions by name, or those of a policy, and the windows of a plan."""
        self.graph.planned = Choice(self._flags(decisions), windows)
        return self.run_policy("auto")

    def run_policy(self, policy: str) -> tuple[list[Seen], fxoffload.Stats]:
        """A step under a policy."""
        self.model.zero_grad()
        self.watch.clear()
        fxoffload.reset_stats()
        with watching(self.watch), fxoffload.override_policy(policy):
            self.watch.phase = "forward"
            out = self.call(self.compiled)
            self.watch.phase = "backward"
            self.loss(out).backward()
        del out
        return list(self.watch.seen), fxoffload.stats()

    def simulate(self, decisions: Decisions, windows: Windows) -> tuple[list[Seen], Simulation]:
        """The same on paper. What autograd gives the backward is taken off: the watch does not see it."""
        simulation = simulate(self.step, self.chosen(decisions), copies=ConstantRates(55.0, 55.0), windows=windows)
        tangents = sum(s.nbytes for s in self.step.storages if s.is_tangent and not s.is_left_out)
        seen = [
            Seen(
                b.phase,
                b.segment,
                b.live_bytes - (tangents if b.phase == "backward" else 0),
                b.saved_bytes,
                b.in_flight_bytes,
                b.ahead_bytes,
            )
            for b in simulation.boundaries
        ]
        return seen, simulation

    def agree(self, decisions: Decisions, windows: Windows) -> Simulation:
        """The step on paper, which has the bytes of the one that runs: at every segment, and of every kind of copy."""
        asked = (decisions, windows)
        seen, stats = self.run(*asked)
        expected, simulation = self.simulate(*asked)
        different = [(a, b) for a, b in zip(expected, seen, strict=True) if a != b]
        assert not different, f"{different[0]} (simulated, seen) and {len(different) - 1} more: {asked}"
        for name in _MOVED:
            found = (getattr(simulation, name), getattr(stats, name))
            assert found[0] == found[1], f"{name}: {found} (simulated, counted): {asked}"
        return simulation

    def chosen(self, decisions: Decisions) -> tuple[bool, ...]:
        """The same decisions for ``simulate``."""
        names = [c.name for c in self.graph.saved.candidates]
        return self.step.decide(dict(zip(names, self._flags(decisions), strict=True)))

    def _flags(self, decisions: Decisions) -> tuple[bool, ...]:
        """For the graph's candidates, in its order."""
        if isinstance(decisions, str):
            return tuple(self.graph.actions[decisions])
        return tuple(decisions[c.name] for c in self.graph.saved.candidates)
