"""Gives host memory back that only the steps before a plan over several graphs needed.

[Note: When host memory is trimmed]
Until a chain of calls has its plan, its steps offload everything that may move. The plan then needs less, and the rest
of the pinned memory would stay pinned. When a plan has settled, and a few whole steps in a row did as plans say,
everything above the highest block of those steps goes.

That is done once for each plan. The need of every other plan that still exists stays, as it was seen. So does memory
that was pinned for graphs that are in no such plan (a model that is one graph). So memory does not come and go where
steps of an actor and of a critic take turns. Memory that is pinned later (for a longer evaluation, say) stays. Where
sizes vary from call to call nothing goes: the next batch may be as long as the longest one.

The thread that begins the next step trims, between two steps. It gives the first chunk up and goes on for a quarter of
a step. The rest goes after the next steps, whatever they follow. The driver lets everything on the device end before it
gives the first chunk up, whichever thread asks for it. Each chunk of 128 MiB takes 2.1 ms after that, or 5 where two
ranks trim at once. All at once, one step of FSDP2 took 0.80 s, and the others 0.43: 9.6 GiB went on each rank (two
H200s, 2026-11-28). Rejected: a thread of its own, which rested between chunks. It let 48 steps of 65 ms wait 2 ms each
for 6 GiB (H200, 2026-11-22, a script that was not kept; see ``benchmarks run pinning --variants give_back``).
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

# Whole steps in a row, after one that did the same, that show the need of a plan.
STEADY_STEPS = 4

# How long memory goes between two steps of a plan, as a part of the time of its shortest one.
STEP_SHARE = 0.25


class HostMemory(Protocol):
    """Memory that can be trimmed; see ``CopyEngine``."""

    def mark_host_memory(self) -> None:
        """Count the need from here on."""
        ...

    def host_bytes_needed(self) -> int:
        """The end of the highest block since the mark."""
        ...

    def host_bytes_reserved(self) -> int:
        """Bytes of pinned memory."""
        ...

    def may_trim(self) -> bool:
        """Whether a trim can begin now."""
        ...

    def trim_host_memory(self, keep_bytes: int, limit_s: float) -> int:
        """Give back free memory above ``keep_bytes``: one chunk, and more for ``limit_s`` seconds. Returns bytes; 0:
        none goes."""
        ...


@dataclass
class _PlanSteps:
    """Steps that followed one plan, since the mark.

    Attributes:
        count: after the first one.
        last_s: when the last one was over.
        shortest_s: from the end of one to the end of the next.
    """

    count: int
    last_s: float
    shortest_s: float = math.inf

    @property
    def limit_s(self) -> float:
        """How long memory may go behind one of them."""
        return 0.0 if math.isinf(self.shortest_s) else STEP_SHARE * self.shortest_s


@dataclass
class _Trim:
    """A trim that has begun.

    Attributes:
        left_bytes: that may still go. Memory that is pinned meanwhile does not add to them.
    """

    left_bytes: int
    given_bytes: int = 0
    seconds: float = 0.0


class HostTrim:
    """See [Note: When host memory is trimmed]. Its methods are called one at a time, when a step is over."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._needs: weakref.WeakKeyDictionary[Hashable, int] = weakref.WeakKeyDictionary()  # of plans that had theirs
        self._steps: weakref.WeakKeyDictionary[Hashable, _PlanSteps] = weakref.WeakKeyDictionary()
        self._is_marked = False
        self._trim: _Trim | None = None

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
        if plan in self._needs and self._trim is None:
            return
        if not self._is_marked:
            self._memory.mark_host_memory()
            self._is_marked = True
        steps = self._counted(plan)
        is_due = plan not in self._needs and steps.count >= STEADY_STEPS
        if (is_due or self._trim is not None) and may_shrink() and self._memory.may_trim():
            if is_due:
                self._needs[plan] = self._memory.host_bytes_needed()
            if self._needs:
                self._go_on(max(*self._needs.values(), others_bytes()), is_due, steps.limit_s)

    def interrupted(self) -> None:
        """A step followed no plan: its need does not count."""
        self._steps.clear()
        self._is_marked = False

    def forget(self) -> None:
        """All compiled code is dropped, and all plans with it."""
        self.interrupted()
        self._needs.clear()
        self._trim = None

    def _counted(self, plan: Hashable) -> _PlanSteps:
        now = time.perf_counter()
        steps = self._steps.get(plan)
        if steps is None:
            steps = self._steps[plan] = _PlanSteps(0, now)
        else:
            steps.count += 1
            steps.shortest_s = min(steps.shortest_s, now - steps.last_s)
            steps.last_s = now
        return steps

    def _go_on(self, keep_bytes: int, is_due: bool, limit_s: float) -> None:
        """Begin a trim or go on with it. No step fails for it."""
        self._trim = self._trim or _Trim(0)
        if is_due:
            self._trim.left_bytes = self._memory.host_bytes_reserved() - keep_bytes
        trim, began, given = self._trim, time.perf_counter(), 0
        if trim.left_bytes > 0:
            try:
                given = self._memory.trim_host_memory(keep_bytes, limit_s)
            except Exception as error:
                log.warning("host memory that no step needs stays: %s: %s", type(error).__name__, error)
        trim.seconds += time.perf_counter() - began
        trim.given_bytes += given
        trim.left_bytes -= given
        if given and trim.left_bytes > 0:
            return
        self._trim = None
        if trim.given_bytes:
            log.info(
                "gave %.2f GiB of host memory back, which only the first steps needed, and kept %.2f GiB (%.0f ms)",
                trim.given_bytes / 2**30,
                self._memory.host_bytes_reserved() / 2**30,
                1e3 * trim.seconds,
            )
