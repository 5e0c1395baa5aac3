"""A model whose layers are compiled each on its own, and steps in which every call runs the variant that it is told."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler.chain_graphs import GraphDescription
from fxoffload.compiler.variant_maker import PlannedVariant, VariantMaker
from fxoffload.runtime.bundle import Bundle
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.tracker.chains import ChainPlan, Chains
from fxoffload.runtime.tracker.step_tracker import StepTracker
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.step.choice import Choice
from tests.support import Observed, effects, rehearsal

CPU = torch.device("cpu")
LENGTH = 12


class Layer(nn.Module):
    """Attention and an MLP. ``gate``: it returns what its own backward needs."""

    def __init__(self, width: int = 16, *, gate: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(self.first(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return x.sigmoid() if self.gate else x


class Layers(nn.Module):
    """Some of them in a row."""

    def __init__(self, count: int = 3, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(**changes) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The last one's output."""
        for layer in self.layers:
            x = layer(x)
        return x


@contextmanager
def bundles() -> Iterator[list[weakref.ref[Bundle]]]:
    """All that are made meanwhile, not held."""
    found: list[weakref.ref[Bundle]] = []
    make = Bundle.__init__

    def init(bundle: Bundle, *args: Any) -> None:
        make(bundle, *args)
        found.append(weakref.ref(bundle))

    with mock.patch.object(Bundle, "__init__", init):
        yield found


class Forced:
    """See the module docstring. Two variants of each graph are partitioned: 1 recomputes a little, 2 the most."""

    def __init__(self, model: nn.Module | None = None, *, compiles: bool = True, **changes: Any) -> None:
        self.model = model if model is not None else Layers()
        torch.manual_seed(1)
        self.x = torch.randn(2, LENGTH, 16)
        self.variants: dict[tuple[TrackedGraph, int], PlannedVariant] = {}
        tracked_graphs: list[TrackedGraph] = []
        self.order: list[TrackedGraph] = []
        make, begins = StepTracker.track, TrackedGraph.forward_begins

        def track(calls: StepTracker) -> TrackedGraph:
            tracked_graphs.append(make(calls))
            return tracked_graphs[-1]

        def forward_begins(tracked: TrackedGraph, args: Sequence[Any]) -> None:
            self.order.append(tracked)
            begins(tracked, args)

        options = rehearsal(policy="auto", **changes)
        for layer in self.model.layers:  # type: ignore[union-attr]
            layer.compile(backend="fxoffload", options=options)
        with (
            mock.patch.object(StepTracker, "track", track),
            mock.patch.object(TrackedGraph, "forward_begins", forward_begins),
        ):
            self.step()
        self.first = self.order[0]
        for one in dict.fromkeys(self.order):
            points = variant_maker_of(one).points()
            for choice in (points[1], points[-1]):
                variant = variant_maker_of(one).variant(choice)
                assert variant is not None
                self.variants[one, variant_maker_of(one).add(variant)] = variant
        if compiles:
            self.compile()

    def compile(self) -> None:
        """All variants."""
        for tracked, number in self.variants:
            variant_maker_of(tracked).compile(number)

    @property
    def graphs(self) -> list[CompiledGraph]:
        """Distinct ones."""
        return [part_of(s).graph for s in dict.fromkeys(self.order)]

    def plan(self, variants: Sequence[int], *, offload: bool, **changes: Any) -> ChainPlan:
        """Of a step whose calls run these variants."""
        order = [self.order[i % len(self.order)] for i in range(len(variants))]
        choices = []
        for tracked, number in zip(order, variants, strict=True):
            saved = self.variants[tracked, number].saved if number else part_of(tracked).graph.saved
            choices.append(Choice((offload,) * len(saved.candidates), None, number))
        return ChainPlan(tuple(weakref.ref(s) for s in order), tuple(choices), **changes)

    def force(self, *variants: int, offload: bool = False, **changes: Any) -> None:
        """The next steps do so."""
        engine_for(CPU).calls._step = None
        self.chains.take(self.chains.at(()), self.plan(variants, offload=offload, **changes))

    @property
    def chains(self) -> Chains:
        """Those that begin at the first graph."""
        return self.first.chains

    def loss(self) -> Tensor:
        """Of a forward."""
        return self.model(self.x).square().mean()

    def step(self) -> Observed:
        """One training step; its effects."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        loss = self.loss()
        loss.backward()
        return {"loss": loss.detach().clone(), **effects(self.model)}


def part_of(tracked: TrackedGraph) -> GraphDescription:
    """What a planner knows of a graph."""
    assert isinstance(tracked.description, GraphDescription)
    return tracked.description


def variant_maker_of(tracked: TrackedGraph) -> VariantMaker:
    """Of its variants."""
    found = part_of(tracked).variant_maker
    assert found is not None
    return found
