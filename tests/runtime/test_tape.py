from __future__ import annotations

import gc
import weakref

from fxoffload.runtime.host_memory.arena import HostBlock
from fxoffload.runtime.host_memory.free_list import Span
from fxoffload.runtime.tape import Tape
from fxoffload.runtime.transfer import Group, Transfer


def expected(tape: Tape, group: Group, *, keeps_graph: bool = False) -> list[Group]:
    """After the backward of ``group``."""
    return tape.begin_backward(group, keeps_graph=keeps_graph)


def saved(*values: int) -> Group:
    """A group of one byte for each value."""
    group = Group()
    for rank in values:
        group.add(rank, Transfer(1, HostBlock(Span(0, 0, None)), (), reclaimable=True))
    return group


def pushed(tape: Tape, count: int) -> list[Group]:
    groups = [saved(0) for _ in range(count)]
    for group in groups:
        tape.push(group)
    return groups


def test_what_follows_is_what_was_saved_before_the_youngest_first() -> None:
    tape = Tape()
    groups = pushed(tape, 4)
    assert expected(tape, groups[3], keeps_graph=True) == [groups[2], groups[1], groups[0]]
    assert tape.live() == groups
    assert expected(tape, groups[1]) == [groups[0]]
    assert expected(tape, groups[0]) == []
    assert tape.live() == [groups[2], groups[3]]


def test_nothing_follows_what_is_not_on_the_tape() -> None:
    tape = Tape()
    (first,) = pushed(tape, 1)
    second = saved(0)
    assert expected(tape, second) == []
    assert tape.live() == [first]


def test_a_removed_group_is_no_longer_predicted() -> None:
    tape = Tape()
    groups = pushed(tape, 3)
    expected(tape, groups[1])
    assert expected(tape, groups[2]) == [groups[0]]
    assert len(tape) == 1


def test_a_kept_group_may_follow_again() -> None:
    tape = Tape()
    groups = pushed(tape, 3)
    for _ in range(2):
        assert expected(tape, groups[2], keeps_graph=True) == [groups[1], groups[0]]
        assert expected(tape, groups[1], keeps_graph=True) == [groups[0]]
        assert expected(tape, groups[0], keeps_graph=True) == []
    assert tape.live() == groups


def test_a_group_that_was_pushed_twice_is_found_at_its_last_place() -> None:
    tape = Tape()
    first, second = saved(0), saved(0)
    for group in (first, second, first):
        tape.push(group)
    assert expected(tape, first) == [second, first]
    assert tape.live() == [second]


def test_groups_are_held_weakly() -> None:
    """A forward that never goes backward leaves no trace, and does not break the prediction around it."""
    tape = Tape()
    below, dropped, above = groups = pushed(tape, 3)
    gone = weakref.ref(dropped)
    del dropped, groups
    gc.collect()
    assert gone() is None
    assert expected(tape, above, keeps_graph=True) == [below]
    assert len(tape) == 2
    assert len(tape._entries) == 2  # and the dead reference is swept


def test_the_order_of_one_step_is_that_of_the_next() -> None:
    tape = Tape()
    for step in range(2):
        groups = pushed(tape, 3)
        assert expected(tape, groups[0]) == (groups[1:] if step else [])
        assert expected(tape, groups[1]) == groups[2:]  # as after the first one
        assert expected(tape, groups[2]) == []


def test_where_nothing_was_saved_what_was_expected_still_is() -> None:
    """Before the first backward of a step, and between two."""
    tape = Tape()
    groups = pushed(tape, 3)
    assert expected(tape, Group()) == groups[::-1]
    for i in (1, 2, 0):
        expected(tape, groups[i])
    groups = pushed(tape, 3)
    assert expected(tape, Group()) == [groups[1], groups[2], groups[0]]
    expected(tape, groups[1])
    assert expected(tape, Group()) == [groups[2], groups[0]]


def test_a_graph_that_is_never_let_go_is_not_expected_for_ever() -> None:
    """The caller keeps a loss: the tape is never empty, and no step begins at the same place as the one before."""
    tape = Tape()
    (leaked,) = pushed(tape, 1)
    for step in range(3):
        groups = pushed(tape, 3)
        for i in (2, 1, 0):
            assert expected(tape, groups[i]) == groups[:i][::-1] + ([leaked] if step == 0 else [])
