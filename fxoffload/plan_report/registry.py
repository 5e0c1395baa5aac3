"""The plans of the graphs compiled in this process, for ``fxoffload.plans()``."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any

from fxoffload.errors import NoPlanError
from fxoffload.plan_report.plan import Plan
from fxoffload.reset import on_reset


class PlanBox:
    """Holds the newest version of the plan of one graph, or of a step over several; listed for as long as the (first)
    graph's code holds the box."""

    def __init__(self, plan: Plan) -> None:
        self.index = next(_INDEX)
        self.plan = dataclasses.replace(plan, graph=self.index)
        _BOXES.add(self)

    def update(self, **changes: Any) -> None:
        """Put later knowledge into the plan."""
        self.plan = dataclasses.replace(self.plan, **changes)


_INDEX = itertools.count()
_BOXES: weakref.WeakSet[PlanBox] = weakref.WeakSet()
on_reset(_BOXES.clear)


def plans() -> list[Plan]:
    """The plans of the graphs that were compiled under policy "auto" and are alive, and of steps over several such
    graphs, in the order in which they were made."""
    return [box.plan for box in sorted(_BOXES, key=lambda b: b.index)]


def last_plan() -> Plan:
    """The last of ``plans()``: of the step that was planned last, or of the whole step where it has several graphs.

    Raises:
        NoPlanError: (a LookupError) there is none.
    """
    found = plans()
    if not found:
        raise NoPlanError(
            "expected a plan, found none: plans are made when a compiled model is called with gradients for the first "
            'time, under policy "auto", with tensors on a device that activations are offloaded from (device_types; '
            "the CPU is none by default) and within the model's life. fxoffload.plan(model, inputs, device='h200') "
            "plans without running"
        )
    return found[-1]
