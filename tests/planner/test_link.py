"""The two copy engines, by hand. 1 GB/s is 1e6 bytes in a millisecond."""

from __future__ import annotations

import pytest

from fxoffload.planner import ConstantRates
from fxoffload.planner.link import Link

MS = 1_000_000


def test_copies_of_one_direction_run_in_order() -> None:
    link = Link(ConstantRates(1, 2))
    numbers = [link.down(3 * MS, 0), link.down(MS, 1), link.down(MS, 10)]
    assert [link.down_end(n) for n in numbers] == [3, 4, 11]
    assert link.downs() == [(0, 3), (3, 4), (10, 11)]
    assert [link.up(2 * MS, 20), link.up(2 * MS, 20), link.up(2 * MS, 30)] == [21, 22, 31]
    assert link.ups == [(20, 21), (21, 22), (30, 31)]


def test_both_directions_are_slower_while_both_are_busy() -> None:
    link = Link(ConstantRates(1, 1, 0.5, 0.5))
    first, second = link.down(4 * MS, 0), link.down(2 * MS, 0)
    # Until 2 down is alone (2 of 4 done). The copy up takes [2, 6], the rest of the first one down too.
    assert link.up(2 * MS, 2) == pytest.approx(6)
    assert link.down_end(first) == pytest.approx(6)
    assert link.down_end(second) == pytest.approx(8)
    # [6.5, 9.5] both: 1.5 of the second copy down and 1.5 of 3 up; the rest of each is [9.5, ...].
    assert link.up(3 * MS, 6.5) == pytest.approx(6.5 + 3 + 1.5)
    assert link.down_end(second) == pytest.approx(9.5)
    assert link.downs() == [pytest.approx((0, 6)), pytest.approx((6, 9.5))]


def test_each_direction_has_its_own_duplex_rate() -> None:
    link = Link(ConstantRates(1, 1, 0.5, 0.25))
    number = link.down(2 * MS, 0)
    assert link.up(MS, 0) == pytest.approx(4)
    assert link.down_end(number) == pytest.approx(4)


def test_nothing_takes_no_time() -> None:
    link = Link(ConstantRates(1, 1, 0.5, 0.5))
    assert link.down_end(link.down(0, 1.5)) == 1.5
    number = link.down(MS, 2)
    assert link.up(0, 2.5) == 2.5
    assert link.down_end(number) == 3
