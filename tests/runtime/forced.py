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
from fxoffload.compiler.recipe import Recipe, VariantDraft
from fxoffload.compiler.tape_parts import Part
from fxoffload.runtime.bundle import Bundle
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.steps.calls import Site, StepCalls
from fxoffload.runtime.steps.chains import Chains, Following
from fxoffload.runtime.windows import Choice
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
    """See the module docstring. Two variants of each graph are drafted: 1 computes a little again, 2 the most."""

    def __init__(self, model: nn.Module | None = None, *, compiles: bool = True, **changes: Any) -> None:
        self.model = model if model is not None else Layers()
        torch.manual_seed(1)
        self.x = torch.randn(2, LENGTH, 16)
        self.drafts: dict[tuple[Site, int], VariantDraft] = {}
        sites: list[Site] = []
        self.order: list[Site] = []
        make, begins = StepCalls.site, Site.forward_begins

        def site(calls: StepCalls) -> Site:
            sites.append(make(calls))
            return sites[-1]

        def forward_begins(site: Site, args: Sequence[Any]) -> None:
            self.order.append(site)
            begins(site, args)

        options = rehearsal(policy="auto", **changes)
        for layer in self.model.layers:  # type: ignore[union-attr]
            layer.compile(backend="fxoffload", options=options)
        with mock.patch.object(StepCalls, "site", site), mock.patch.object(Site, "forward_begins", forward_begins):
            self.step()
        self.first = self.order[0]
        for one in dict.fromkeys(self.order):
            points = recipe_of(one).points()
            for choice in (points[1], points[-1]):
                draft = recipe_of(one).draft(choice)
                assert draft is not None
                self.drafts[one, recipe_of(one).add(draft)] = draft
        if compiles:
            self.compile()

    def compile(self) -> None:
        """All variants."""
        for site, number in self.drafts:
            recipe_of(site).compile(number)

    @property
    def graphs(self) -> list[CompiledGraph]:
        """Distinct ones."""
        return [part_of(s).graph for s in dict.fromkeys(self.order)]

    def plan(self, variants: Sequence[int], *, offload: bool, **changes: Any) -> Following:
        """Of a step whose calls run these variants."""
        order = [self.order[i % len(self.order)] for i in range(len(variants))]
        choices = []
        for site, number in zip(order, variants, strict=True):
            saved = self.drafts[site, number].saved if number else part_of(site).graph.saved
            choices.append(Choice((offload,) * len(saved.candidates), None, number))
        return Following(tuple(weakref.ref(s) for s in order), tuple(choices), **changes)

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


def part_of(site: Site) -> Part:
    """What a planner knows of a graph."""
    assert isinstance(site.part, Part)
    return site.part


def recipe_of(site: Site) -> Recipe:
    """Of its variants."""
    found = part_of(site).recipe
    assert found is not None
    return found
