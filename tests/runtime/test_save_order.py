from __future__ import annotations

import gc
import weakref

from fxoffload.runtime.host_memory.arena import HostBlock
from fxoffload.runtime.host_memory.free_list import Span
from fxoffload.runtime.save_order import SaveOrder
from fxoffload.runtime.transfer import Group, Transfer


def expected(save_order: SaveOrder, group: Group, *, keeps_graph: bool = False) -> list[Group]:
    """After the backward of ``group``."""
    return save_order.begin_backward(group, keeps_graph=keeps_graph)


def saved(*values: int) -> Group:
    """A group of one byte for each value."""
    group = Group()
    for rank in values:
        group.add(rank, Transfer(1, HostBlock(Span(0, 0, None), "an arena"), (), reclaimable=True))
    return group


def pushed(save_order: SaveOrder, count: int) -> list[Group]:
    groups = [saved(0) for _ in range(count)]
    for group in groups:
        save_order.push(group)
    return groups


def test_what_follows_is_what_was_saved_before_the_youngest_first() -> None:
    save_order = SaveOrder()
    groups = pushed(save_order, 4)
    assert expected(save_order, groups[3], keeps_graph=True) == [groups[2], groups[1], groups[0]]
    assert save_order.live() == groups
    assert expected(save_order, groups[1]) == [groups[0]]
    assert expected(save_order, groups[0]) == []
    assert save_order.live() == [groups[2], groups[3]]


def test_nothing_follows_what_is_not_in_the_order() -> None:
    save_order = SaveOrder()
    (first,) = pushed(save_order, 1)
    second = saved(0)
    assert expected(save_order, second) == []
    assert save_order.live() == [first]


def test_a_removed_group_is_no_longer_predicted() -> None:
    save_order = SaveOrder()
    groups = pushed(save_order, 3)
    expected(save_order, groups[1])
    assert expected(save_order, groups[2]) == [groups[0]]
    assert len(save_order) == 1


def test_a_kept_group_may_follow_again() -> None:
    save_order = SaveOrder()
    groups = pushed(save_order, 3)
    for _ in range(2):
        assert expected(save_order, groups[2], keeps_graph=True) == [groups[1], groups[0]]
        assert expected(save_order, groups[1], keeps_graph=True) == [groups[0]]
        assert expected(save_order, groups[0], keeps_graph=True) == []
    assert save_order.live() == groups


def test_a_group_that_was_pushed_twice_is_found_at_its_last_place() -> None:
    save_order = SaveOrder()
    first, second = saved(0), saved(0)
    for group in (first, second, first):
        save_order.push(group)
    assert expected(save_order, first) == [second, first]
    assert save_order.live() == [second]


def test_groups_are_held_weakly() -> None:
    """A forward that never goes backward leaves no trace, and does not break the prediction around it."""
    save_order = SaveOrder()
    below, dropped, above = groups = pushed(save_order, 3)
    gone = weakref.ref(dropped)
    del dropped, groups
    gc.collect()
    assert gone() is None
    assert expected(save_order, above, keeps_graph=True) == [below]
    assert len(save_order) == 2
    pushed(save_order, 1)
    assert len(save_order._groups) == 3  # and the dead reference is swept


def test_all_groups_follow_where_nothing_was_saved() -> None:
    """Before the first backward of a step, and between two."""
    save_order = SaveOrder()
    groups = pushed(save_order, 3)
    assert expected(save_order, Group()) == groups[::-1]
    expected(save_order, groups[1])
    assert expected(save_order, Group()) == [groups[2], groups[0]]


def test_a_group_that_was_passed_over_is_not_expected() -> None:
    """Its backward may never begin: the caller keeps a loss. A group without values expects it no more either."""
    save_order = SaveOrder()
    kept, below, above = pushed(save_order, 3)
    kept.was_passed_over = True
    assert expected(save_order, Group()) == [above, below]
    assert expected(save_order, above) == [below]
    assert expected(save_order, below) == []


def test_a_group_that_was_passed_over_and_begins_is_followed_by_those_before_it() -> None:
    """A gradient was asked for twice: the first backward of the graph is no sign that the rest never comes."""
    save_order = SaveOrder()
    groups = pushed(save_order, 3)
    for group in groups[:2]:
        group.was_passed_over = True
    assert expected(save_order, groups[2]) == []
    assert expected(save_order, groups[1]) == [groups[0]]
    assert not groups[0].was_passed_over
