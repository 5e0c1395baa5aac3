"""What one call of a compiled graph does: asked when its forward begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler.replan import Replan
from fxoffload.compiler.schedule_by_size import ScheduleBySize
from fxoffload.runtime.executor import reason_to_keep
from fxoffload.runtime.profiler.step_clock import StepRecording
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.runtime.variant import Variants
from fxoffload.step.choice import Choice

JOINED = "; since then planned together with all of its step"
# After as many calls that follow a plan for their step, the graph's own plan is not measured again.
_FOR_GOOD = 20


@dataclass(eq=False)
class CallChoice:
    """The choice of each call of a graph, and the recording of its step.

    The first of these that there is decides: a plan for the whole step, a schedule for the call's sizes, the graph's
    own plan, its policy. What the user asks for at run time outweighs all of them.

    Attributes:
        tracked: its place in steps over several graphs.
        order: of the forward's candidates, as positions in the choice.
        by_size: schedules calls of other sizes than the planned ones; None where sizes are fixed.
        replan: measures calls that follow the graph's own plan; None: nothing does.
    """

    graph: CompiledGraph
    tracked: TrackedGraph
    variants: Variants
    order: Sequence[int]
    by_size: ScheduleBySize | None = None
    replan: Replan | None = None
    _num_joined: int = field(default=0, init=False)  # calls in a row that followed a plan for their step
    _is_in_order: bool = field(init=False)

    def __post_init__(self) -> None:
        self._is_in_order = list(self.order) == list(range(len(self.order)))

    def decide(self, args: list[Any]) -> Choice:
        """The choice of the call with these arguments, in the order of the forward's candidates."""
        graph, instead = self.graph, self.tracked.followed
        if instead is not None and instead.variant:
            if graph.may_follow() or graph.may_keep():
                self._follows_a_step()
                return self.variants.in_order(instead)
            instead = None
        if self.by_size is not None and graph.may_follow():
            instead = self.by_size.choice(args)
        chosen = instead if instead is not None and graph.may_keep() else graph.choose(instead)
        if self._is_in_order:
            return chosen
        return replace(chosen, offload=[chosen.offload[i] for i in self.order])

    def step_begins(self, args: list[Any], choice: Choice) -> StepRecording | None:
        """The recording of the step of this call alone. None: it is not of the step that was planned, is measured with
        the other graphs of its step, or need not be measured."""
        replan = self.replan
        if self._follows_a_step() or replan is None or replan.clock is None:
            return None
        if self.by_size is not None and not self.by_size.is_planned(args):
            return None
        if choice.windows is None or reason_to_keep() is not None:
            return None
        # Sizes that vary from call to call are arguments.
        return replan.step_begins(signature=self._as_planned(choice).ran([a for a in args if isinstance(a, int)]))

    def _as_planned(self, choice: Choice) -> Choice:
        """``choice`` in the plan's order."""
        if self._is_in_order:
            return choice
        place = {at: i for i, at in enumerate(self.order)}
        return replace(choice, offload=[choice.offload[place[at]] for at in range(len(place))])

    def _follows_a_step(self) -> bool:
        """Whether the graph's own plan gives way to one for the step, which is measured instead."""
        follows, box = self.tracked.followed is not None, self.graph.plan_box
        if not follows and not self._num_joined:
            return False
        if box is not None and follows != bool(self._num_joined):
            own = box.plan.summary.removesuffix(JOINED)
            box.update(summary=own + JOINED if follows else own)
        self._num_joined = self._num_joined + 1 if follows else 0
        if self._num_joined == _FOR_GOOD and box is not None and self.replan is not None:
            self.replan.stop()  # It holds graphs.
        return follows
