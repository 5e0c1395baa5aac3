"""How far the host is ahead of the device: at the end of a forward call it may wait until the device has begun it.

[Note: Streams that wait]
FSDP2 gathers and reduces on streams of its own. As long as the host is ahead of the device these wait for the compute
stream, and while two or more streams of a process wait, the GPU reads over the link without end: NVML counted 5 GB/s
for each of them but the first, and nothing with one. Copies beside that reach 48 to 50 GB/s of 55, in both directions.
It makes no difference what priority the streams have, whether the gathers and scatters move anything, or that the
copies' own stream waits for nothing; nor does power, which was at its limit with and without (H200, torch 2.11,
``benchmarks/results/2026-11-23-h200-waiting-streams-ablation.json``).

So calls whose copies need all of the link are *paced* (``Choice.paced``, ``fxoffload.planner.pacing``): copies to the
host then carried 54.9 GB/s in place of 48.8. Nothing starts later for it. FSDP2 lets the gather for the next layer wait
for the beginning of this one anyway, and the host has the time of a whole layer to launch the next one. A host that is
slower than the device finds the event done, and waits for nothing.

Backwards are not: their copies have twice the time, and a host that is held back there would be late with the
reductions.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

log = logging.getLogger(__name__)

_LOOKS_EVERY_S = 1e-4
# Whatever the device waits for itself (a rank that is late, or that waits for something that this host has yet to
# launch): the host goes on.
_LONGEST_S = 1.0
_MOST_IN_VAIN = 3


class _Event(Protocol):
    def query(self) -> bool: ...


class HostLead:
    """Of one device. Never raises for what the device does, and never waits for long."""

    def __init__(self) -> None:
        self._in_vain = 0

    def wait_for(self, begun: _Event) -> None:
        """Return when the device has passed ``begun``. Where it takes longer than a second the host goes on; after
        three times in a row it does not wait any more."""
        if self._in_vain >= _MOST_IN_VAIN:
            return
        latest = time.monotonic() + _LONGEST_S
        while not begun.query():
            if time.monotonic() > latest:
                self._gave_up()
                return
            time.sleep(_LOOKS_EVERY_S)
        self._in_vain = 0

    def _gave_up(self) -> None:
        self._in_vain += 1
        if self._in_vain == _MOST_IN_VAIN:
            log.warning(
                "the device took longer than %.0f s to begin a forward call, %d times in a row: the host does not wait "
                "for it any more; copies beside collectives may be slower",
                _LONGEST_S,
                _MOST_IN_VAIN,
            )
