"""The aims of plans, and their gains, in words."""

from __future__ import annotations

from fxoffload.planner.objective import Objective
from fxoffload.planner.plan import Prediction
from fxoffload.planner.simulate import Simulation
from fxoffload.sizes import format_bytes


def aim_of(objective: Objective) -> str:
    """The aim, in words."""
    if objective.is_checkpointing:
        peak = format_bytes(objective.budget_bytes or 0)
        return f"the fastest plan found within activation checkpointing's peak, {peak}"
    if objective.budget_bytes is not None:
        return f"the fastest plan found within {format_bytes(objective.budget_bytes)}"
    return f"the least peak found within a slowdown of {100 * (objective.max_slowdown or 0):.3g} %"


def gain_of(found: Prediction | Simulation, base: Prediction | Simulation) -> str:
    """What ``found`` saves of ``base``, and takes for it."""
    saved = 1 - found.peak_bytes / base.peak_bytes if base.peak_bytes else 0.0
    slowdown = found.step_ms / base.step_ms - 1 if base.step_ms else 0.0
    memory = f"{100 * abs(saved):.0f} % {'more' if saved < 0 else 'less'} memory"
    return f"{memory} for {100 * slowdown:+.1f} % time"


def slower_than_allowed(objective: Objective, found: Simulation, baseline: Simulation) -> str | None:
    """A warning where a budget costs more time than ``max_slowdown`` allows; None: it does not, or there is none."""
    budget, bound = objective.budget_bytes, objective.max_slowdown
    slowdown = found.step_ms / baseline.step_ms - 1 if baseline.step_ms else 0.0
    if budget is None or bound is None or slowdown <= bound:
        return None
    return (
        f"the activation_budget of {format_bytes(budget)} costs a predicted slowdown of {100 * slowdown:.1f} %, above "
        f"max_slowdown ({100 * bound:.3g} %); the budget wins. Raise the budget, or allow the slowdown"
    )
