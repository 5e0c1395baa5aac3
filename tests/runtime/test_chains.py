"""Chains of calls, their sizes and their records: on data, no graph is compiled."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from fxoffload.runtime.tracker import chains as chains_module
from fxoffload.runtime.tracker.chains import Chains, Known, Seen
from fxoffload.runtime.tracker.step_memory import LiveBytes


class Tracked:
    """A graph whose sizes are planned for in steps of ten."""

    sizes = SimpleNamespace(rounded_up=lambda sizes: tuple(10 * -(-n // 10) for n in sizes))


GRAPHS = [Tracked(), Tracked()]


def known(*steps: tuple[tuple[int, ...], ...]) -> Known:
    return Known(tuple(weakref.ref(g) for g in GRAPHS), Seen(()), list(steps))


@pytest.mark.parametrize(
    ("steps", "first", "expected"),
    [
        ([((8, 8), (8, 8))], (16, 12), ((16, 12), (16, 12))),  # each may be either: the one in the same place
        ([((8, 4), (4, 8))], (16, 12), ((16, 12), (12, 16))),
        ([((8, 4), (8, 8)), ((8, 6), (8, 6))], (8, 9), ((8, 9), (8, 10))),  # the last one has been either
        ([((8,), (3,)), ((4,), (5,))], (12,), ((12,), (10,))),  # one of its own: the largest, rounded up
        ([((), ())], (), ()),
    ],
)
def test_sizes_of_all_calls_follow_from_those_of_the_first(
    steps: list[Any], first: tuple[int, ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert known(*steps).sizes_at(first) == expected


def test_a_step_with_larger_calls_than_its_plan_is_remembered() -> None:
    found = known(((8,), (8,)))
    found.measured((16,), LiveBytes(), ((16,), (16,)))
    assert len(found.steps) == 1 and found.seen_first[(16,)].sizes == ((16,), (16,))
    found.measured((16,), LiveBytes(), ((16,), (17,)))
    assert found.steps[1:] == [((16,), (17,))]
    assert found.sizes_at((16,)) == ((16,), (20,))
    assert not found.learns(found.tracked_graphs, ((16,), (17,))), "it is known"
    assert not found.learns(found.tracked_graphs[:1], ((16,), (18,))), "another chain"


def test_steps_are_recorded_until_a_chain_is_known_or_planned() -> None:
    chains = Chains()
    assert chains.may_record
    for name, value in (("known", known(((), ()))), ("is_planning", True)):
        before = getattr(chains, name)
        setattr(chains, name, value)
        assert not chains.may_record
        setattr(chains, name, before)
    chains.num_records = chains_module._MOST_RECORDS - 1
    assert chains.may_record and not chains.gives_up
    chains.num_records += 1
    assert not chains.may_record and chains.gives_up
