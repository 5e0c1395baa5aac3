"""The order in which the calls of a step run, where that is not the usual one.

Usually all forwards run first, then the backwards in reverse. A pipeline runs several microbatches in turn: after
some forwards, a backward is followed by the next forward (1F1B). Such a step is a sequence of *runs*: forwards,
backwards, forwards again, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from fxoffload.step.edges import CallAt


def usual_order(num: int) -> tuple[CallAt, ...]:
    """The forwards of ``num`` calls, then their backwards in reverse."""
    return *(("forward", k) for k in range(num)), *(("backward", k) for k in reversed(range(num)))


@dataclass(frozen=True)
class CallOrder:
    """An unusual order of the calls of a step.

    Attributes:
        calls: each forward, and each backward after its forward. The step begins with a forward, and ends with a
            backward. Places are counted in the order of the forwards.

    Raises:
        ValueError: calls that are no such step.
    """

    calls: tuple[CallAt, ...]

    def __post_init__(self) -> None:
        forwards = [call for phase, call in self.calls if phase == "forward"]
        backwards = [call for phase, call in self.calls if phase == "backward"]
        is_step = bool(forwards) and forwards == list(range(len(forwards))) == sorted(backwards)
        if not is_step or any(self.positions["backward", k] < self.positions["forward", k] for k in forwards):
            raise ValueError(f"expected each forward, in order, and each backward after its own, found {self.calls}")

    @staticmethod
    def of(calls: Sequence[CallAt]) -> CallOrder | None:
        """The order of a step whose calls ran so; None: the usual one."""
        return None if tuple(calls) == usual_order(len(calls) // 2) else CallOrder(tuple(calls))

    @cached_property
    def positions(self) -> dict[CallAt, int]:
        """Of each call in ``calls``."""
        return {at: i for i, at in enumerate(self.calls)}

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The calls in the order of their backwards."""
        return tuple(call for phase, call in self.calls if phase == "backward")

    @cached_property
    def runs(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Forwards and the backwards that follow them, in turn."""
        parts = [tuple(call for _, call in part) for _, part in groupby(self.calls, key=lambda at: at[0])]
        return tuple(zip(parts[::2], parts[1::2], strict=True))

    def following(self, call: int) -> tuple[int, ...]:
        """The backwards that run between the backward of ``call`` and the next forward, or the step's end."""
        run = next(backwards for _, backwards in self.runs if call in backwards)
        return run[run.index(call) + 1 :]

    def at(self, position: int) -> CallAt | None:
        """The call there; None: the step is over by then."""
        return self.calls[position] if position < len(self.calls) else None
