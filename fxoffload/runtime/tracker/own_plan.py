"""Graphs with plans of their own that run in one step: each was planned as if it were all of the step.

Where a model has graph breaks, or DDP cuts it into buckets, a step runs several graphs of several layers each. Once
they are seen in one step, the graphs that were cut into segments are planned together, like layers that are compiled
each on its own. With a budget of the user's, they are not where their plans fit into it side by side. A graph that
fits into it alone, its loss included, is plain Inductor's. Nothing of it can move: a warning says so. One whose loss is
outside is planned as a step when it exceeds its budget (``OwnPlan.as_step``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fxoffload.runtime.tracker.budget_loop import BudgetLoop
from fxoffload.sizes import format_bytes
from fxoffload.tell import warn
from fxoffload.torch_private.storages import StorageRef


class HasOwnPlan(Protocol):
    """A graph that may have a plan of its own."""

    own_plan: OwnPlan | None


IS_PLAIN = "it fits into the budget alone, and so it was compiled as plain Inductor does"


@dataclass(eq=False)
class OwnPlan:
    """A graph with a plan of its own.

    Attributes:
        peak_bytes: of that plan.
        budget_bytes: that it was made for; 0: there was none.
        join: lets the graph be part of a plan for the whole step; or why it cannot be.
        is_done: whether it has joined, or a warning said that it cannot.
        loop: judges its steps where it is plain Inductor's.
        has_exceeded: whether a warning said that its steps exceed the budget.
    """

    peak_bytes: int
    budget_bytes: int
    join: Callable[[], None] | str
    is_done: bool = False
    loop: BudgetLoop = field(init=False)
    has_exceeded: bool = False

    def __post_init__(self) -> None:
        self.loop = BudgetLoop(self.budget_bytes, num_skipped=1)

    def exceeded(self, peak_bytes: int) -> None:
        """A step of this graph alone had this peak. Its plan cannot be corrected: warns, once."""
        if self.has_exceeded:
            return
        self.has_exceeded = True
        planned = max(self.budget_bytes - max(peak_bytes - self.peak_bytes, 0), 1)
        warn(
            f"expected steps within the activation_budget of {format_bytes(self.budget_bytes)}, found one that took "
            f"{format_bytes(peak_bytes)}: its graph was compiled as plain Inductor does, since it was predicted to "
            f"take {format_bytes(self.peak_bytes)}. activation_budget={peak_bytes} is met as it is; "
            f"activation_budget={planned} has it planned to stay within {format_bytes(self.budget_bytes)}",
        )

    def as_step(self) -> bool:
        """Have it planned as a step of one call: whether it will be."""
        if self.is_done or isinstance(self.join, str):
            return False
        self.is_done = True
        self.join()
        return True

    def together(self) -> None:
        """The graph runs in one step with others: join their plan, or warn that it cannot. Once."""
        if self.is_done:
            return
        self.is_done = True
        if not isinstance(self.join, str):
            self.join()
            return
        warn(
            "expected graphs whose forwards wait for their backwards at the same time to be planned together, for an "
            f"activation_budget of {format_bytes(self.budget_bytes)}; found one that cannot be: {self.join}. Each of "
            "them may take the whole budget. Compile the model without graph breaks, or each layer on its own; run "
            "forwards without a backward under torch.no_grad()",
        )


class PlainCalls:
    """Forwards of graphs that are plain Inductor's, until their backwards."""

    def __init__(self) -> None:
        self._saved: list[tuple[OwnPlan, StorageRef]] = []

    def waiting(self) -> list[OwnPlan]:
        """Of those whose backward is to come."""
        if self._saved:
            self._saved = [(graph, saved) for graph, saved in self._saved if not saved.is_expired()]
        return [graph for graph, _ in self._saved]

    def ran(self, graph: OwnPlan, saved: Tensor) -> None:
        """A forward has returned; its backward holds ``saved``."""
        self._saved.append((graph, StorageRef(saved)))


def plan_together(calls: Sequence[HasOwnPlan], plain: Sequence[OwnPlan]) -> bool:
    """Have graphs planned together whose forwards wait for their backwards at the same time, unless their own plans
    add up to no more than a budget. Returns whether any joined the others now.

    Args:
        calls: of graphs that were cut.
        plain: calls of graphs that were not.
    """
    cut = [tracked.own_plan for tracked in calls if tracked.own_plan is not None]
    everyone = [*cut, *plain]
    if not everyone or len(calls) + len(plain) < 2:
        return False
    are_done = [one.is_done for one in cut]
    budgets = [one.budget_bytes for one in everyone if one.budget_bytes]
    exceeds = bool(budgets) and sum(one.peak_bytes for one in everyone) > min(budgets)
    if exceeds or not budgets or len(cut) < len(calls):
        for one in cut:
            one.together()
    if exceeds:
        for one in plain:
            one.together()
    return any(one.is_done != was_done for one, was_done in zip(cut, are_done, strict=True))


def saved_of_its_own(args: Sequence[Any], results: Sequence[Any], num_user_outputs: int) -> int | None:
    """Position of a saved result whose storage is neither an argument's nor a user output's; None: there is none."""
    others = (*args, *results[:num_user_outputs])
    given = {StorageRef(a).key for a in others if isinstance(a, Tensor)}
    for i, value in enumerate(results[num_user_outputs:], num_user_outputs):
        if isinstance(value, Tensor) and StorageRef(value).key not in given:
            return i
    return None
