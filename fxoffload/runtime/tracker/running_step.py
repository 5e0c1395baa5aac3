"""The state of the step that runs: its calls of compiled graphs so far, its plan and its measurements."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from fxoffload.runtime.profiler.chain_clock import StepRecording
from fxoffload.runtime.profiler.step_peak import PeakWatch, StepPeak
from fxoffload.runtime.tracker.budget_loop import BudgetLoop
from fxoffload.runtime.tracker.chains import ChainPlan, Known, Record, Sizes
from fxoffload.runtime.tracker.step_memory import EdgeWatch, LiveBytes
from fxoffload.runtime.transfer import Group
from fxoffload.step.readings import Phase
from fxoffload.torch_private.storages import StorageRef

if TYPE_CHECKING:
    from fxoffload.runtime.tracker.step_tracker import TrackedGraph


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
    inputs: list[tuple[str, weakref.ref[Tensor], int]] = field(default_factory=list)  # Recorded: name, value, version.

    def waits(self) -> bool:
        """Whether its backward may still come, as its saved values tell."""
        group = self.group() if self.group is not None else None
        if self.kept is not None:
            return not self.kept.is_expired()
        return group is not None and len(group) > 0

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
    """The step that runs. ``sizes``: of the chain whose plan it follows, or that it is recorded or measured for."""

    sizes: Sizes = ()
    calls: list[CallOfStep] = field(default_factory=list)
    pending: list[CallOfStep] = field(default_factory=list)
    running: CallOfStep | None = None  # whose backward runs
    phase: Phase = "forward"
    plan: ChainPlan | None = None
    followed: weakref.ref[ChainPlan] | None = None  # the plan that it began with
    recording: StepRecording | None = None  # of a step that follows a plan and is measured
    was_planned: bool = False
    awaits_plan: bool = False
    records: bool = False
    began_recording: bool = False
    counts: bool = False  # memory outside the graphs is read in it
    measures: Known | None = None  # the chain that is expected, whose device memory at these sizes is not known yet
    regular: bool = True
    missed: bool = False
    has_own_plan: bool = False  # a call is of a graph with a plan of its own
    has_several: bool = False  # it was recorded, and several forwards waited when the first backward began
    is_outgrown: bool = False  # a call was larger than its plan
    is_complete: bool = False
    keeps: bool = False  # a call computes as the plan says, and moves nothing
    record: Record | None = None  # of a step that is complete
    live_bytes: LiveBytes = field(default_factory=LiveBytes)
    edges: EdgeWatch = field(default_factory=EdgeWatch)
    peak_watch: PeakWatch | None = None  # of a step that has to meet a budget
    peak: StepPeak | None = None  # of one that is complete
    judged_by: BudgetLoop | None = None  # that of its plan when it ended

    @property
    def expected(self) -> ChainPlan | Known | None:
        """The plan or chain that the step is expected to be, while it still matches; None: none is."""
        return (self.plan or self.measures) if self.regular else None

    def graphs_and_sizes(self) -> tuple[tuple[weakref.ref[TrackedGraph], ...], tuple[Sizes, ...]]:
        """Of its calls."""
        return tuple(c.tracked for c in self.calls), tuple(c.sizes for c in self.calls)

    def spoil(self, *, missed: bool = False) -> None:
        """The step is no chain that could be planned. ``missed``: not the one that is."""
        self.regular = False
        self.missed = self.missed or missed
        self.plan = None
        self.records = False
        self.edges.clear()
        self.live_bytes.drop()
        self.drop_peak()
        self.end_recording()

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
        if recording is not None and self.regular and self.is_complete:
            recording.end()
        elif recording is not None:
            recording.drop()
