"""Recomputation in a graph that a step calls once, chosen layer by layer: a real graph, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fxoffload.compiler.call_layers import CallLayers
from fxoffload.compiler.chain_graphs import GraphDescription
from fxoffload.compiler.chain_search import ChainChoice, ChainSearch
from fxoffload.compiler.search_rounds import SearchAim
from fxoffload.compiler.step_member import StepMember
from fxoffload.planner.chain import ExtraMemory
from fxoffload.planner.problem import Solution
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Scheduler
from fxoffload.step.segment_names import TURN
from tests.oracle.models import LENGTH, machine
from tests.support import Stack, batch, rehearsal

LAYERS = 4
LOSS_BYTES = 150_000
RATES = ProfileRates(machine())


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GraphDescription]:
    """Of a stack that is compiled as a whole; its loss is outside."""
    torch.compiler.reset()
    found: list[GraphDescription] = []
    join = StepMember.join

    def seen(member: StepMember, description: Any, edges: Any) -> None:
        found.append(description)
        join(member, description, edges)

    profile = Path(tmp_path_factory.mktemp("profile")) / "profile.json"
    profile.write_text(machine().to_json(), encoding="utf-8")
    windows = {"in_flight_budget": "1GiB", "prefetch_budget": "1GiB"}
    options = rehearsal(policy="auto", profile=str(profile), activation_budget=400_000, **windows)
    with mock.patch.object(StepMember, "join", seen):
        model = Stack(LAYERS)
        run = torch.compile(model, backend="fxoffload", options=options)
        run(batch(length=LENGTH)).square().mean().backward()
    yield found[0]
    del run, model


def search_of(description: GraphDescription, *, written: frozenset[str] = frozenset()) -> ChainSearch:
    search = ChainSearch([description], (), lambda step: Scheduler(step, RATES), RATES, None, written=[written])
    search.extra_memory = ExtraMemory(gaps=((TURN, LOSS_BYTES),))
    return search


@pytest.fixture(scope="module")
def found(description: GraphDescription) -> tuple[ChainSearch, SearchAim, list[ChainChoice]]:
    """A search within four fifths of the step's peak with everything kept, its aim, and its choices."""
    search = search_of(description)
    aim = SearchAim(limit_bytes=round(0.8 * search.as_compiled().scheduler.keep_all().peak_bytes))
    return search, aim, search.search(aim)


def test_layers_with_choices_of_their_own_are_faster_than_alike(
    found: tuple[ChainSearch, SearchAim, list[ChainChoice]],
) -> None:
    search, aim, choices = found
    maker: Any = search.calls[0].variant_maker
    best = min(choices, key=aim.key).schedule
    alike = (search.with_variants((maker.variant(point),), aim) for point in maker.points())
    others = min([search.as_compiled(aim), *alike], key=aim.key).schedule
    assert best is not None and others is not None and aim.limit_bytes is not None
    assert best.simulation.peak_bytes <= aim.limit_bytes
    assert best.simulation.step_ms < 0.995 * others.simulation.step_ms


def test_the_layers_decide_about_the_storages_of_the_call(description: GraphDescription) -> None:
    """Without recomputation, the problem is that of the call as a whole."""
    search, as_one = search_of(description), search_of(description)
    as_one._layers = {}
    ((call, layers),) = search._layers.items()
    (whole,) = as_one._problem({kind: [layers.base] for kind in search._kinds}).problem.layers
    mine = search._problem({kind: [None] for kind in search._kinds}).problem.layers
    assert call == 0 and len(mine) == LAYERS + 1
    decided = [s for layer in mine for s in layer.variants[0].storages]
    assert sorted(decided, key=lambda s: s.name) == sorted(whole.variants[0].storages, key=lambda s: s.name)


def test_no_recomputation_is_dearer_because_another_op_takes_far_longer(description: GraphDescription) -> None:
    """Where all layers take longer, it is."""

    def extra_ms(*factors: float) -> float:
        step = description.step
        layers = iter(factors)
        backward = [replace(s, ms=s.ms * next(layers)) if s.layer else s for s in step.backward]
        search = search_of(description.measured(replace(step, backward=tuple(backward)), "segments"))
        found = search._problem({kind: [None] for kind in search._kinds}).problem.layers
        return sum(sum(variant.extra_ms.values()) for layer in found for variant in layer.variants)

    as_estimated = extra_ms(*[1.0] * LAYERS)
    assert as_estimated > 0
    assert extra_ms(*[1.0] * (LAYERS - 1), 10.0) == pytest.approx(as_estimated)
    assert extra_ms(*[1.2] * LAYERS) == pytest.approx(1.2 * as_estimated)


def test_a_promise_names_what_moves_as_the_chain_does(found: tuple[ChainSearch, SearchAim, list[ChainChoice]]) -> None:
    """Where less is taken than promised, more is asked for: that needs to know what moves."""
    promised = [(choice, choice.promised) for choice in found[2] if choice.promised is not None]
    assert any(solution.offloaded for _, solution in promised)
    for choice, solution in promised:
        assert solution.offloaded <= set(choice.scheduler.names)


def test_a_later_search_finds_the_same_variants(
    description: GraphDescription, found: tuple[ChainSearch, SearchAim, list[ChainChoice]]
) -> None:
    """They may be compiled already."""
    _, aim, choices = found
    again = search_of(description).search(aim)
    assert [c.variants for c in again] == [c.variants for c in choices]


def test_nothing_is_a_variant_where_the_graph_as_compiled_will_do(description: GraphDescription) -> None:
    search = search_of(description)
    problem = search._problem({kind: [None] for kind in search._kinds})
    solution = Solution((0,) * (LAYERS + 1), frozenset(), 1.0, 0.0, 1, 0, 0.0)
    assert problem.call_variants(solution) == ((None,), set())
    (variant,), refused = problem.call_variants(replace(solution, variants=(1,) + (0,) * LAYERS))
    assert variant is not None and not refused


def test_where_mixtures_cannot_stand_in_all_layers_recompute_the_same(
    found: tuple[ChainSearch, SearchAim, list[ChainChoice]],
) -> None:
    search, aim, choices = found
    alone = search_of(search.calls[0])
    with mock.patch.object(CallLayers, "variant", return_value=None):
        alike = alone.search(aim)
    maker: Any = search.calls[0].variant_maker
    points = {maker.variant(point) for point in maker.points()}
    assert len(alike) > 1 and {v for choice in alike for v in choice.variants} <= {None, *points}
    assert aim.key(min(choices, key=aim.key)) < aim.key(min(alike, key=aim.key)) < (float("inf"), 0)


def test_layers_have_choices_where_the_least_and_the_most_recomputation_are_none(
    found: tuple[ChainSearch, SearchAim, list[ChainChoice]],
) -> None:
    search, aim, choices = found
    alone = search_of(search.calls[0])
    alone._variants_by_kind = {kind: [] for kind in alone._kinds}
    assert [c.variants for c in alone.search(aim)] == [c.variants for c in choices[1:]]


def test_a_graph_that_saves_what_the_program_writes_has_no_such_choices(description: GraphDescription) -> None:
    assert search_of(description)._layers
    assert not search_of(description, written=frozenset(n for n in description.edges.inputs if n is not None))._layers
