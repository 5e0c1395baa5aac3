"""The host waits for the device, but not for ever."""

from __future__ import annotations

import logging

import pytest

from fxoffload.runtime import host_lead
from fxoffload.runtime.host_lead import HostLead


class Event:
    """Done at the n-th look; None: never."""

    def __init__(self, looks: int | None) -> None:
        self.left = looks
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.left is not None and self.asked >= self.left


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_lead, "_LONGEST_S", 0.05)


def test_it_returns_when_the_device_has_passed_the_event() -> None:
    lead = HostLead()
    at_once, later = Event(1), Event(5)
    lead.wait_for(at_once)
    lead.wait_for(later)
    assert (at_once.asked, later.asked) == (1, 5)


def test_a_device_that_never_gets_there_is_not_waited_for_any_more(caplog: pytest.LogCaptureFixture) -> None:
    lead = HostLead()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            never = Event(None)
            lead.wait_for(never)
            assert never.asked > 1
        assert len(caplog.records) == 1
        never = Event(None)
        lead.wait_for(never)
        assert never.asked == 0
    assert len(caplog.records) == 1


def test_a_step_that_was_late_once_in_a_while_changes_nothing() -> None:
    lead = HostLead()
    for _ in range(3):
        lead.wait_for(Event(None))
        lead.wait_for(Event(None))
        lead.wait_for(Event(2))
    last = Event(2)
    lead.wait_for(last)
    assert last.asked == 2
