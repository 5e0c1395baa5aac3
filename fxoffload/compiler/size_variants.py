"""Variants of a graph whose sizes vary: each has its own recompute choice, and serves a range of sizes.

A plan is made for the sizes of the call that is compiled. With its recompute choice it serves other sizes up to where
the budget is not met any more, or recomputing more would be clearly faster. There a guard ends its range: a larger call
makes Dynamo compile the same code again, with another plan, and from then on each call takes the variant of its size.

Where the caller bounds the sizes (``mark_dynamic`` with ``max``), one plan is made for the largest, and serves all.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch.fx as fx

from fxoffload.analysis.op_costs import tensors_of
from fxoffload.compiler.batch_sizes import BatchSizes, GraphBytes, Sizes
from fxoffload.compiler.planning import GraphPlanning, Planning
from fxoffload.compiler.schedule_by_size import SizedPlan
from fxoffload.errors import BudgetError, PassError
from fxoffload.reset import on_reset
from fxoffload.torch_private.dynamo_state import frame_id
from fxoffload.torch_private.size_guards import bounds_sizes, marks_sizes
from fxoffload.torch_private.symbolic_sizes import hints_at, symbols_of

log = logging.getLogger(__name__)

# For one model's code.
MAX_VARIANTS = 3
# How much larger the calls are that a plan is asked for.
_FACTORS = (1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0)
# The last variant is planned for this part of the largest calls that fit by the plan's smallest budget.
_SPARING = 0.95
# A range that is narrower is not told apart from the one below it.
_NARROW = 1.1


class SizeVariants:
    """The ranges of all graphs that were compiled for varying sizes: their upper ends, in bytes of ``GraphBytes``."""

    def __init__(self) -> None:
        self._ends: defaultdict[Hashable, list[int]] = defaultdict(list)
        self._lock = threading.Lock()

    def begin(self, key: Hashable, size: int) -> int | None:
        """The end of the range below ``size``; None where there is none."""
        with self._lock:
            return max((e for e in self._ends[key] if e < size), default=None)

    def may_end(self, key: Hashable) -> bool:
        """Whether one more variant may follow the one that is being compiled."""
        with self._lock:
            return len(self._ends[key]) < MAX_VARIANTS - 1

    def end(self, key: Hashable, size: int) -> None:
        """A variant serves calls up to ``size``."""
        with self._lock:
            self._ends[key].append(size)

    def forget(self) -> None:
        """All code was dropped (``torch.compiler.reset``)."""
        with self._lock:
            self._ends.clear()


VARIANTS = SizeVariants()
on_reset(VARIANTS.forget)


def largest_served(
    sizes: BatchSizes, graph_bytes: GraphBytes, serves: Callable[[Sizes], bool], *, may_be_fixed: bool = True
) -> int | None:
    """The largest call that a plan serves, in bytes of ``graph_bytes``; None without an end.

    Each size is varied alone; the least end counts.

    Args:
        sizes: those that were planned for are served.
        serves: whether the plan serves calls of some sizes; if not, then none that are larger.
        may_be_fixed: whether the range may hold the planned sizes alone.
    """
    ends = []
    for index in range(len(sizes.symbols)):
        tried = [s for f in _FACTORS if (s := sizes.scaled(f, index)) is not None]
        served = bisect.bisect_left(tried, True, key=lambda s: not serves(s))
        if served == len(tried):
            continue
        last = tried[served - 1] if served else sizes.hints
        if last == sizes.hints and not may_be_fixed:
            last = sizes.one_more(index)
        ends.append(graph_bytes.at(sizes.named(last)))
    return min(ends, default=None)


@dataclass(frozen=True)
class Range:
    """The sizes that one variant serves.

    Attributes:
        key: of the code, the same for all its variants.
        planned_bytes: the size that is compiled for.
        end: the largest size; None: it serves all larger calls.
    """

    key: Hashable
    graph_bytes: GraphBytes
    planned_bytes: int
    end: int | None

    def guard(self) -> None:
        """Let Dynamo check at every call that it lies in this range, and in no other one. Called when the variant has
        been compiled: Inductor's cache keeps a compiled segment under all guards that are known by then.

        Raises:
            PassError: the size that is compiled for lies outside the range.
        """
        begin, end, total = VARIANTS.begin(self.key, self.planned_bytes), self.end, self.graph_bytes.total
        if begin is not None and end is not None and end < _NARROW * begin:
            begin = None
        # The truth value of a symbolic comparison becomes a guard.
        if not ((begin is None or bool(total > begin)) and (end is None or bool(total <= end))):
            raise PassError(f"expected {self.planned_bytes} bytes to lie between {begin} and {end}", "variants")
        if end is not None:
            VARIANTS.end(self.key, end)
        log.debug("variant for calls of more than %s and at most %s bytes in all values", begin, end)


@dataclass(frozen=True)
class PlanForSizes:
    """A plan, and its form for calls of other sizes.

    Attributes:
        planned: for the sizes that are compiled for.
        sized: schedules calls of other sizes; None where sizes do not vary, and where nothing is done.
        range: the sizes that it serves; None: all.
    """

    planned: GraphPlanning
    sized: SizedPlan | None = None
    range: Range | None = None


def plan_for_sizes(planning: Planning) -> PlanForSizes | None:
    """The plan; None where the forward saves nothing that may move.

    Raises:
        BudgetError: see ``Planning.run``.
    """
    sizes = BatchSizes.of(planning.joint)
    if sizes is None:
        planned = planning.run(sizes_are_fixed=True)
        return None if planned is None else PlanForSizes(planned)
    bounded = bounds_sizes()
    if bounded:
        sizes = sizes.at_upper()
    sized = _planned_at(planning, sizes)
    if sized is None:
        return None
    found = None
    if not bounded:
        sized, found = _with_range(planning, sized)
    return PlanForSizes(sized.planned, sized if sized.planned.schedule is not None else None, found)


def _planned_at(planning: Planning, sizes: BatchSizes) -> SizedPlan | None:
    with hints_at(sizes.named(sizes.hints)):
        planned = planning.run()
    if planned is None:
        return None
    return SizedPlan(sizes, planned, planning.settings, planning.objective, planning.limit_bytes)


def _with_range(planning: Planning, sized: SizedPlan) -> tuple[SizedPlan, Range | None]:
    frame, graph_bytes = frame_id(), GraphBytes.of(planning.joint)
    is_plain = sized.planned.schedule is None
    if frame is None or graph_bytes is None or not (is_plain or planning.recompute == "auto"):
        return sized, None
    key = (frame, _fingerprint(planning.joint), planning.asked, planning.recompute)
    sizes, end = sized.sizes, None
    # What does nothing must not serve what exceeds the budget, even if other code has used up the variants.
    if VARIANTS.may_end(key) or (is_plain and planning.limit_bytes is not None):
        began = time.perf_counter()
        end = largest_served(sizes, graph_bytes, sized.serves, may_be_fixed=not marks_sizes())
        log.info("found the range of sizes in %.1f s", time.perf_counter() - began)
    else:
        sized = _last(planning, sized)
    return sized, Range(key, graph_bytes, graph_bytes.at(sizes.named(sizes.hints)), end)


def _fingerprint(joint: fx.GraphModule) -> Hashable:
    """A key that differs between models of one class, and is the same for all sizes. The code object is no such key."""
    fixed = [t for n in joint.graph.find_nodes(op="placeholder") for t in tensors_of(n) if not symbols_of(t)]
    shapes = tuple((tuple(t.shape), str(t.dtype)) for t in fixed)
    return sum(n.op == "call_function" for n in joint.graph.nodes), hash(shapes)


def _last(planning: Planning, sized: SizedPlan) -> SizedPlan:
    """The plan of the last variant, which no other follows: for about the largest calls that fit at all."""
    if planning.limit_bytes is None or planning.objective.is_checkpointing or sized.planned.schedule is None:
        return sized
    index = max(range(len(sized.sizes.hints)), key=lambda i: sized.sizes.hints[i])
    larger = sized.sizes.scaled(_SPARING * planning.limit_bytes / sized.planned.plan.smallest_budget_bytes, index)
    if larger is None or larger <= sized.sizes.hints:
        return sized
    try:
        return _planned_at(planning, replace(sized.sizes, hints=larger)) or sized
    except BudgetError:
        return sized
