"""The host waits for the device, but not for ever."""

from __future__ import annotations

import logging
from functools import partial

import pytest

import fxoffload
from fxoffload.runtime.copies import host_lead
from fxoffload.runtime.copies.host_lead import HostLead


class Point:
    """Done at the n-th look; None: when it is said so."""

    def __init__(self, looks: int | None) -> None:
        self.left = looks
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.left is not None and self.asked >= self.left


def good(lead: HostLead, count: int) -> int:
    """How many of ``count`` points were waited for."""
    points = [Point(2) for _ in range(count)]
    for point in points:
        lead.wait_for(point)
    return sum(p.asked == 2 for p in points)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_lead, "_LONGEST_S", 0.02)


def test_it_returns_when_the_device_has_passed_the_point() -> None:
    lead = HostLead()
    at_once, later = Point(1), Point(5)
    fxoffload.reset_stats()
    lead.wait_for(at_once)
    lead.wait_for(later)
    assert (at_once.asked, later.asked) == (1, 5)
    assert fxoffload.stats().host_paced_ms >= 0.4


def test_plans_go_on_while_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for name in ("waits", "launches"):
        monkeypatch.setattr(host_lead.STEP_FIRST, name, partial(told.append, name))
    HostLead().wait_for(Point(3))
    assert told == ["waits", "launches"]


def test_calls_behind_a_device_that_stands_still_do_not_wait_until_it_goes_on() -> None:
    """However many there are: it is one stall."""
    lead, late = HostLead(), Point(None)
    lead.wait_for(late)
    assert late.asked > 1
    assert good(lead, 100) == 0
    late.left = 0
    assert good(lead, 3) == 3


def test_a_whole_step_before_it_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several times as long as a call may take, in every step."""
    monkeypatch.setattr(host_lead, "_LOOKS_EVERY_S", 1e-3)
    lead = HostLead()
    for _ in range(7):
        long = Point(60)
        lead.wait_for(long, behind_step=True)
        assert long.asked == 60
        assert good(lead, 2) == 2


def test_a_program_that_stalls_again_and_again_is_not_held_back_any_more(caplog: pytest.LogCaptureFixture) -> None:
    lead = HostLead()
    with caplog.at_level(logging.WARNING):
        for stall in range(5):
            assert good(lead, 1) == 1 and not caplog.records
            late = Point(None)
            lead.wait_for(late)
            assert late.asked > 1, stall
            late.left = 0
        assert good(lead, 10) == 0
    assert len(caplog.records) == 1


def test_many_good_steps_make_up_for_a_stall() -> None:
    lead = HostLead()
    for _ in range(10):
        late = Point(None)
        lead.wait_for(late)
        late.left = 0
        for _ in range(500):
            lead.wait_for(Point(2))
    assert good(lead, 1) == 1


def test_a_host_that_is_late_again_and_again_runs_ahead_for_some_steps() -> None:
    """Calls that are late now and then are paced as before."""
    lead = HostLead()
    assert good(lead, 1) == 1
    for _ in range(5):
        for _ in range(3):
            lead.wait_for(Point(1))
        assert good(lead, 1) == 1
    for _ in range(4):
        lead.wait_for(Point(1))
    assert good(lead, 500) == 0
    assert good(lead, 3) == 3


def test_a_step_that_begins_with_an_idle_device_does_not_count() -> None:
    """The host has launched little then, and is late for each call until it is ahead."""
    lead = HostLead()
    for _ in range(3):
        lead.wait_for(Point(1), behind_step=True)
        for _ in range(4):
            lead.wait_for(Point(1))
        assert good(lead, 3) == 3
