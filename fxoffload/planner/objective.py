"""The objective of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

DEFAULT_MAX_SLOWDOWN = 0.02
# ``Objective.source`` where the options name no objective: in general, and where activation checkpointing is on.
DEFAULT, CHECKPOINTING = "default", "checkpointing"
# Copies cost more than simulated where several GPUs of one host train together: each waits for the slowest. This part
# of a step is left free of the allowed slowdown. Plans for two GPUs took 0.2 to 1.0 % more than they aimed at in steps
# of 780 ms. In steps of 410 ms they took 0.5 to 2.6 % more in eleven of twelve runs, mostly 1.3 or more (2026-11-25 to
# 29). On one GPU nothing is to be seen.
SHARED_RESERVE = 0.015
# The reserve is no more than this part of the slowdown.
_MOST_RESERVED = 0.75


@dataclass(frozen=True)
class Objective:
    """The least time within a budget, or the least peak within a slowdown.

    Attributes:
        budget_bytes: most bytes above those allocated when the step began; None: the slowdown decides.
        max_slowdown: over plain Inductor, 0.02 is 2 %; with a budget, beyond it there is a warning.
        source: who asked: "options", ``DEFAULT`` or ``CHECKPOINTING``.
        reserve: part of a step that is left free of the slowdown.
    """

    budget_bytes: int | None = None
    max_slowdown: float | None = None
    source: str = "options"
    reserve: float = 0.0

    @staticmethod
    def of(budget_bytes: int | None, max_slowdown: float | None, *, num_processes: int = 1) -> Objective:
        """The objective for two options. ``num_processes``: that train together on this machine."""
        reserve = SHARED_RESERVE if num_processes > 1 else 0.0
        if budget_bytes is None and max_slowdown is None:
            return Objective(None, DEFAULT_MAX_SLOWDOWN, DEFAULT, reserve)
        return Objective(budget_bytes, max_slowdown, reserve=reserve)

    @property
    def is_default(self) -> bool:
        """Whether the options name neither a budget nor a slowdown."""
        return self.source == DEFAULT

    @property
    def is_checkpointing(self) -> bool:
        """Whether the budget is the predicted peak of activation checkpointing, which is no promise."""
        return self.source == CHECKPOINTING

    def at_checkpointing(self, peak_bytes: int) -> Objective:
        """The same for a step under activation checkpointing, which takes ``peak_bytes``: what the options ask for, or
        no more than that."""
        if not self.is_default:
            return self
        return replace(self, budget_bytes=peak_bytes, max_slowdown=None, source=CHECKPOINTING)

    def most_ms(self, plain_ms: float) -> float:
        """The time that a plan may take where plain Inductor takes ``plain_ms``."""
        slowdown = self.max_slowdown or 0.0
        return plain_ms * (1 + slowdown - min(self.reserve, _MOST_RESERVED * slowdown))
