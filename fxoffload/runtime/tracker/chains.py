"""The chains of calls that begin at one compiled graph, and their plans: one for each size of the first call.

Sizes may vary from call to call, but which memory passes between the calls of a step does not. So a chain that was
recorded twice, whatever its sizes were, is planned for other sizes without being recorded anew. The other memory on
the device does depend on sizes. Where that counts (a budget) and can be read, the first step of each size is measured.
Sizes are rounded up to a coarse grid; a plan serves all calls that are no larger than those that it was made for.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fxoffload.errors import in_brief
from fxoffload.runtime.profiler.gap_times import BetweenSteps, GapTimes
from fxoffload.runtime.profiler.step_clock import StepRecording
from fxoffload.runtime.tracker.budget_loop import MOST_CORRECTIONS, BudgetLoop
from fxoffload.runtime.tracker.step_memory import LiveBytes
from fxoffload.runtime.transactions import Latch
from fxoffload.step.call_order import CallOrder
from fxoffload.step.choice import Choice
from fxoffload.step.edges import CallAt, EdgeMemory, later

# Sizes of one call that vary from call to call; empty where none does.
Sizes = tuple[int, ...]

# Record anew after this many consecutive steps that are not the planned chain.
_MOST_MISSES = 2
# A chain that keeps changing is not worth planning, or recording, forever.
_MOST_PLANS = 3
_MOST_RECORDS = 16
# Most sizes that have a plan at a time (a tenth of a MiB each), and most plans that are made in all.
_MOST_SIZES = 64
_MOST_PLANS_IN_ALL = 64
# Most steps of one size that are measured before one was the expected chain, and most measured steps in all.
_MOST_MEASURED = 3
_MOST_MEASURED_IN_ALL = 2 * _MOST_PLANS_IN_ALL
# Plan anew after this many consecutive steps that allocate far less.
FALLEN_STEPS = 8


class CallSizes(Protocol):
    """Of a graph whose sizes vary."""

    def told_by(self, args: Sequence[Any]) -> Sizes:
        """The sizes of the call with these arguments."""
        ...

    def rounded_up(self, sizes: Sizes) -> Sizes:
        """The next larger sizes that are planned for."""
        ...


class PlanObserver(Protocol):
    """Measures the first steps that follow a plan, and may replace it (``StepTracker.follow_instead``)."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to be measured or planned anew."""
        ...

    def step_begins(self, *, follows: bool = True) -> StepRecording | None:
        """A step that follows the plan begins: its recording, or None if it is not measured."""
        ...


@dataclass(eq=False)
class ChainPlan:
    """A plan for a chain.

    Attributes:
        tracked_graphs: the graphs, in the order of the forwards.
        choices: of the call at each place.
        kept_alive: an object that lives as long as the plan.
        prepare: compiles variants of graphs, so that the first step can follow; called once, on the thread that runs
            the forwards, when a step begins. None: nothing is missing.
        otherwise: makes the plan that takes the place of this one should ``prepare`` fail.
        observer: measures steps that follow it; None: nothing does.
        sizes: per call, the largest that it serves; empty where no sizes vary.
        budget_bytes: that its steps are to meet; None: there is none.
        is_least: no plan was found that meets it, and a warning said so: it is not made anew because of that.
        spare_bytes: that its prediction leaves of the budget.
        least: choices of the least peak, followed while a plan that was exceeded is made anew; empty: there are none.
        costs_time: whether it moves or recomputes anything.
        first: choices of its first step, which needs memory to tune new variants' kernels; empty: as in all steps.
            That step is neither measured nor judged.
        order: of its calls; None: the forwards, then the backwards in reverse.
    """

    tracked_graphs: tuple[weakref.ref[Any], ...]
    choices: tuple[Choice, ...]
    kept_alive: object = None
    prepare: Callable[[], None] | None = None
    otherwise: Callable[[], ChainPlan] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # held by the thread that makes it ready
    observer: PlanObserver | None = None
    sizes: tuple[Sizes, ...] = ()
    budget_bytes: int | None = None
    is_least: bool = False
    spare_bytes: int = 0
    least: tuple[Choice, ...] = ()
    costs_time: bool = False
    first: tuple[Choice, ...] = ()
    order: CallOrder | None = None

    def begin_first(self) -> ChainPlan:
        """The plan for its first step."""
        found = replace(self, choices=self.first, first=(), observer=None, budget_bytes=None)
        self.first = ()
        return found

    @property
    def is_settled(self) -> bool:
        """Whether steps go on making these choices, as far as its observer goes."""
        return self.observer is None or self.observer.is_settled

    def has(self, place: int, tracked: object) -> bool:
        """Whether the call at ``place`` is a call of ``tracked``."""
        return place < len(self.tracked_graphs) and self.tracked_graphs[place]() is tracked

    def serves(self, place: int, sizes: Sizes) -> bool:
        """Whether the call at ``place`` may be of these sizes."""
        return _fits(sizes, self.sizes[place] if self.sizes else ())


def why_not_ready(plan: ChainPlan, error: Exception) -> str:
    """A warning: variants of a plan could not be compiled."""
    how = "without a plan" if plan.otherwise is None else "with another plan"
    return (
        f"fxoffload could not make ready what it planned for a step of {len(plan.tracked_graphs)} compiled graphs and "
        f"goes on {how}: {in_brief(error)}"
    )


@dataclass(frozen=True)
class Seen:
    """Measurements of a chain.

    Attributes:
        edge_memory: memory at the edges of its calls.
        live_bytes: bytes on the device when each call began, above those when the step did; empty where that is not
            known.
        sizes: per call, those of the step in which ``live_bytes`` were read.
        others_bytes: the part of all of them that was there when the step began (``LiveBytes.others_bytes``).
        carried_bytes: the part of these that outputs of the step before are.
        left_bytes: memory of the first call's arguments that belongs to the step (``LiveBytes.left_bytes``).
        gap_bytes: most bytes between the call before and each call, above those when it begins; where that is known.
        gap_times: of the time between its calls; None: it was not measured.
        other: the same of steps of another size, where there were any.
        most_volume: that of the largest steps of this chain, as far as they are known.
        margin_bytes: the part by which steps exceeded earlier plans that these measurements do not explain.
        between: times between steps; None: not known.
        order: of the calls; None: the forwards, then the backwards in reverse.
    """

    edge_memory: tuple[EdgeMemory, ...]
    live_bytes: Mapping[CallAt, int] = field(default_factory=dict)
    sizes: tuple[Sizes, ...] = ()
    others_bytes: int = 0
    gap_bytes: Mapping[CallAt, int] = field(default_factory=dict)
    gap_times: GapTimes | None = None
    carried_bytes: int = 0
    left_bytes: int = 0
    other: Seen | None = None
    most_volume: int = 0
    margin_bytes: int = 0
    between: BetweenSteps | None = None
    order: CallOrder | None = None

    def gap_ms(self) -> dict[CallAt, float]:
        """Milliseconds between the call before and each call; empty where that is not known. May wait for the device:
        no step may call it."""
        return {} if self.gap_times is None else self.gap_times.ms()

    def grown_bytes(self, before: Seen) -> int:
        """The most by which memory outside the graphs grew at any call since ``before``; at least 0."""
        pairs = ((self.live_bytes, before.live_bytes), (self.gap_bytes, before.gap_bytes))
        return max([0, *(n - old[at] for new, old in pairs for at, n in new.items() if at in old)])

    @property
    def volume(self) -> int:
        """How large its calls were."""
        return volume_of(self.sizes)

    @staticmethod
    def of(
        edge_memory: tuple[EdgeMemory, ...],
        live: LiveBytes,
        sizes: tuple[Sizes, ...],
        order: CallOrder | None = None,
    ) -> Seen:
        """The measurements ``live`` of a step of these sizes, with the memory that calls pass on."""
        return Seen(
            edge_memory,
            live.above_start(),
            sizes,
            live.others_bytes,
            live.gap_bytes(),
            live.gap_times,
            live.carried_bytes,
            live.left_bytes,
            order=order,
        )


class Planner(Protocol):
    """Plans calls of graphs."""

    def __call__(
        self,
        tracked_graphs: Sequence[Any],
        seen: Seen,
        sizes: Sequence[Sizes],
        /,
        meanwhile: Meanwhile | None = None,
    ) -> ChainPlan | None:
        """The plan; None: there is none.

        Args:
            tracked_graphs: of the calls.
            seen: of them.
            sizes: per call, the largest that the plan is to serve; empty where no sizes vary.
            meanwhile: called with a plan to follow until this one is there. Is None where no step runs until then.
        """
        ...


Meanwhile = Callable[["ChainPlan"], None]


@dataclass(frozen=True)
class Record:
    """The recording of one step; see ``Seen``."""

    tracked_graphs: tuple[weakref.ref[Any], ...]
    edge_memory: tuple[EdgeMemory, ...]
    live: LiveBytes
    sizes: tuple[Sizes, ...] = ()
    order: CallOrder | None = None

    def same_chain(self, other: Record) -> bool:
        """Whether both went through the same graphs, in the same order."""
        if len(self.tracked_graphs) != len(other.tracked_graphs) or self.order != other.order:
            return False
        return all(a() is b() is not None for a, b in zip(self.tracked_graphs, other.tracked_graphs, strict=True))

    def merged(self, other: Record) -> Seen | None:
        """Both recordings as one; None where memory passes between other calls in one than in the other.

        Memory is held for as long as in either. Device memory is read from ``other``, since kernels may have been
        compiled in this one; if the sizes of ``other`` are smaller, it is read from this one.
        """
        mine, others = ({h.members: h for h in r.edge_memory} for r in (self, other))
        if mine.keys() != others.keys():
            return None
        positions = None if self.order is None else self.order.positions
        edge_memory = tuple(
            EdgeMemory(
                members, later(item.until, others[members].until, positions), item.watched and others[members].watched
            )
            for members, item in mine.items()
        )
        if volume_of(self.sizes) > volume_of(other.sizes):
            # Kernels may have been tuned in it, and their memory counted between its calls.
            return replace(Seen.of(edge_memory, self.live, self.sizes, self.order), gap_bytes={})
        return Seen.of(edge_memory, other.live, other.sizes, other.order)


@dataclass
class Known:
    """A chain that was recorded.

    Attributes:
        tracked_graphs: the graphs, in the order of the forwards.
        seen: of it.
        steps: sizes of the calls of steps; grows when a step is larger than its plan.
        seen_first: measurements by the sizes of the first call.
        num_measured: how many steps were to be measured, by the sizes of the first call.
    """

    tracked_graphs: tuple[weakref.ref[Any], ...]
    seen: Seen
    steps: list[tuple[Sizes, ...]]
    seen_first: dict[Sizes, Seen] = field(default_factory=dict)
    num_measured: Counter[Sizes] = field(default_factory=Counter)

    @property
    def order(self) -> CallOrder | None:
        """Of its calls; None: the forwards, then the backwards in reverse."""
        return self.seen.order

    def has(self, place: int, tracked: object) -> bool:
        """Whether the call at ``place`` is a call of ``tracked``."""
        return place < len(self.tracked_graphs) and self.tracked_graphs[place]() is tracked

    def seen_at(self, first: Sizes) -> Seen:
        """The measurements for a first call of the sizes ``first``; without any, those of the largest recorded step.

        ``other`` is set to those of the size that is farthest from it, ``most_volume`` to that of the largest step.
        """
        found, everything = self.seen_first.get(first, self.seen), (self.seen, *self.seen_first.values())
        others = [s for s in everything if s.live_bytes and s.volume != found.volume]
        other = max(others, key=lambda s: abs(s.volume - found.volume), default=None)
        volumes = [*(s.volume for s in everything), *map(volume_of, self.steps)]
        return replace(found, other=other, most_volume=max(volumes))

    def may_measure(self, first: Sizes) -> bool:
        """Whether a step whose first call has these sizes is worth measuring."""
        return first not in self.seen_first and self.num_measured[first] < _MOST_MEASURED

    def measured(self, first: Sizes, live: LiveBytes, sizes: tuple[Sizes, ...]) -> None:
        """Note that a step of this chain had calls of these sizes, and this memory on the device. ``first``: the sizes
        for which its first call is planned."""
        self.seen_first[first] = Seen.of(self.seen.edge_memory, live, sizes, self.order)
        planned = self.sizes_at(first)
        if planned and not all(map(_fits, sizes, planned)):
            self.learns(self.tracked_graphs, sizes)

    def sizes_at(self, first: Sizes) -> tuple[Sizes, ...]:
        """Sizes of all calls where those of the first are ``first``.

        A size that always equalled one of the first call's is that one; any other is the largest seen, rounded up.
        """
        if not any(self.steps[-1]):
            return ()
        found = []
        for call, ref in enumerate(self.tracked_graphs):
            most = tuple(max(sizes) for sizes in zip(*(step[call] for step in self.steps), strict=True))
            tracked = ref()
            if tracked is not None and tracked.sizes is not None:
                most = tracked.sizes.rounded_up(most)
            found.append(tuple(self._size(call, i, first, size) for i, size in enumerate(most)))
        return tuple(found)

    def _size(self, call: int, index: int, first: Sizes, most: int) -> int:
        places = sorted(range(len(first)), key=lambda i: i != index)  # the same place, if it can be
        same = (i for i in places if all(step[call][index] == step[0][i] for step in self.steps))
        return next((first[i] for i in same), most)

    def learns(self, tracked_graphs: tuple[weakref.ref[Any], ...], sizes: tuple[Sizes, ...]) -> bool:
        """Add the sizes of a step that was larger than its plan. Returns whether they were new, and the step went
        through the same graphs."""
        is_new = tracked_graphs == self.tracked_graphs and sizes not in self.steps
        if is_new:
            self.steps.append(sizes)
        return is_new


@dataclass(frozen=True)
class Correction:
    """Why a plan is made anew: its steps exceeded their budget, or need far less than they did.

    Attributes:
        error_bytes: by how much they exceeded the prediction, as far as it matters for the budget.
        seen: the measurements from which the plan was made.
    """

    error_bytes: int
    seen: Seen


@dataclass(eq=False)
class SizedChain:
    """The chain that begins with a call of some sizes.

    Attributes:
        sizes: of the first call, as they are planned for.
        plan: that steps follow.
        num_plans: how many there were.
        num_misses: how many steps in a row were another chain than the one that was planned.
        correction: why the plan is being made anew; None: it is not.
        meanwhile: followed while a plan is being made; None: nothing is.
        awaited: opens when there is a plan that steps wait for; None: they wait for none.
        margin_bytes: see ``Seen``.
        num_corrections: consecutive corrections so far.
        fallen_steps: the plan is made anew after this many steps that allocate far less.
    """

    sizes: Sizes = ()
    plan: ChainPlan | None = None
    num_plans: int = 0
    num_misses: int = 0
    correction: Correction | None = None
    meanwhile: ChainPlan | None = None
    awaited: Latch | None = None
    margin_bytes: int = 0
    num_corrections: int = 0
    fallen_steps: int = FALLEN_STEPS
    _loop: tuple[weakref.ref[ChainPlan], BudgetLoop] | None = None

    def loop_of(self, plan: ChainPlan) -> BudgetLoop | None:
        """The budget loop that judges the steps of ``plan``; None: they have no budget."""
        if plan.budget_bytes is None:
            return None
        if self._loop is None or self._loop[0]() is not plan:
            found = BudgetLoop(plan.budget_bytes, is_exceeded=plan.is_least)
            self._loop = (weakref.ref(plan), found)
        return self._loop[1]

    @property
    def is_planned(self) -> bool:
        """Whether it has a plan, or steps wait for one."""
        return self.plan is not None or self.awaited is not None

    @property
    def is_tired(self) -> bool:
        """Whether it was planned often enough."""
        return self.num_plans >= _MOST_PLANS

    @property
    def ready(self) -> ChainPlan | None:
        """The plan, if a step can follow it at once; else the one that is followed meanwhile."""
        if self.plan is None:
            return self.meanwhile
        return self.plan if self.plan.prepare is None else self.meanwhile


class Chains:
    """All chains that begin at one graph.

    Attributes:
        before: the last step that was recorded.
        known: the chain that was recorded twice; None: it is not known yet, or steps are another one now.
        is_planning: whether a plan is being made.
        num_records: how many steps with a backward were recorded, or were to be.
        may_prepare: whether a plan is awaited, or may have to be made ready before it can be followed. Asked by every
            call.
        between: times between steps before the plan was followed; None before there were any.
    """

    def __init__(self) -> None:
        self.may_prepare = False
        self.between: BetweenSteps | None = None
        self.before: Record | None = None
        self.known: Known | None = None
        self.is_planning = False
        self.num_records = 0
        self._num_plans = 0
        self._num_measured = 0
        self._found: dict[Sizes, SizedChain] = {}  # the one that was asked for last at the end

    @property
    def all(self) -> list[SizedChain]:
        """Those that are remembered."""
        return list(self._found.values())

    @property
    def may_record(self) -> bool:
        """Whether the step that begins is worth recording."""
        return self.known is None and not self.is_planning and self.num_records < _MOST_RECORDS

    @property
    def gives_up(self) -> bool:
        """Whether steps were recorded for the last time, and none has a plan."""
        is_last = self.num_records == _MOST_RECORDS and self.known is None
        return is_last and not any(chain.plan is not None for chain in self.all)

    def get(self, sizes: Sizes) -> SizedChain | None:
        """The chain of these sizes, if it is remembered."""
        return self._found.get(sizes)

    def at(self, sizes: Sizes) -> SizedChain:
        """The chain of these sizes, new if it is not remembered.

        If there are too many, one is forgotten: one without a plan first, else the one that was asked for least
        recently. The largest goes last, since its plan serves all others.
        """
        chain = self._found.pop(sizes, None) or SizedChain(sizes)
        if sizes and not chain.is_planned and self._num_plans >= _MOST_PLANS_IN_ALL:
            return chain  # it gets no plan: nothing has to make room
        if len(self._found) >= _MOST_SIZES:
            largest = max(self._found, key=math.prod)
            del self._found[min(self._found, key=lambda s: (self._found[s].is_planned, s == largest))]
        self._found[sizes] = chain
        return chain

    def larger(self, sizes: Sizes) -> SizedChain | None:
        """The smallest one with a plan that serves a first call of these sizes."""
        found = [c for c in self.all if c.sizes and _fits(sizes, c.sizes) and c.ready is not None]
        return min(found, key=lambda c: math.prod(c.sizes), default=None)

    def may_plan(self, chain: SizedChain) -> bool:
        """Whether ``chain`` still needs a plan, and the known chain allows one."""
        if self.known is None or self.is_planning or chain.plan is not None or chain.is_tired:
            return False
        return not chain.sizes or self._num_plans < _MOST_PLANS_IN_ALL

    def may_measure(self, chain: SizedChain) -> bool:
        """Whether the step of ``chain`` that begins is to be measured before the chain is planned."""
        if self.known is None or chain.plan is not None or chain.is_tired:
            return False
        if chain.correction is not None:
            return not self.is_planning and self.known.may_measure(chain.sizes)
        if not chain.sizes:
            return False
        if self._num_plans >= _MOST_PLANS_IN_ALL or self._num_measured >= _MOST_MEASURED_IN_ALL:
            return False
        return self.known.may_measure(chain.sizes)

    def begin_measuring(self, chain: SizedChain) -> Known | None:
        """Count a step of ``chain`` as measured. Returns the chain that it is expected to be."""
        known = self.known
        if known is not None:
            known.num_measured[chain.sizes] += 1
            self._num_measured += 1
        return known

    def awaits_plan(self, chain: SizedChain) -> bool:
        """Whether a step of ``chain``, which has no plan, acts as the first steps do until a plan comes.

        With more sizes than plans, those without one go on acting so.
        """
        return not chain.is_tired and (self.known is not None or self.num_records < _MOST_RECORDS)

    def begin_planning(self, chain: SizedChain) -> None:
        """A plan for ``chain`` is being made."""
        self.is_planning = True
        self.corrected(chain)
        chain.num_plans += 1
        self._num_plans += 1

    def await_plan(self, chain: SizedChain) -> None:
        """No step of ``chain`` begins before it has a plan to follow."""
        chain.awaited, self.may_prepare = Latch(), True

    @staticmethod
    def go_on(chain: SizedChain) -> None:
        """Steps wait no longer."""
        awaited, chain.awaited = chain.awaited, None
        if awaited is not None:
            awaited.open()

    def end_planning(self, chain: SizedChain, plan: ChainPlan | None) -> None:
        """It is made; see ``take``."""
        self.take(chain, plan)
        self.is_planning = False
        self.go_on(chain)

    def take(self, chain: SizedChain, plan: ChainPlan | None) -> None:
        """``plan`` is that of ``chain``; None: it could not be made, and the known chain is of no use."""
        chain.plan, chain.correction = plan, None
        if plan is None or plan.prepare is None:
            chain.meanwhile = None
        if plan is not None and plan.prepare is not None:
            self.may_prepare = True
        if plan is None:
            self.forget_known()

    def forget_known(self) -> None:
        """Drop the known chain: steps are recorded anew, and no plan can be corrected from it."""
        self.known = None
        for chain in self.all:
            chain.correction, chain.meanwhile, chain.margin_bytes = None, None, 0

    def observe_anew(self) -> None:
        """Steps are another chain from now on, as far as is known."""
        self.before, self.num_records = None, 0
        self.forget_known()

    def correct(self, chain: SizedChain, plan: ChainPlan, excess_bytes: int) -> bool:
        """Have ``plan``, that of ``chain``, made anew from one more measured step, which runs as the first ones did.

        Returns whether it will be: a plan that does not settle is left as it is.
        """
        known = self.known
        if known is None or self.is_planning or chain.num_corrections >= MOST_CORRECTIONS:
            return False
        chain.num_corrections += 1
        if not excess_bytes:
            chain.margin_bytes = 0
        if plan.least:
            chain.meanwhile = replace(plan, choices=plan.least, observer=None, budget_bytes=None)
        error = excess_bytes + plan.spare_bytes if excess_bytes else 0
        chain.correction = Correction(error, known.seen_at(chain.sizes))
        chain.plan = None
        chain.num_plans -= 1
        known.seen_first.pop(chain.sizes, None)
        known.num_measured.pop(chain.sizes, None)
        return True

    def corrected(self, chain: SizedChain) -> None:
        """The corrected plan is being made: the part of the excess that its step does not explain stays free."""
        correction, known = chain.correction, self.known
        if correction is not None and known is not None:
            known.seen_first.setdefault(chain.sizes, correction.seen)  # no step could be measured
            grown = known.seen_at(chain.sizes).grown_bytes(correction.seen)
            chain.margin_bytes += max(correction.error_bytes - grown, 0)

    def outgrown(self, chain: SizedChain) -> None:
        """The plan of ``chain`` was made for smaller calls than there are, which is known by now."""
        chain.num_plans -= chain.plan is not None
        chain.plan = chain.correction = chain.meanwhile = None
        if self.known is not None:
            self.known.seen_first.pop(chain.sizes, None)  # it was seen in smaller calls

    def missed(self, chain: SizedChain) -> bool:
        """Count a step that was not the planned chain, or not the known one where there is no plan.

        Without a plan of its own, the larger plan that it would have followed was missed. Returns whether that
        happened often enough that steps are recorded anew.
        """
        if chain.plan is None:
            chain = self.larger(chain.sizes) or chain
        chain.num_misses += 1
        if chain.num_misses < _MOST_MISSES:
            return False
        chain.plan = chain.correction = chain.meanwhile = None
        chain.num_misses = 0
        self.before = None
        self.forget_known()
        return True

    def follow_instead(self, observer: PlanObserver, choices: tuple[Choice, ...], spare_bytes: int) -> None:
        """Plans that ``observer`` still measures make these choices, which leave ``spare_bytes`` of the budget."""
        for chain in self.all:
            if chain.plan is not None and chain.plan.observer is observer:
                chain.plan = replace(chain.plan, choices=choices, spare_bytes=spare_bytes, first=())


def _fits(sizes: Sizes, into: Sizes) -> bool:
    return len(sizes) == len(into) and all(a <= b for a, b in zip(sizes, into, strict=True))


def volume_of(sizes: Sequence[Sizes]) -> int:
    """How large calls of these sizes are, to compare steps by: the products of their sizes, added up."""
    return sum(math.prod(s) for s in sizes)
