"""The calls of compiled graphs that make up a step: recorded until they repeat, then planned and followed together.

A model whose layers are compiled each on its own runs as a chain of calls: the forwards in order, the backwards in
reverse. A pipeline of microbatches runs another order (``fxoffload.step.call_order``). ``StepTracker`` (one per copy
engine) watches the chain go by. A planner is given two steps that ran through the same graphs, with the memory that
passed between their calls. From the next step on, each call follows the plan of its place in the chain. Where sizes
vary from step to step, each size has a plan of its own, made from the memory that was on the device in its first step
(``fxoffload.runtime.tracker.chains``).

A step is in one of a few states (``fxoffload.runtime.tracker.step_state`` has their table). Nothing here can make a
result wrong: a call's choice is settled when it begins, and its tokens record it. From the place where a step departs
from the planned chain, it runs as it would without a plan. It departs with other graphs, another order, a forward
inside a backward, saved-tensor hooks, or an exception.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fxoffload.errors import in_brief
from fxoffload.processes import in_process_group
from fxoffload.runtime import background
from fxoffload.runtime.host_memory.trim import HostTrim
from fxoffload.runtime.profiler.allocator_history import AllocatorHistory
from fxoffload.runtime.profiler.allocator_trace import Memory
from fxoffload.runtime.profiler.first_arguments import OnOtherStreams
from fxoffload.runtime.profiler.gap_times import BetweenSteps, GapTimes
from fxoffload.runtime.profiler.stream_events import EventSource
from fxoffload.runtime.step_first import STEP_FIRST
from fxoffload.runtime.tracker.chains import (
    ChainPlan,
    Chains,
    PlanObserver,
    Record,
    SizedChain,
    Sizes,
)
from fxoffload.runtime.tracker.hold_to_budget import HoldToBudget
from fxoffload.runtime.tracker.own_plan import OwnPlan, PlainCalls, plan_together
from fxoffload.runtime.tracker.plan_maker import PlanMaker
from fxoffload.runtime.tracker.running_step import RunningStep
from fxoffload.runtime.tracker.step_memory import LiveBytes
from fxoffload.runtime.tracker.step_state import Departure, StepState
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.runtime.transfer import Group
from fxoffload.step.call_order import CallOrder
from fxoffload.step.choice import Choice
from fxoffload.step.edges import CallAt, Moment
from fxoffload.step.readings import Phase
from fxoffload.torch_private.autograd import compiled_autograd_active, in_backward, saved_tensor_hooks_active
from fxoffload.torch_private.storages import StorageRef
from fxoffload.torch_private.tensor_versions import version_of

log = logging.getLogger(__name__)

# After this many forwards, check whether any waits for a backward: if not, forget them all.
_MOST_FORWARDS = 64


class StepTracker:
    """The calls of the step that runs on one device. Thread-safe: autograd runs backwards on another thread.

    Args:
        in_flight: storage -> how many sources the copy engine holds of it.
        in_background: whether plans are made on a thread of their own.
        memory: reads the allocator; None where there is nothing to read.
        history: begins a record of the allocator's events; None, or a result of None, where there is none.
        others: begins to watch the memory of other streams, from the arguments of a step's first call on; None: they
            are not watched.
        trim: of the host's memory; None: it stays as it is.
        events: of the compute stream; None: the time of eager code between the calls is not known.

    Attributes:
        num_begun: how many forwards have begun.
        plans: makes them.
    """

    def __init__(
        self,
        in_flight: Callable[[], Mapping[int, int]],
        *,
        in_background: bool,
        memory: Callable[[], Memory] | None = None,
        history: Callable[[], AllocatorHistory | None] | None = None,
        others: Callable[[Sequence[Any]], OnOtherStreams] | None = None,
        trim: HostTrim | None = None,
        events: EventSource | None = None,
    ) -> None:
        self._events = events
        self._hold = None if memory is None else HoldToBudget(memory, history)
        self._in_flight = in_flight
        self.plans = PlanMaker(self._begins_at, in_background=in_background)
        self._memory = memory
        self._history = history
        self._others = others
        self._trim = trim
        self._plain = PlainCalls()
        self._tracked_graphs: weakref.WeakSet[TrackedGraph] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._step: RunningStep | None = None
        self._observer: weakref.ref[PlanObserver] | None = None  # of the last step, if that was recorded
        self._between: BetweenSteps | None = None  # of the last step, if that was before its plan
        self.num_begun = 0

    @property
    def state(self) -> StepState:
        """Of the step that runs."""
        step = self._step
        return StepState.IDLE if step is None else step.state

    def track(self) -> TrackedGraph:
        """Track the calls of one more compiled graph."""
        tracked = TrackedGraph(self)
        with self._lock:
            self._tracked_graphs.add(tracked)
        return tracked

    def follow_instead(
        self, tracked: TrackedGraph, observer: PlanObserver, choices: tuple[Choice, ...], spare_bytes: int = 0
    ) -> None:
        """If the next step at ``tracked`` still follows the plan of ``observer``, it makes these choices, which leave
        ``spare_bytes`` of the budget."""
        with self._lock:
            tracked.chains.follow_instead(observer, choices, spare_bytes)

    def end_step(self) -> bool:
        """End the step that ran, if all its backwards have, and wait for the plan that it may lead to.

        Returns whether steps like it go on as they are: they follow a plan, or will have none.
        """
        with self._lock:
            step = self._step
            if step is None or not step.has_ended:
                return step is None
            self._finish()
            planning = self.plans.thread
        if planning is not None:
            background.join_planning(planning)
        return step.began is StepState.FOLLOWING or not (step.awaits_plan or self._has_joined(step))

    @staticmethod
    def _has_joined(step: RunningStep) -> bool:
        """Whether steps like it are to be planned, as was found while it ran."""
        first = step.calls[0].tracked() if step.calls else None
        chain = None if first is None else first.chains.get(step.sizes)
        if first is None or first.planner is None or first.is_held_alone or chain is None or chain.plan is not None:
            return False
        return first.chains.awaits_plan(chain)

    def forget(self) -> None:
        """All compiled code is dropped. The step that runs goes on unwatched. Takes no lock; see [Note: Reset]."""
        step, self._step, self.plans.thread = self._step, None, None
        self._plain, self._tracked_graphs = PlainCalls(), weakref.WeakSet()
        if step is not None:
            step.depart()
        if self._trim is not None:
            self._trim.forget()

    def give_up(self, error: Exception) -> None:
        """Watching failed: the step goes on without."""
        log.warning("a step is not watched any further: %s", in_brief(error))
        with self._lock:
            if self._step is not None:
                self._step.depart()

    # -- forward -------------------------------------------------------------------------------------------------------

    def await_plan(self, tracked: TrackedGraph, args: Sequence[Any]) -> None:
        try:
            awaited = None
            if not _is_unusual():
                with self._lock:  # the step before may be the one that leads to a plan
                    if self._step is not None and self._step.has_ended and self._is_over(self._step, tracked):
                        self._mark_begin(tracked.chains)  # before any wait
                        self._finish()
                awaited = self.plans.awaited(tracked, args)
        except Exception as error:
            self.give_up(error)
            return
        if awaited is not None:
            with STEP_FIRST.waiting_for_plan(lambda: awaited.is_open):
                awaited.wait()

    def forward_begins(self, tracked: TrackedGraph, args: Sequence[Any]) -> None:
        STEP_FIRST.launches()
        tracked.followed = tracked.measure = None
        self.num_begun += 1
        unusual = _is_unusual()
        if not unusual:
            self.plans.prepare(tracked, args)
        with self._lock:
            step = self._step
            if unusual:
                if step is not None:
                    step.depart()
                    for call in step.pending:
                        if call.tracked() is tracked:  # Without tokens, its backward cannot be told from this one's.
                            call.recording = None
                return
            if self._hold is not None:
                self._hold.drop_plain()
            if step is None or self._is_over(step, tracked):
                overlaps = step is not None and not step.keeps and any(c.waits() for c in step.pending)
                self._finish()
                step = self._step = self._begin(tracked, args)
                if overlaps:
                    step.depart(Departure.MISSED)  # the memory of another forward is still there
            step.has_own_plan = step.has_own_plan or tracked.own_plan is not None
            plain = self._plain.waiting()
            if step.has_own_plan or plain:
                self._plan_together([*self._waiting(step), tracked], plain)
            keeps, sizes = tracked.may_keep(), tracked.sizes_of(args)
            if step.is_regular and (why := self._departure(step, tracked, sizes, keeps=keeps)) is not None:
                step.depart(why)
            place = step.forward_begins(tracked, sizes)
            if self._hold is not None and place:
                self._hold.forward_begins(step)
            if step.plan is not None:
                tracked.followed = step.plan.choices[place]
                if keeps:
                    tracked.followed = tracked.followed.kept()
                    step.keep()
            elif step.awaits_plan and not keeps and (tracked.has_budget or step.reads_memory):
                tracked.followed = tracked.at_first
            if step.recording is not None:
                tracked.measure = partial(step.recording.begin, "forward", place)
                step.recording.given(place, args)
            self._read(step, ("forward", place), args)
            if step.state is StepState.OBSERVING and tracked.edges is not None:
                self._look(step)
                step.edges.now = Moment("forward", place)
                self._watch(step, "forward", place, tracked.edges.inputs, args, is_input=True)
                step.calls[-1].inputs = [
                    (name, weakref.ref(value), version)
                    for name, value in zip(tracked.edges.inputs, args, strict=False)
                    if name is not None and isinstance(value, Tensor) and (version := version_of(value)) is not None
                ]

    @staticmethod
    def _departure(step: RunningStep, tracked: TrackedGraph, sizes: Sizes, *, keeps: bool) -> Departure | None:
        """Why the step is no chain, or not the expected one, now that ``tracked`` is called; None: it still is."""
        place = len(step.calls)
        if place and step.calls[-1].group is None:
            return Departure.UNUSUAL  # it raised, or another thread runs it
        if step.expected is not None and not step.expected.has(place, tracked):
            return Departure.MISSED
        if step.next_expected not in (None, ("forward", place)):
            return Departure.MISSED
        if step.plan is not None:
            if not step.plan.serves(place, sizes):
                return Departure.OUTGREW
            return None if keeps or tracked.may_follow() else Departure.UNUSUAL
        if step.state in (StepState.OBSERVING, StepState.MEASURING):
            is_planned = tracked.description is not None and tracked.may_follow()
            return None if is_planned else Departure.UNUSUAL
        return None

    def plain_forward_begins(self, graph: OwnPlan) -> None:
        """The forward of a graph that has a budget and is yet plain Inductor's begins."""
        with self._lock:
            step = self._step
            tracked_graphs = self._waiting(step) if step is not None and step.phase == "forward" else []
            try:
                self._plan_together(tracked_graphs, [*self._plain.waiting(), graph])
                if self._hold is not None and (step is None or not step.pending):
                    self._hold.plain_begins(graph)
            except Exception as error:
                self.give_up(error)

    def plain_forward_ends(self, graph: OwnPlan, saved: Tensor) -> None:
        """It has saved ``saved``, among other values."""
        with self._lock:
            self._plain.ran(graph, saved)

    def plain_backward_ends(self, graph: OwnPlan) -> None:
        """It has returned."""
        with self._lock:
            if self._hold is not None:
                self._hold.plain_ended(graph)

    def _plan_together(self, tracked_graphs: Sequence[TrackedGraph], plain: Sequence[OwnPlan]) -> None:
        """A forward of the last of these graphs begins. Where one joins the others, and this step has been observed so
        far, it is the first that counts; else the next one is. In a process group it always is the next one: DDP makes
        its buckets anew in the second step, whose memory the plan counts on."""
        if not plan_together(tracked_graphs, plain):
            return
        for tracked in tracked_graphs:
            tracked.chains.observe_anew()
        if self._step is not None and self._step.state is StepState.OBSERVING and in_process_group():
            self._step.depart()

    @staticmethod
    def _waiting(step: RunningStep) -> list[TrackedGraph]:
        """The graphs whose forwards wait for their backwards."""
        return [tracked for call in step.pending if call.waits() and (tracked := call.tracked()) is not None]

    def _begins_at(self, tracked: TrackedGraph) -> bool:
        """Whether a step that may follow a plan begins here."""
        with self._lock:
            begins = self._step is None or self._is_over(self._step, tracked)
        return begins and tracked.may_follow()

    def _is_over(self, step: RunningStep, tracked: TrackedGraph) -> bool:
        if step.phase == "backward":
            return not step.goes_on_with(tracked)
        goes_on = step.plan is not None and step.plan.has(len(step.calls), tracked)
        if goes_on and (not step.calls or any(c.may_wait() for c in step.pending)):
            return False
        # A forward through the same graphs, when nothing waits for its backward any longer. Or one that follows a step
        # under override_policy("keep_all"), which the caller may hold to compare it with the plan's steps.
        repeats = bool(step.calls) and (step.calls[0].tracked() is tracked or len(step.calls) % _MOST_FORWARDS == 0)
        return repeats and (step.keeps or not any(c.waits() for c in step.pending))

    def _begin(self, tracked: TrackedGraph, args: Sequence[Any]) -> RunningStep:
        chains = tracked.chains
        chain = chains.at(tracked.planned_sizes(args))
        step = RunningStep(chain.sizes)
        observer = None if chain.ready is None or chain.ready.first else chain.ready.observer
        if observer is not None and not tracked.may_keep():
            step.recording = observer.step_begins(follows=self._observer is not None and self._observer() is observer)
        self._observer = None if observer is None or step.recording is None else weakref.ref(observer)
        is_unknown = self._memory is not None and tracked.has_budget and chains.may_measure(chain)
        if is_unknown and tracked.may_follow():
            step.known = chains.begin_measuring(chain)
        elif not is_unknown:
            self.plans.plan_if_due(tracked, chain)
        # The observer may have replaced it. One that was made this moment may have to be made ready: the next step does
        # that, and follows it.
        if step.known is None:
            step.plan = chain.ready
            if step.plan is None and (larger := chains.larger(tracked.sizes_of(args))) is not None:
                step.sizes, step.plan = larger.sizes, larger.ready
            if step.plan is not None and step.plan.first:
                step.plan = step.plan.begin_first()
        step.followed = None if step.plan is None else weakref.ref(step.plan)
        step.is_meanwhile = step.plan is not None and step.plan is chain.meanwhile
        planned = step.plan or step.known
        step.order_expected = None if planned is None else planned.order
        step.begin(self._beginning(step, tracked, chain))
        # Of the steps that are observed the second one counts: nothing is compiled in it.
        is_second = step.state is StepState.OBSERVING and chains.before is not None
        counts = step.reads_memory = step.state is StepState.MEASURING or is_second
        begin = self._history if counts and tracked.may_record else None
        times = GapTimes(self._events) if counts and self._events is not None else None
        self._mark_begin(chains, counts=step.is_before_plan)  # else variants may have been compiled meanwhile
        step.live_bytes = LiveBytes(self._others, None if begin is None else begin(), times)
        if self._hold is not None:
            self._hold.begin(tracked, chain, step, args)
        return step

    @staticmethod
    def _beginning(step: RunningStep, tracked: TrackedGraph, chain: SizedChain) -> StepState:
        """The state in which a step begins at ``tracked``, whose sizes are those of ``chain``."""
        chains = tracked.chains
        if step.plan is not None:
            return StepState.FOLLOWING
        if step.known is not None:
            return StepState.MEASURING
        is_unplanned = tracked.planner is None or tracked.is_held_alone
        if is_unplanned or (chain.plan is None and not chains.awaits_plan(chain)):
            return StepState.UNPLANNED
        return StepState.OBSERVING if chain.plan is None and chains.may_record else StepState.WAITING

    def forward_ends(self, tracked: TrackedGraph, group: Group, results: Sequence[Any], token: Tensor | None) -> None:
        STEP_FIRST.launches()
        with self._lock:
            step = self._step
            call = step.calls[-1] if step is not None and step.calls else None
            if step is None or call is None or call.tracked() is not tracked or call.group is not None:
                if step is not None:
                    step.depart()
                return
            call.group, call.recording = weakref.ref(group), group.recording
            step.pending.append(call)
            if step.plan is not None:
                if step.recording is not None and (token is None) == bool(step.plan.choices[call.place].variant):
                    step.recording.drop()  # another variant ran than was planned
                group.takes_below = True
                if token is not None:
                    call.kept, call.is_bundled = StorageRef(token), True
                elif not len(group):
                    call.empty = group
            is_observed = step.state is StepState.OBSERVING
            if token is None and not len(group) and (step.expected is not None or is_observed or step.has_own_plan):
                saved = tracked.edges.saved if tracked.edges is not None else ()
                call.kept = StorageRef(results[saved[0]]) if saved else None
            call.has_saved = call.kept is not None or bool(len(group))
            if is_observed and tracked.edges is not None:
                self._look(step)
                self._watch(step, "forward", call.place, tracked.edges.outputs, results)
            self._read_end(step)
            if self._hold is not None and step.phase == "forward":
                self._hold.forward_ended(step)

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward_begins(self, tracked: TrackedGraph, group: Group, args: Sequence[Any]) -> Group:
        STEP_FIRST.launches()
        tracked.measure = group.following = None
        with self._lock:
            step = self._step
            if step is None:
                return group
            call, why = step.call_of(tracked, group, args)
            if why is not None:
                step.depart(why)
            if call is None:
                return group
            step.order.append(("backward", call.place))
            was_observed = step.began is StepState.OBSERVING
            if step.phase == "forward" and was_observed and (first := step.calls[0].tracked()) is not None:
                first.chains.num_records += 1
                step.has_several = len(self._waiting(step)) > 1
            if self._hold is not None and step.phase == "forward":
                self._hold.first_backward_begins(step)
            step.phase = "backward"
            step.pending.remove(call)
            step.running = call
            recording, call.recording = call.recording, None
            group.recording = group.recording or recording
            if step.recording is not None:
                tracked.measure = partial(step.recording.begin, "backward", call.place)
            tracked.written.update(
                name for name, ref, version in call.inputs if (v := ref()) is not None and version_of(v) != version
            )
            self._read(step, ("backward", call.place), args)
            if step.state is StepState.OBSERVING and tracked.edges is not None:
                self._look(step)
                step.edges.now = Moment("backward", call.place)
                self._watch(step, "backward", call.place, tracked.edges.tangents, args)
            empty, call.empty = call.empty, None
            group = empty if empty is not None and not len(group) else group
            if step.plan is not None and step.plan.order is not None:
                group.following = step.groups_of(step.plan.order.following(call.place))
            return group

    def backward_ends(self, tracked: TrackedGraph, results: Sequence[Any]) -> None:
        with self._lock:
            step = self._step
            call = step.running if step is not None else None
            if step is None or call is None or call.tracked() is not tracked:
                return
            step.running = None
            is_observed = step.state is StepState.OBSERVING
            if is_observed and tracked.edges is not None:
                self._look(step)
                self._watch(step, "backward", call.place, tracked.edges.gradients, results)
            self._read_end(step)
            if step.has_ended:
                STEP_FIRST.launched()
                step.complete()
                if step.is_regular:
                    self._mark_end(step)
                    step.live_bytes.end()
                    if self._hold is not None:
                        self._hold.end(step)
                    if is_observed:
                        step.record = self._record(step)

    def _mark_begin(self, chains: Chains, *, counts: bool = True) -> None:
        """A step begins with one of ``chains``: for the time since the step before, if that ``counts``."""
        between, self._between = self._between, None
        if between is not None:
            between.step_begins(follows=between is chains.between and counts)

    def _mark_end(self, step: RunningStep) -> None:
        """For the time until the next step, before the plan is followed."""
        first = step.calls[0].tracked()
        if first is None or self._events is None or not step.is_before_plan:
            return
        if first.chains.between is None:
            first.chains.between = BetweenSteps(self._events)
        self._between = first.chains.between
        self._between.step_ended()

    # -- recording -----------------------------------------------------------------------------------------------------

    def _look(self, step: RunningStep) -> None:
        """Note which of the watched memory is still held outside the engine."""
        step.edges.look(self._in_flight())

    def _read(self, step: RunningStep, at: CallAt, args: Sequence[Any]) -> None:
        """Read the device's memory, and the time, when a call begins, if the step needs them."""
        if (memory := self._memory_of(step)) is not None:
            step.live_bytes.read(at, args, memory)
        if (times := step.live_bytes.gap_times) is not None:
            times.call_begins(at)

    def _read_end(self, step: RunningStep) -> None:
        """The same when it ends."""
        if (times := step.live_bytes.gap_times) is not None:
            times.call_ended()
        if (memory := self._memory_of(step)) is not None:
            step.live_bytes.call_ended(memory)

    def _memory_of(self, step: RunningStep) -> Memory | None:
        is_read = step.state in (StepState.OBSERVING, StepState.MEASURING)
        return self._memory() if self._memory is not None and is_read else None

    @staticmethod
    def _watch(
        step: RunningStep,
        phase: Phase,
        place: int,
        names: Sequence[str | None],
        values: Sequence[Any],
        *,
        is_input: bool = False,
    ) -> None:
        if not step.edges.watch(phase, place, names, values, is_input=is_input):
            step.depart()

    @staticmethod
    def _record(step: RunningStep) -> Record | None:
        """The recording of a step whose last backward has run; None: some forward had raised."""
        if len(step.order) != 2 * len(step.calls):
            return None
        edge_memory = step.edges.edge_memory()
        step.edges.clear()
        tracked_graphs, sizes = step.graphs_and_sizes()
        return Record(tracked_graphs, edge_memory, step.live_bytes, sizes, CallOrder.of(step.order))

    def _finish(self) -> None:
        """The step is over: judge whether it went as planned, and plan or correct."""
        step, self._step = self._step, None
        if step is not None:
            step.end_recording()
            step.live_bytes.drop()
            if step.peak is None:
                step.drop_peak()
        if step is None or not step.calls or step.phase == "forward":
            return
        first = step.calls[0].tracked()
        if first is None:
            return
        self._watch_host_memory(step)
        chain, known = first.chains.get(step.sizes), first.chains.known
        if step.began not in (StepState.FOLLOWING, StepState.MEASURING):
            self.plans.observed(first, step)
            is_planned = step.has_several or first.own_plan is not None
            if step.began is StepState.OBSERVING and is_planned and first.control is None and first.chains.gives_up:
                first.gives_up()
            if self._hold is not None and chain is not None and (step.is_regular or step.peak is not None):
                self._hold.judge(first, chain, step)
                if step.record is not None:
                    self.plans.plan_if_due(first, chain)
        elif chain is None or (step.keeps and not step.is_regular):
            return  # forgotten meanwhile; or under override_policy("keep_all"), which says nothing of later steps
        elif step.state is StepState.COMPLETE:
            chain.num_misses = 0
            self.plans.measured(first, chain, step)
            if self._hold is not None:
                self._hold.judge(first, chain, step)
        elif step.departure is Departure.OUTGREW and known is not None and known.learns(*step.graphs_and_sizes()):
            first.chains.outgrown(chain)
        elif step.departure in (Departure.MISSED, Departure.OUTGREW) and first.chains.missed(chain):
            log.info("steps are not what was planned any more: they are recorded again")
            if chain.is_tired and not chain.sizes:
                first.gives_up()

    def _watch_host_memory(self, step: RunningStep) -> None:
        """A step with a backward is over. Tell the trim whether it followed its plan: unneeded memory may go then."""
        trim = self._trim
        if trim is None:
            return
        plan = None if step.followed is None else step.followed()
        if plan is not None and step.state is StepState.COMPLETE and plan.is_settled and not step.keeps:
            trim.followed(
                plan, lambda: all(tracked.may_trim for tracked in self._tracked_graphs), self._bytes_of_others
            )
        elif step.began is StepState.FOLLOWING or step.awaits_plan:
            trim.interrupted()

    def _bytes_of_others(self) -> int:
        """Host bytes pinned for graphs that are in no plan that the trim knows."""
        assert self._trim is not None
        plans = (p for p in self._trim.plans if isinstance(p, ChainPlan))
        known = {id(tracked) for plan in plans for ref in plan.tracked_graphs if (tracked := ref()) is not None}
        return sum(tracked.reserved_bytes for tracked in self._tracked_graphs if id(tracked) not in known)


def _is_unusual() -> bool:
    """Whether a forward that begins now is no call of an ordinary step."""
    return in_backward() or saved_tensor_hooks_active() or compiled_autograd_active()
