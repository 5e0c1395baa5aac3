"""Plans a step over several graphs before training begins, instead of after its first steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.registry import plans
from fxoffload.runtime.engine import engines

# Two are recorded; the third compiles the plan's variants, and follows it. One before them where graphs with plans of
# their own are seen together, one where the first recompiles.
_MOST_STEPS = 5


def profile_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Plan]:
    """Run ``step`` a few times, until the graphs that it calls are planned together and it follows that plan.

    Without it the same happens in the first steps of training, and on a GPU the plan is made while they run. With it,
    and with one call for each way in which steps run (lengths of a batch, an actor and a critic), training begins with
    its plans. Random generators are as before. Parameters are not touched, but gradients add up as in any step: zero
    them before training.

    Args:
        step: one forward and backward, as training runs them: the same modules, modes and sizes, no optimizer. It is
            called at most five times.
        *args: of ``step``.
        **kwargs: of ``step``.

    Returns:
        The plans made meanwhile, those of single graphs too; empty where everything was planned before.
    """
    before = {plan.graph for plan in plans()}
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        for _ in range(_MOST_STEPS):
            step(*args, **kwargs)
            if all([engine.calls.end_step() for engine in engines()]):
                break
    return [plan for plan in plans() if plan.graph not in before]
