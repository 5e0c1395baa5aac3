"""When the host is taken to wait for the device."""

from __future__ import annotations

from collections.abc import Iterable

from fxoffload.runtime.copies.host_pace import HostPace


def pace(looks: Iterable[bool]) -> HostPace:
    found = HostPace()
    for idle in looks:
        found.looked(idle=idle)
    return found


def test_it_is_not_before_anything_was_seen() -> None:
    assert not pace([]).waits
    assert not pace([True] * 4).waits, "a step begins with an idle device"


def test_it_is_where_the_device_is_mostly_idle() -> None:
    assert pace([True] * 16).waits
    assert pace([False] * 40 + [True] * 16).waits
    assert pace([True, True, False] * 8).waits


def test_it_is_not_where_a_step_of_many_layers_begins_so() -> None:
    """Also in the step that begins after another one."""
    step = [True] * 4 + [False] * 28
    for looks in range(len(step)):
        assert not pace([*step, *step[: looks + 1]]).waits


def test_what_was_seen_while_everything_was_compiled_is_soon_forgotten() -> None:
    assert not pace([True] * 100 + [False] * 8).waits
