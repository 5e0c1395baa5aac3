"""Which backward comes next, learned from the steps before.

An ordinary step runs its backwards in the reverse order of its forwards. A pipeline of microbatches does not: there the
oldest forward pass goes backward first, and other forwards run in between. So two things are remembered:

- The backward that followed the same events, since the save order was last empty. A step that repeats is predicted
  exactly.

- The backward that followed one of the same graph at the same place among those that waited, counted from the oldest.
  That also holds for a step with another number of microbatches.

Where neither is known, the next is the one saved right before. All of it is a guess.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

# Most entries of each kind that are remembered; the oldest is forgotten first.
_MOST_REMEMBERED = 1 << 13

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Waiting(NamedTuple):
    """A forward that waits for its backward: its number, as ``BackwardOrder.forward`` gave it, and its graph."""

    number: int
    graph: Hashable


class _Place(NamedTuple):
    graph: Hashable
    position: int  # among those that waited, the oldest first


class BackwardOrder:
    """Watches forwards and backwards go by. Not thread-safe: see ``fxoffload.runtime.save_order``."""

    def __init__(self) -> None:
        # A digest of the events -> the number of the next backward, and the digest after it.
        self._next: dict[int, tuple[int, int]] = {}
        self._next_place: dict[_Place, int | None] = {}  # None: its forward had not run
        self.restart()

    def restart(self) -> None:
        """Nothing waits: numbers are counted from zero, and the next events are a step of their own."""
        self._count = 0
        self._events = 0
        self._behind = 0  # the events up to the last backward; before the first one, all
        self._place: _Place | None = None  # of the last backward
        self._count_before = 0  # forwards before the last backward
        self._turned = False

    def forget(self) -> None:
        """Drop all that was learned of steps; forwards that wait for their backwards stay."""
        self._next.clear()
        self._next_place.clear()

    def forward(self, graph: Hashable) -> int:
        """A forward of ``graph`` has run. Returns its number."""
        self._events = hash((self._events, graph))
        if not self._turned:
            self._behind = self._events
        self._count += 1
        return self._count - 1

    def backward(self, number: int, waiting: Sequence[Waiting]) -> None:
        """The backward of ``number`` begins. ``waiting``: forwards that waited for theirs, the oldest first."""
        self._events = hash((self._events, "backward", number))
        index = next((i for i, w in enumerate(waiting) if w.number == number), None)
        _remember(self._next, self._behind, (number, self._events))
        if self._place is not None and index is not None:
            _remember(self._next_place, self._place, index if number < self._count_before else None)
        self._behind, self._turned, self._count_before = self._events, True, self._count
        self._place = None if index is None else _Place(waiting[index].graph, index)

    def expected(self, waiting: Sequence[Waiting]) -> tuple[list[int], bool]:
        """The numbers of those that wait (the oldest first) whose backwards are expected next, in order.

        The second result is True where nothing is known of the order after them. It is False where a forward that has
        not run yet is expected to go backward next.
        """
        if self._behind in self._next:
            return self._as_seen(waiting)
        found: list[int] = []
        place, rest = self._place, list(waiting)
        while place is not None and rest:
            index = self._next_place.get(place, place.position - 1)
            if index is None:
                return found, False
            index = index if index < len(rest) else place.position - 1
            if not 0 <= index < len(rest):
                break
            place = _Place(rest[index].graph, index)
            found.append(rest.pop(index).number)
        return found, True

    def _as_seen(self, waiting: Sequence[Waiting]) -> tuple[list[int], bool]:
        found: list[int] = []
        left = {w.number for w in waiting}
        events = self._behind
        while left and (behind := self._next.get(events)) is not None:
            number, events = behind
            if number >= self._count:
                return found, False
            if number in left:
                left.remove(number)
                found.append(number)
        return found, True


def _remember(memory: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > _MOST_REMEMBERED:
        del memory[next(iter(memory))]
