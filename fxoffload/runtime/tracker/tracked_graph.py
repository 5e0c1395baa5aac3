"""One compiled graph of a step: the choices that its calls follow, and who is told when they begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fxoffload.runtime.profiler.call_recorder import Recorder
from fxoffload.runtime.tracker.budget_loop import BudgetControl
from fxoffload.runtime.tracker.chains import (
    CallSizes,
    Chains,
    Planner,
    PlanObserver,
    Sizes,
)
from fxoffload.runtime.tracker.own_plan import OwnPlan
from fxoffload.runtime.transfer import Group
from fxoffload.step.choice import Choice
from fxoffload.step.edges import Edges


class CallEvents(Protocol):
    """Is told of the calls of tracked graphs: a ``StepTracker``."""

    def await_plan(self, tracked: TrackedGraph, args: Sequence[Any]) -> None:
        """Wait for the plan that the step which begins at ``tracked`` needs. An exception that comes meanwhile is the
        caller's."""
        ...

    def forward_begins(self, tracked: TrackedGraph, args: Sequence[Any]) -> None:
        """See ``TrackedGraph``."""
        ...

    def forward_ends(self, tracked: TrackedGraph, group: Group, results: Sequence[Any], token: Tensor | None) -> None:
        """See ``TrackedGraph``."""
        ...

    def backward_begins(self, tracked: TrackedGraph, group: Group, args: Sequence[Any]) -> Group:
        """See ``TrackedGraph``."""
        ...

    def backward_ends(self, tracked: TrackedGraph, results: Sequence[Any]) -> None:
        """See ``TrackedGraph``."""
        ...

    def follow_instead(
        self, tracked: TrackedGraph, observer: PlanObserver, choices: tuple[Choice, ...], spare_bytes: int = 0
    ) -> None:
        """If the next step still follows the plan of ``observer``, it makes these choices."""
        ...

    def give_up(self, error: Exception) -> None:
        """Watching failed."""
        ...


@dataclass(eq=False)
class TrackedGraph:
    """One compiled graph whose calls are tracked. Made by ``StepTracker.track``.

    Attributes:
        description: the planner's description of the graph; None: no chain that it is in is planned.
        sizes: of its calls, where they vary; None: they do not.
        edges: of the graph.
        planner: plans a chain that begins here.
        may_follow: whether the graph follows a plan, at the moment.
        may_keep: whether it computes as the plan says, but keeps everything.
        followed: the choice for the forward that begins now; None: it runs as it does without a plan.
        written: inputs, by their names in ``edges``, that were modified between some call and its backward.
        at_first: a forward's choice until its chain is planned; None: it runs as it does without a plan. With a budget
            it applies in all steps, else in those in which memory outside the graphs is read.
        measure: makes the recorder of the call that begins now; None: it is not measured.
        chains: that begin here.
        reserved_bytes: of host memory, pinned for one call of it when it was compiled.
        may_record: whether the allocator may be asked to record its events in steps that begin here.
        may_trim: whether host memory that its steps leave free may go: not where sizes vary from call to call.
        own_plan: of a graph with a plan of its own.
        control: of such a graph, where its plan can be corrected.
        has_budget: whether its steps have one, as far as they are planned.
        gives_up: called when no chain that begins here will be planned.
    """

    calls: CallEvents
    description: Any = None
    edges: Edges | None = None
    planner: Planner | None = None
    may_follow: Callable[[], bool] = lambda: False
    may_keep: Callable[[], bool] = lambda: False
    followed: Choice | None = None
    at_first: Choice | None = None
    written: set[str] = field(default_factory=set)
    measure: Callable[[], Recorder | None] | None = None
    sizes: CallSizes | None = None
    chains: Chains = field(default_factory=Chains)
    reserved_bytes: int = 0
    may_record: bool = True
    may_trim: bool = True
    own_plan: OwnPlan | None = None
    control: BudgetControl | None = None
    has_budget: bool = False
    gives_up: Callable[[], None] = lambda: None

    @property
    def is_held_alone(self) -> bool:
        """Whether its own plan is followed although its steps are known: it meets its budget."""
        return self.control is not None and self.chains.known is not None

    def sizes_of(self, args: Sequence[Any]) -> Sizes:
        """Of the call with these arguments; empty where they do not vary."""
        return () if self.sizes is None else self.sizes.told_by(args)

    def planned_sizes(self, args: Sequence[Any]) -> Sizes:
        """The sizes that the call with these arguments is planned for."""
        return () if self.sizes is None else self.sizes.rounded_up(self.sizes.told_by(args))

    def forward_begins(self, args: Sequence[Any]) -> None:
        """A forward call begins: sets ``followed``. May wait for a plan first."""
        if self.chains.may_prepare or (self.has_budget and self.chains.before is not None):
            self.calls.await_plan(self, args)
        try:
            self.calls.forward_begins(self, args)
        except Exception as error:
            self.followed = None
            self.calls.give_up(error)

    def recorder(self) -> Recorder | None:
        """Of the call that has just begun; None: it is not measured."""
        measure, self.measure = self.measure, None
        return None if measure is None else measure()

    def forward_ends(self, group: Group, results: Sequence[Any], token: Tensor | None = None) -> None:
        """It has saved ``group`` and returns ``results``. ``token``: of the bundle of a call of a variant."""
        try:
            self.calls.forward_ends(self, group, results, token)
        except Exception as error:
            self.calls.give_up(error)

    def backward_begins(self, group: Group, args: Sequence[Any]) -> Group:
        """A backward call begins. ``group``: of its tokens, empty where it was given none. Returns the group to go on
        with: that of the forward call, where it follows a plan and moved nothing."""
        try:
            return self.calls.backward_begins(self, group, args)
        except Exception as error:
            self.calls.give_up(error)
            return group

    def backward_ends(self, results: Sequence[Any]) -> None:
        """It returns ``results``."""
        try:
            self.calls.backward_ends(self, results)
        except Exception as error:
            self.calls.give_up(error)
