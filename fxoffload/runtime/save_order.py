"""The save order: the order in which groups were saved, over all compiled graphs of a step.

A backward runs the forwards in reverse. So while the backward of one group runs, the groups saved before it are
needed next. The save order only predicts: a wrong guess costs time, never correctness. Where steps have another order,
as microbatches of a pipeline do, their plan says what follows. It holds groups weakly: a forward that never goes
backward leaves no trace.
"""

from __future__ import annotations

import weakref

from fxoffload.runtime.fork_safe_lock import ForkSafeRLock
from fxoffload.runtime.transfer import Group


class SaveOrder:
    """Groups in the order of their forwards. Thread-safe: autograd runs backwards on another thread."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[Group]] = []
        self._lock = ForkSafeRLock()

    def push(self, group: Group) -> None:
        """A forward call has saved ``group``."""
        with self._lock:
            self._groups = [*map(weakref.ref, self._live()), weakref.ref(group)]

    def begin_backward(self, group: Group, *, keeps_graph: bool) -> list[Group]:
        """The backward of ``group`` begins. Returns the live groups whose backwards are expected to follow, the
        next one first, without those that were passed over. Unless it keeps its graph the group leaves the save order.

        A group that holds nothing is not in the save order: all groups are expected to follow it.
        """
        with self._lock:
            live = self._live()
            at = next((i for i in range(len(live) - 1, -1, -1) if live[i] is group), None)
            if at is None and len(group):
                return []
            earlier = live[:at]
            if at is not None and not keeps_graph:
                self._groups = [weakref.ref(g) for g in live if g is not group]
            if group.was_passed_over:
                # It did begin, and so may those before it.
                for other in earlier:
                    other.was_passed_over = False
            return [g for g in reversed(earlier) if not g.was_passed_over]

    def live(self) -> list[Group]:
        """Groups that autograd still holds, oldest first."""
        with self._lock:
            return self._live()

    def _live(self) -> list[Group]:
        return [group for ref in self._groups if (group := ref()) is not None]

    def __len__(self) -> int:
        return len(self.live())
