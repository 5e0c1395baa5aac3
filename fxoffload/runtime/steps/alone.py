"""Graphs with plans of their own that run in one step: each was planned as if it had the budget to itself.

Where a model has graph breaks, or DDP cuts it into buckets, a step runs several graphs of several layers each. When
they are seen together, those that were cut are planned together from then on, like layers that are compiled each on its
own. One that fits into the budget alone is plain Inductor's, and nothing of it can move: then somebody is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxoffload._torch_compat import StorageRef
from fxoffload.sizes import format_bytes

if TYPE_CHECKING:
    from fxoffload.runtime.steps.calls import Site

IS_PLAIN = "it fits into the budget alone, and so it was compiled as plain Inductor does"


@dataclass(eq=False)
class PlannedAlone:
    """A graph with a plan of its own, for a budget.

    Attributes:
        peak_bytes: of that plan.
        budget_bytes: that it was made for.
        join: lets the graph be part of a plan for the whole step; or why it cannot be.
        is_told: whether that was told.
    """

    peak_bytes: int
    budget_bytes: int
    join: Callable[[], None] | str
    is_told: bool = False

    def tell(self) -> None:
        """That it cannot be planned together with others, once."""
        if not self.is_told:
            self.is_told = True
            warnings.warn(
                "expected graphs that can be planned together, for an activation_budget of "
                f"{format_bytes(self.budget_bytes)}; found one with a plan of its own, in a step with others, that "
                f"cannot: {self.join}. Each of them may take the whole budget. Compile the model without graph breaks, "
                "or each layer on its own",
                stacklevel=2,
            )


class PlainCalls:
    """Forwards of graphs that are plain Inductor's, until their backwards."""

    def __init__(self) -> None:
        self._saved: list[tuple[PlannedAlone, StorageRef]] = []

    def waiting(self) -> list[PlannedAlone]:
        """Of those whose backward is to come."""
        self._saved = [(graph, saved) for graph, saved in self._saved if not saved.is_expired()]
        return [graph for graph, _ in self._saved]

    def ran(self, graph: PlannedAlone, saved: Tensor) -> None:
        """A forward has returned; its backward holds ``saved``."""
        self._saved.append((graph, StorageRef(saved)))


def plan_together(calls: Sequence[Site], plain: Sequence[PlannedAlone]) -> None:
    """Graphs were called in one step, before any backward. What was planned alone is planned together from now on,
    unless the plans fit into the budget side by side.

    Args:
        calls: of graphs that were cut.
        plain: calls of graphs that were not.
    """
    cut = [site.alone for site in calls if site.alone is not None]
    everyone = [*cut, *plain]
    if not everyone or len(calls) + len(plain) < 2:
        return
    exceeds = sum(one.peak_bytes for one in everyone) > min(one.budget_bytes for one in everyone)
    if exceeds or len(cut) < len(calls):
        for site in dict.fromkeys(calls):
            one, site.alone = site.alone, None
            if one is not None and not isinstance(one.join, str):
                one.join()
            elif one is not None:
                one.tell()
    if exceeds:
        for one in plain:
            one.tell()


def saved_of_its_own(args: Sequence[Any], results: Sequence[Any], num_user_outputs: int) -> int | None:
    """Position of a result that is saved and that no argument holds; None: there is none."""
    given = {StorageRef(a).key for a in args if isinstance(a, Tensor)}
    for i, value in enumerate(results[num_user_outputs:], num_user_outputs):
        if isinstance(value, Tensor) and StorageRef(value).key not in given:
            return i
    return None
