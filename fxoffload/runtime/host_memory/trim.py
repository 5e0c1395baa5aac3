"""Gives host memory back that only the steps before a plan over several graphs needed.

[Note: When host memory is trimmed]
Until a chain of calls has its plan, its steps offload everything that may move. The plan then needs less, and the rest
of the pinned memory would stay pinned. When a plan has settled, and a few whole steps in a row did as plans say,
everything above the highest block of those steps goes.

That is done once for each plan. The need of every other plan that still exists stays, as it was seen. So does memory
that was pinned for graphs that are in no such plan (a model that is one graph). So memory does not come and go where
steps of an actor and of a critic take turns. Memory that is pinned later (for a longer evaluation, say) stays. Where
sizes vary from call to call nothing goes: the next batch may be as long as the longest one.

The thread that begins the next step trims, between two steps, for no longer than a part of a step. What is left goes
after the next ones. The driver lets everything on the device end before it gives the first chunk up, whichever thread
asks for it, and takes 2.1 ms for each of 128 MiB after that. At once, one step of FSDP2 took 0.80 s, and the others
0.43: 9.6 GiB went, on each of two ranks (two H200s, 2026-11-28). Rejected: a thread of its own, which rested between
chunks. It let 48 steps of 65 ms wait 2 ms each for 6 GiB (H200, 2026-11-22, a script that was not kept; see
``benchmarks run pinning --variants give_back``).
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Protocol

log = logging.getLogger(__name__)

# Whole steps in a row, after one that did the same, that show the need of a plan.
STEADY_STEPS = 4

# What may go between two steps, as a part of the time of the shortest step.
STEP_SHARE = 0.25


class HostMemory(Protocol):
    """Memory that can be trimmed; see ``CopyEngine``."""

    def mark_host_memory(self) -> None:
        """Count the need from here on."""
        ...

    def host_bytes_needed(self) -> int:
        """The end of the highest block since the mark."""
        ...

    def may_trim(self) -> bool:
        """Whether a trim can begin now."""
        ...

    def trim_host_memory(self, keep_bytes: int, limit_s: float) -> int:
        """Give back free memory above ``keep_bytes``, for ``limit_s`` seconds. Returns bytes; 0: none is left."""
        ...


class HostTrim:
    """See [Note: When host memory is trimmed]. Its methods are called one at a time, when a step is over."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._needs: weakref.WeakKeyDictionary[Hashable, int] = weakref.WeakKeyDictionary()  # of plans that had theirs
        self._steps: weakref.WeakKeyDictionary[Hashable, int] = weakref.WeakKeyDictionary()  # since the mark, by plan
        self._is_marked = False
        self._last_s: float | None = None  # when the last step was over
        self._shortest_s = math.inf
        self._given_bytes = 0
        self._given_s = 0.0

    @property
    def plans(self) -> list[Hashable]:
        """Those that steps were seen to follow, as far as they are still there."""
        return list({*self._needs, *self._steps})

    def followed(self, plan: Hashable, may_shrink: Callable[[], bool], others_bytes: Callable[[], int]) -> None:
        """A whole step has followed ``plan``, which has settled.

        Args:
            plan: that was followed.
            may_shrink: whether the need of steps stays as it is.
            others_bytes: bytes that graphs need that are in none of ``plans``. Both are asked only before memory would
                go.
        """
        if plan in self._needs:
            return
        self._note_time()
        if not self._is_marked:
            self._memory.mark_host_memory()
            self._is_marked = True
        self._steps[plan] = steps = self._steps.get(plan, -1) + 1
        if steps >= STEADY_STEPS and may_shrink() and self._memory.may_trim():
            needed = self._memory.host_bytes_needed()
            if not self._trim(max(needed, *self._needs.values(), others_bytes())):
                self._needs[plan] = needed

    def interrupted(self) -> None:
        """A step followed no plan: its need does not count."""
        self._steps.clear()
        self._is_marked = False
        self._last_s = None

    def forget(self) -> None:
        """All compiled code is dropped, and all plans with it."""
        self.interrupted()
        self._needs.clear()

    def _note_time(self) -> None:
        now = time.perf_counter()
        if self._last_s is not None:
            self._shortest_s = min(self._shortest_s, now - self._last_s)
        self._last_s = now

    def _trim(self, keep_bytes: int) -> int:
        """Returns bytes; 0: there is nothing left that may go. No step fails for it."""
        began, given = time.perf_counter(), 0
        try:
            given = self._memory.trim_host_memory(keep_bytes, STEP_SHARE * self._shortest_s)
        except Exception as error:
            log.warning("host memory that no step needs stays: %s: %s", type(error).__name__, error)
        if given:
            self._given_bytes += given
            self._given_s += time.perf_counter() - began
        elif self._given_bytes:
            log.info(
                "gave %.2f GiB of host memory back, which only the first steps needed, and kept %.2f GiB (%.0f ms)",
                self._given_bytes / 2**30,
                keep_bytes / 2**30,
                1e3 * self._given_s,
            )
            self._given_bytes, self._given_s = 0, 0.0
        return given
