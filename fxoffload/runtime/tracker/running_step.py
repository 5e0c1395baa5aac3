"""The state of the step that runs: its calls of compiled graphs so far, its plan and its measurements."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxoffload.runtime.profiler.step_clock import StepRecording
from fxoffload.runtime.profiler.step_peak import PeakWatch, StepPeak
from fxoffload.runtime.tracker.budget_loop import BudgetLoop
from fxoffload.runtime.tracker.chains import ChainPlan, Known, Record, Sizes
from fxoffload.runtime.tracker.step_memory import EdgeWatch, LiveBytes
from fxoffload.runtime.tracker.step_state import Departure, StepEvent, StepState, after
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.runtime.transfer import Group
from fxoffload.step.call_order import CallOrder
from fxoffload.step.edges import CallAt
from fxoffload.step.readings import Phase
from fxoffload.torch_private.storages import StorageRef, storage_key

# A loop whose forwards run one step ahead of its backwards never ends. After this many turns from backwards to
# forwards, the next forward begins a new step.
_MOST_TURNS = 256
# A step in them may turn out to be any order of calls.
_OBSERVABLE = (StepState.OBSERVING, StepState.WAITING)


@dataclass(eq=False)
class CallOfStep:
    """One forward call of a step, and its backward."""

    tracked: weakref.ref[TrackedGraph]
    place: int
    sizes: Sizes = ()
    group: weakref.ref[Group] | None = None  # None until the forward has returned.
    empty: Group | None = None  # Of a call that follows a plan and moved nothing: its only reference.
    kept: StorageRef | None = None  # Of such a call, or of a variant: a value that is saved for its backward.
    is_bundled: bool = False  # Of a variant: its backward knows its group.
    has_saved: bool = False  # Whether ``waits`` can tell.
    recording: StepRecording | None = None  # Of the step of this call alone: without tokens, nothing else leads to it.
    inputs: list[tuple[str, weakref.ref[Tensor], int]] = field(default_factory=list)  # Recorded: name, value, version.

    def waits(self) -> bool:
        """Whether its backward may still come, as its saved values tell."""
        group = self.group() if self.group is not None else None
        if self.kept is not None:
            return not self.kept.is_expired()
        return group is not None and len(group) > 0

    def is_left_behind(self) -> bool:
        """Whether its saved values are gone, and its backward has not begun."""
        return self.has_saved and not self.waits()

    def may_wait(self) -> bool:
        """The same, but True where nothing tells: it follows a plan and saved only inputs, which stay in any case."""
        return self.waits() or (self.empty is not None and self.kept is None)

    def saved(self, group: Group) -> bool:
        """Whether a backward with the tokens of ``group`` (empty: none) may be its own."""
        saved = self.group() if self.group is not None else None
        if self.is_bundled:
            return saved is group
        return saved is group if len(group) else saved is None or not len(saved)


@dataclass(eq=False)
class RunningStep:
    """The step that runs.

    Attributes:
        sizes: of the chain whose plan it follows, or that it is observed or measured for.
        began: the state in which it began.
        state: its state now.
        departure: why it is irregular; None: it is not.
        calls: so far.
        order: their forwards and backwards so far, in the order in which they began.
        order_expected: of the chain that it was expected to be when it began, where that is not the usual order.
        waited: the calls that waited whenever a forward began after a backward.
        num_turns: how often a forward began right after a backward.
        pending: those whose backward has not begun.
        running: the call whose backward runs.
        phase: backward once one has begun.
        plan: that it follows, while it does.
        followed: the plan that it began with.
        is_meanwhile: whether that is only there until the plan is made.
        known: of a step that is measured: the chain that is expected, whose device memory at these sizes is not known.
        reads_memory: whether the device's memory outside the graphs counts in it.
        keeps: whether a call computed as the plan says, and moved nothing.
        has_own_plan: whether a call is of a graph with a plan of its own.
        has_several: whether it was observed, and several forwards waited when the first backward began.
        recording: of a step that follows a plan and is timed.
        record: of a step that was observed and is complete.
        live_bytes: the device's memory at its calls.
        edges: memory at the edges of its calls.
        peak_watch: of a step that has to meet a budget.
        peak: of such a step that is complete.
        judged_by: the budget loop of its plan when it ended.
    """

    sizes: Sizes = ()
    began: StepState = StepState.UNPLANNED
    state: StepState = StepState.UNPLANNED
    departure: Departure | None = None
    calls: list[CallOfStep] = field(default_factory=list)
    order: list[CallAt] = field(default_factory=list)
    order_expected: CallOrder | None = None
    waited: set[tuple[int, ...]] = field(default_factory=set)
    num_turns: int = 0
    pending: list[CallOfStep] = field(default_factory=list)
    running: CallOfStep | None = None
    phase: Phase = "forward"
    plan: ChainPlan | None = None
    followed: weakref.ref[ChainPlan] | None = None
    is_meanwhile: bool = False
    known: Known | None = None
    reads_memory: bool = False
    keeps: bool = False
    has_own_plan: bool = False
    has_several: bool = False
    recording: StepRecording | None = None
    record: Record | None = None
    live_bytes: LiveBytes = field(default_factory=LiveBytes)
    edges: EdgeWatch = field(default_factory=EdgeWatch)
    peak_watch: PeakWatch | None = None
    peak: StepPeak | None = None
    judged_by: BudgetLoop | None = None

    def begin(self, state: StepState) -> None:
        """It begins in ``state``."""
        self.began = self.state = state

    @property
    def is_regular(self) -> bool:
        """Whether it is a chain of calls, and the expected one where one is expected."""
        return self.state is not StepState.IRREGULAR

    @property
    def has_ended(self) -> bool:
        """Whether all its backwards have returned."""
        return self.phase == "backward" and self.running is None and not self.pending

    def waiting(self) -> tuple[int, ...]:
        """The places of the calls whose backwards may still come."""
        return tuple(call.place for call in self.pending if call.waits())

    @property
    def is_pipeline(self) -> bool:
        """Whether a forward that begins now, after a backward, may be one of this step: forwards wait for their
        backwards, and none was left behind.

        A forward whose result the caller keeps, as an evaluation does, waits too. But it goes on to wait while others
        run forward and backward: the same calls never wait twice in a pipeline that is planned.
        """
        waiting = self.waiting()
        if not waiting or waiting in self.waited or self.num_turns >= _MOST_TURNS:
            return False
        return not any(call.is_left_behind() for call in self.pending)

    def goes_on_with(self, tracked: TrackedGraph) -> bool:
        """Whether a forward of ``tracked`` that begins after a backward is one of this step."""
        if self.running is not None or not self.pending:
            return False
        if self.expected is not None:
            place = len(self.calls)
            return self.next_expected == ("forward", place) and self.expected.has(place, tracked)
        if self.order_expected is not None:  # it departed: the rest of its calls are no step of their own
            return bool(self.waiting()) and len(self.calls) < len(self.order_expected.backwards)
        return self.state in _OBSERVABLE and self.is_pipeline

    def forward_begins(self, tracked: TrackedGraph, sizes: Sizes) -> int:
        """A forward of ``tracked`` is one of this step. Returns its place."""
        if self.phase == "backward" and self.state in _OBSERVABLE:
            self.waited.add(self.waiting())
            self.num_turns += self.order[-1][0] == "backward"
        place = len(self.calls)
        self.calls.append(CallOfStep(weakref.ref(tracked), place, sizes))
        self.order.append(("forward", place))
        return place

    def call_of(
        self, tracked: TrackedGraph, group: Group, args: Sequence[object] = ()
    ) -> tuple[CallOfStep | None, Departure | None]:
        """The call whose backward begins with the tokens of ``group``, None where it is unknown; and why the step
        departs, None where it does not. ``args``: of the backward."""
        expected, at = self.expected, self.next_expected
        if at is None:
            first = self.pending[-1] if self.pending else None
        else:
            first = next((c for c in self.pending if ("backward", c.place) == at), None)
        # Tokens are those of one call: where they are the expected one's, no other has to be looked at.
        is_first = first is not None and first.tracked() is tracked and first.saved(group)
        others: list[CallOfStep] = []
        if not is_first or not len(group):
            others = [c for c in self.pending if c.tracked() is tracked and c.saved(group)]
        if len(others) > 1 and not len(group):
            others = _given(others, args)
            is_first = any(c is first for c in others)
        if is_first:
            is_whole = at is not None or expected is None or len(self.calls) == len(expected.tracked_graphs)
            return first, None if self.phase == "backward" or is_whole else Departure.MISSED
        call = others[-1] if others else None
        if call is not None and expected is not None:
            return call, Departure.MISSED
        is_sure = call is not None and (len(group) > 0 or len(others) == 1)
        return call, None if is_sure and self.state in _OBSERVABLE else Departure.UNUSUAL

    def groups_of(self, places: Sequence[int]) -> tuple[weakref.ref[Group], ...]:
        """Of the calls at these places whose backwards have not begun."""
        waiting = {call.place: call.group for call in self.pending}
        return tuple(ref for place in places if (ref := waiting.get(place)) is not None)

    @property
    def next_expected(self) -> CallAt | None:
        """The call that begins next, where an unusual order says so; None: it does not."""
        expected = self.expected
        order = None if expected is None else expected.order
        return None if order is None else order.at(len(self.order))

    @property
    def awaits_plan(self) -> bool:
        """Whether its calls run as the first ones do, until there is a plan that serves them."""
        awaits = (StepState.WAITING, StepState.OBSERVING, StepState.MEASURING)
        return self.began in awaits or self.departure is Departure.OUTGREW

    @property
    def is_before_plan(self) -> bool:
        """Whether it runs until there is a plan, or until that can be followed."""
        return self.awaits_plan or self.is_meanwhile

    @property
    def expected(self) -> ChainPlan | Known | None:
        """The plan or chain that the step is expected to be, while it still matches; None: none is."""
        return (self.plan or self.known) if self.is_regular else None

    def graphs_and_sizes(self) -> tuple[tuple[weakref.ref[TrackedGraph], ...], tuple[Sizes, ...]]:
        """Of its calls."""
        return tuple(c.tracked for c in self.calls), tuple(c.sizes for c in self.calls)

    def depart(self, why: Departure = Departure.UNUSUAL) -> None:
        """It is no chain of calls, or not the expected one: it runs on without a plan. The first reason counts."""
        self.state = after(self.state, StepEvent.DEPARTS)
        self.departure = self.departure or why
        self.plan = None
        self.edges.clear()
        self.live_bytes.drop()
        if self.peak is None:  # Else it was complete: a second backward through its graph takes no more.
            self.drop_peak()
        self.end_recording()

    def complete(self) -> None:
        """Its last backward has returned."""
        self.state = after(self.state, StepEvent.COMPLETES)
        self.plan = None  # it is not kept alive any longer

    def drop_peak(self) -> None:
        """Stop watching its peak."""
        watch, self.peak_watch, self.peak = self.peak_watch, None, None
        if watch is not None:
            watch.drop()

    def keep(self) -> None:
        """A call keeps values that it would offload: the peak of such a step says nothing of the plan."""
        self.keeps = True
        self.drop_peak()
        self.end_recording()

    def end_recording(self) -> None:
        """End the recording. It counts if the step followed the plan to its end."""
        recording, self.recording = self.recording, None
        if recording is not None and self.state is StepState.COMPLETE:
            recording.end()
        elif recording is not None:
            recording.drop()


def _given(calls: list[CallOfStep], args: Sequence[object]) -> list[CallOfStep]:
    """Those whose saved values are among the arguments of a backward: calls that moved nothing have no tokens to tell
    them by. All, where that tells nothing: a call may save inputs alone, or values that no backward reads."""
    keys = {storage_key(a) for a in args if isinstance(a, Tensor) and a.layout is torch.strided}
    found = [call for call in calls if call.kept is not None and not call.kept.is_expired() and call.kept.key in keys]
    return found or calls
