"""How far the host is ahead of the device: a forward call may wait until the device has begun the one before it.

[Note: Streams that wait]
FSDP2 gathers and reduces on streams of its own. As long as the host is ahead of the device, these wait for the compute
stream. While two or more streams of a process wait, the GPU reads over the link without end: NVML counted 5 GB/s for
each of them but the first, and nothing with one. Copies to the host then reach 49 GB/s of 55 (fxoffload's reloads 50;
H200, torch 2.11, ``benchmarks/results/2026-11-23-h200-waiting-streams-ablation.json``). The priority of the streams
makes no difference. Nor does it matter whether the gathers and scatters move anything, or whether the copies' own
stream waits for nothing. Power is no cause: it was at its limit with and without.

With the host at most one layer ahead, copies during forwards carried 54.9 GB/s. So calls whose copies need all of the
link are *paced* (``Choice.paced``, ``fxoffload.compiler.pacing``): each begins when the device has begun the paced call
before it. Its gather has been launched by then, as early as FSDP2 would let it run: that waits for the beginning of the
call before the one before. The host has the time of a call to launch the next one, and no wait follows the last
forward.

A host that needs longer than that, as next to a thread that compiles, finds the device past the point. Where that goes
on, the device waits for the host. A forward of 134 ms took 152 where the host was late in 6 of 16 calls of 6 ms (two
H200s, 2026-11-29). After a few such calls in a row no call is paced for some steps, and the host runs ahead. Calls at
the beginning of a step do not count until one has waited. With an idle device every host is late for them.

Backwards are not paced: their copies have twice the time, for which 50 GB/s are enough.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from fxoffload.counters import counters
from fxoffload.runtime.step_first import STEP_FIRST

log = logging.getLogger(__name__)

_LOOKS_EVERY_S = 1e-4
# The device may itself wait: for a rank that is late, or for work that this host has yet to launch. After this time the
# host goes on, and does not wait until the device has caught up.
_LONGEST_S = 1.0
# Where the rest of the step before stands in the queue: its backward, and the optimizer.
_LONGEST_BEHIND_STEP_S = 10.0
# A program that stalls this often is no longer paced. This many waits that end well make up for the stalls.
_MOST_STALLS = 5
_FORGIVEN_AFTER = 500
# Calls in a row for which the host was late, and the calls that are not paced after them: some steps.
_MOST_LATE = 4
_NOT_PACED = 500


class DeviceEvent(Protocol):
    """A point of the compute stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


class HostLead:
    """Of one device; of one thread at a time."""

    def __init__(self) -> None:
        self._stalled_at: DeviceEvent | None = None
        self._num_stalls = 0
        self._num_good = 0
        self._has_waited = False  # in this step
        self._num_late = 0
        self._num_not_paced = 0

    def wait_for(self, begun: DeviceEvent, *, behind_step: bool = False) -> None:
        """Return when the device has passed ``begun``, or after a while. ``behind_step``: the rest of the step before,
        its backward say, may come first."""
        if self._num_stalls >= _MOST_STALLS or not self._caught_up():
            return
        if self._num_not_paced:
            self._num_not_paced -= 1
            return
        if behind_step:
            self._has_waited, self._num_late = False, 0
        if begun.query():
            self._host_is_late()
            return
        self._has_waited, self._num_late = True, 0
        longest_s = _LONGEST_BEHIND_STEP_S if behind_step else _LONGEST_S
        began = time.monotonic()
        STEP_FIRST.waits()
        time.sleep(_LOOKS_EVERY_S)
        while not begun.query():
            if time.monotonic() - began > longest_s:
                self._stalled_at = begun
                break
            time.sleep(_LOOKS_EVERY_S)
        STEP_FIRST.launches()
        counters.add("host_paced_ms", 1e3 * (time.monotonic() - began))
        if self._stalled_at is not None:
            self._stalled()
        else:
            self._num_good += 1
            if self._num_good >= _FORGIVEN_AFTER:
                self._num_stalls = self._num_good = 0

    def _host_is_late(self) -> None:
        self._num_late += self._has_waited
        if self._num_late == _MOST_LATE:
            self._num_late, self._num_not_paced = 0, _NOT_PACED
            log.debug(
                "the host was late for %d forward calls in a row: the next %d are not paced", _MOST_LATE, _NOT_PACED
            )

    def _caught_up(self) -> bool:
        if self._stalled_at is not None and not self._stalled_at.query():
            return False
        self._stalled_at = None
        return True

    def _stalled(self) -> None:
        self._num_good = 0
        self._num_stalls += 1
        if self._num_stalls == _MOST_STALLS:
            log.warning(
                "the device stood still behind a forward call, %d times: the host does not wait for it any more; "
                "copies during FSDP2's collectives may be slower",
                _MOST_STALLS,
            )
