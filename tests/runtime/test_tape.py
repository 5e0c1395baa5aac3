from __future__ import annotations

import gc
import weakref

from fxoffload.runtime.tape import Tape
from fxoffload.runtime.transfer import Group


def test_below_is_what_was_saved_before_the_youngest_first() -> None:
    tape = Tape()
    groups = [Group() for _ in range(4)]
    for group in groups:
        tape.push(group)
    assert tape.below(groups[3]) == [groups[2], groups[1], groups[0]]
    assert tape.below(groups[1]) == [groups[0]]
    assert tape.below(groups[0]) == []
    assert tape.live() == groups


def test_what_is_not_on_the_tape_has_nothing_below() -> None:
    tape = Tape()
    first, second = Group(), Group()
    tape.push(first)
    assert tape.below(second) == []
    tape.remove(second)
    assert len(tape) == 1


def test_a_removed_group_is_no_longer_predicted() -> None:
    tape = Tape()
    groups = [Group() for _ in range(3)]
    for group in groups:
        tape.push(group)
    tape.remove(groups[1])
    assert tape.below(groups[2]) == [groups[0]]
    assert len(tape) == 2


def test_a_group_that_was_pushed_twice_is_found_at_its_last_place() -> None:
    tape = Tape()
    first, second = Group(), Group()
    for group in (first, second, first):
        tape.push(group)
    assert tape.below(first) == [second, first]


def test_groups_are_held_weakly() -> None:
    """A forward that never goes backward leaves no trace, and does not break the prediction around it."""
    tape = Tape()
    below, dropped, above = Group(), Group(), Group()
    for group in (below, dropped, above):
        tape.push(group)
    gone = weakref.ref(dropped)
    del dropped, group
    gc.collect()
    assert gone() is None
    assert tape.below(above) == [below]
    assert len(tape) == 2
    assert len(tape._groups) == 2  # and the dead reference is swept
