"""Limits of measuring before the first step: seconds, and reasons for which an estimate is used instead."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import torch

from fxoffload import tell
from fxoffload.counters import counters
from fxoffload.errors import in_brief
from fxoffload.runtime.engine import engines

log = logging.getLogger(__name__)

# For all graphs of one step together: operators and segments.
LONGEST_S = 3.0
# What operators leave to segments, whose times and peaks come closer to a step's.
FOR_SEGMENTS_S = 1.5

NO_TIME = "there was no time left"
NO_ROOM = "it does not fit into free memory"
FAILED = "it failed on made-up inputs"
OUT_OF_MEMORY = "the device ran out of memory"


class Allowance:
    """Seconds that may be spent.

    Args:
        seconds: at most.
    """

    def __init__(self, seconds: float = LONGEST_S, now: Callable[[], float] = time.perf_counter) -> None:
        self._left = seconds
        self._now = now
        self._began: float | None = None
        self._aside = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._left - self._spent_s()

    def _spent_s(self) -> float:
        return 0.0 if self._began is None else self._now() - self._began - self._aside

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Its time is taken off, and counted in the stats."""
        self._began, self._aside = self._now(), 0.0
        try:
            yield
        finally:
            spent = self._spent_s()
            self._began = None
            self._left -= spent
            counters.add("measuring_ms", 1e3 * spent)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Time inside does not count: the first step would spend it otherwise."""
        began = self._now()
        try:
            yield
        finally:
            self._aside += self._now() - began


_latest = Allowance()


def allowance_of_step() -> Allowance:
    """What the step that is being compiled may spend: graphs that are compiled while forwards wait for their backwards
    belong to the same step as these."""
    global _latest
    if not any(len(engine.save_order) for engine in engines()):
        _latest = Allowance()
    return _latest


def reason_of(error: Exception) -> str:
    """Why something was not measured that raised."""
    log.debug("not measured: %s", in_brief(error))  # text: its frames hold memory of the device
    return OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else FAILED


def note_estimated(what: str, reason: str, count: int = 1) -> None:
    """Count operators, segments or graphs (``what``) that have an estimate only; say each reason once."""
    counters.add_reason("costs_estimated", reason, count)
    if tell.is_new(("costs_estimated", reason)):
        log.info("the estimate is used for %d %s: %s", count, what, reason)
