"""What the plan of a chain knows before it searches: of data, no graph is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxoffload.compiler.batch_sizes import Sizes
from fxoffload.compiler.chain_graphs import ChainSettings, GraphDescription
from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.planner.objective import Objective
from fxoffload.runtime.engine import Budgets
from fxoffload.runtime.tracker.chains import Seen
from tests.planner.test_chain_search import edges, layer, passed, rates

CALLS = 4
SEEN = Seen(tuple(passed(CALLS)))


def planning(seen: Seen, sizes: Sequence[Sizes] = ()) -> ChainPlanning:
    """Of the calls of a layer that has no variants."""
    settings = ChainSettings(Objective(max_slowdown=0.1), Budgets(None, None, None), None, torch.device("cpu"))
    graph: Any = SimpleNamespace(planned=None)
    description = GraphDescription(graph, layer(ms=4.0), rates(), settings, edges())
    return ChainPlanning([description] * CALLS, seen, [frozenset()] * CALLS, sizes)


def test_without_a_budget_there_is_a_plan_of_the_graphs_as_compiled_at_once() -> None:
    found = planning(SEEN)
    quick = found.quick()
    assert quick is not None
    assert quick.simulation.bytes_offloaded > 0
    assert quick.simulation.step_ms <= 1.1 * found.baseline.step_ms
    assert quick.simulation.peak_bytes < 0.9 * found.baseline.peak_bytes
    # There are no variants: the search ends with the same plan, which is made once.
    assert found.run() is quick


@pytest.mark.parametrize(
    ("sizes", "read_at", "expected"),
    [
        ((), (), 64),
        ((), ((8,),) * CALLS, 64),
        (((8,),) * CALLS, ((8,),) * CALLS, 64),
        (((16,),) * CALLS, ((8,),) * CALLS, 0),
    ],
)
def test_memory_of_the_first_arguments_is_known_at_the_sizes_where_it_was_read(
    sizes: Sequence[Sizes], read_at: tuple[Sizes, ...], expected: int
) -> None:
    found = planning(replace(SEEN, sizes=read_at, left_bytes=64), sizes)
    assert found.first_bytes == expected
