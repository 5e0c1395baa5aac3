"""What a plan is asked for."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MAX_SLOWDOWN = 0.02


@dataclass(frozen=True)
class PlanGoal:
    """The least time within a budget, or the least peak within a slowdown.

    Attributes:
        budget_bytes: most bytes above what was allocated when the step began; None: the slowdown decides.
        max_slowdown: over plain Inductor, 0.02 is 2 %; with a budget, beyond it there is a warning.
        source: who asked.
    """

    budget_bytes: int | None = None
    max_slowdown: float | None = None
    source: str = "options"

    @staticmethod
    def of(budget_bytes: int | None, max_slowdown: float | None) -> PlanGoal:
        """The goal for two options."""
        if budget_bytes is None and max_slowdown is None:
            return PlanGoal(None, DEFAULT_MAX_SLOWDOWN, "default")
        return PlanGoal(budget_bytes, max_slowdown)
