"""The save order: the order in which groups were saved, over all compiled graphs of a step.

A backward runs the forwards in reverse. So while the backward of one group runs, the groups saved before it are
needed next, unless another order was seen before (``fxoffload.runtime.backward_order``). The save order only
predicts: a wrong guess costs time, never correctness. It holds groups weakly: a forward that never goes backward leaves
no trace.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from fxoffload.runtime.backward_order import BackwardOrder, Waiting
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock
from fxoffload.runtime.transfer import Group


class TurnWatch:
    """Whether one compiled forward is where the step turns into the backward, so that its last values may stay."""

    def __init__(self) -> None:
        self._followed = False

    def is_here(self, live: list[Group]) -> bool:
        """Asked when the forward begins, with the groups that wait for their backward.

        One forward's last values may stay, not those of every microbatch. A forward that another graph's forward
        follows is not the turn: the one that follows notes that here, and it moves everything from then on.
        """
        kept = [g for g in live if g.kept_turn_of is not None]
        for group in kept:
            if group.kept_turn_of is not self:
                group.kept_turn_of._followed = True  # type: ignore[union-attr]
        return not kept and not self._followed


@dataclass(slots=True)
class _SavedGroup:
    """A group in the save order."""

    ref: weakref.ref[Group]
    waiting: Waiting
    waits: bool = True  # no backward of it has begun


class SaveOrder:
    """Groups in the order of their forwards. Thread-safe: autograd runs backwards on another thread."""

    def __init__(self) -> None:
        self._entries: list[_SavedGroup] = []
        self._order = BackwardOrder()
        self._lock = ForkSafeRLock()

    def push(self, group: Group) -> None:
        """A forward call has saved ``group``."""
        with self._lock:
            if not self._live():
                self._order.restart()
            number = self._order.forward(group.graph)
            self._entries.append(_SavedGroup(weakref.ref(group), Waiting(number, group.graph)))

    def begin_backward(self, group: Group, *, keeps_graph: bool) -> list[Group]:
        """The backward of ``group`` begins. Returns the live groups whose backwards are expected to follow, the
        next one first. Unless it keeps its graph the group leaves the save order.

        A group that holds nothing is not in the save order, and its backward is no event: the expectation from before
        it stays.
        """
        with self._lock:
            live = self._live()
            at = next((i for i in range(len(live) - 1, -1, -1) if live[i][1] is group), None)
            if at is None and len(group):
                return []
            earlier = live if at is None else live[:at]
            if at is not None:
                mine = live[at][0]
                self._order.backward(mine.waiting.number, [e.waiting for e, _ in live if e.waits])
                mine.waits = False
                if not keeps_graph:
                    self._entries = [e for e, g in live if g is not group]
            by_number = {e.waiting.number: g for e, g in live if e.waits}
            numbers, ends_there = self._order.expected([e.waiting for e, _ in live if e.waits])
            found = [by_number[n] for n in numbers]
            if ends_there:
                known = {id(g) for g in found}
                found += [g for _, g in reversed(earlier) if id(g) not in known]
            return found

    def forget(self) -> None:
        """All compiled code is dropped. Groups that wait for their backward stay."""
        with self._lock:
            self._order.forget()

    def live(self) -> list[Group]:
        """Groups that autograd still holds, oldest first."""
        with self._lock:
            return [group for _, group in self._live()]

    def _live(self) -> list[tuple[_SavedGroup, Group]]:
        live = [(e, g) for e in self._entries if (g := e.ref()) is not None]
        self._entries = [e for e, _ in live]
        return live

    def __len__(self) -> int:
        return len(self.live())
