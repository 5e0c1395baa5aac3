"""Exceptions at lines of transitions and of steps that offload, with a GPU's streams and pinned memory."""

from __future__ import annotations

import pytest

from tests.interrupts import Place, ours, some_of_each_line
from tests.phases import test_interrupted_anywhere as phases
from tests.runtime import test_interrupted_copies as copies

pytestmark = pytest.mark.gpu


def some(found: list[Place]) -> list[Place]:
    """Eighty of them, one of a line."""
    firsts = some_of_each_line(found, 1)
    return firsts[:: max(1, len(firsts) // 80)]


@pytest.mark.parametrize("name", ["offload", "offload behind", "onload", "onload behind", "use", "stream"])
def test_every_byte_comes_back(name: str, printed: list[str]) -> None:
    phases.try_each_on(phases.Scene(device="cuda"), name, printed, some)


def test_real_signals_while_memory_moves(printed: list[str]) -> None:
    assert phases.run_through_a_storm(4.0, 0.02, device="cuda") > 20
    assert not ours(printed)


@pytest.mark.parametrize("name", copies.WORK)
def test_the_next_step_is_right(name: str, printed: list[str]) -> None:
    copies.try_each_of(copies.Steps("cuda"), name, printed, some)
