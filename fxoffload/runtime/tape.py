"""The tape: the order in which groups were saved, over all compiled graphs of a step.

A backward runs the forwards in reverse, so while the backward of one group runs, the groups under it on the tape are
what will be needed next. The tape only predicts: a wrong guess costs time, never correctness. It holds groups weakly:
a forward that never goes backward leaves no trace.
"""

from __future__ import annotations

import threading
import weakref

from fxoffload.runtime.transfer import Group


class TurnWatch:
    """Whether one compiled forward is where the step turns into the backward, so that what it saves last may stay."""

    def __init__(self) -> None:
        self._followed = False

    def is_here(self, live: list[Group]) -> bool:
        """Asked when the forward begins, with the groups that wait for their backward.

        One forward's last values may stay, not those of every microbatch. A forward that another graph's forward
        follows is not the turn: it is told so here, by the one that follows, and moves everything from then on.
        """
        kept = [g for g in live if g.kept_turn_of is not None]
        for group in kept:
            if group.kept_turn_of is not self:
                group.kept_turn_of._followed = True  # type: ignore[union-attr]
        return not kept and not self._followed


class Tape:
    """Groups in the order of their forwards. Thread-safe: autograd runs backwards on another thread."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[Group]] = []
        self._lock = threading.Lock()

    def push(self, group: Group) -> None:
        """A forward call has saved ``group``."""
        with self._lock:
            self._groups = [r for r in self._groups if r() is not None]
            self._groups.append(weakref.ref(group))

    def below(self, group: Group) -> list[Group]:
        """The live groups saved before ``group``, the youngest first."""
        live = self.live()
        for i in range(len(live) - 1, -1, -1):
            if live[i] is group:
                return live[:i][::-1]
        return []

    def remove(self, group: Group) -> None:
        """The backward of ``group`` runs and does not keep its graph."""
        with self._lock:
            self._groups = [r for r in self._groups if r() is not group]

    def live(self) -> list[Group]:
        """Groups that autograd still holds, oldest first."""
        with self._lock:
            groups = [g for r in self._groups if (g := r()) is not None]
            self._groups = [weakref.ref(g) for g in groups]
            return groups

    def __len__(self) -> int:
        return len(self.live())
