"""Looks for a better plan of a chain of calls by choosing recompute variants of its graphs.

Each graph has a frontier of recompute choices (``VariantMaker.points``). Some of them are partitioned. The solver
chooses one for each call, together with the values that move. At most two per graph are taken on, in addition to the
graph as compiled. Where a graph of several layers is called once, the solver chooses for each of them
(``call_layers``). A chain of variants is laid out from their partitionings and scheduled like any other, so that all
comparisons are of simulations.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from fxoffload.compiler.call_layers import CallLayers
from fxoffload.compiler.chain_graphs import GraphDescription
from fxoffload.compiler.search_rounds import CLOSE, SearchAim, search_choices
from fxoffload.compiler.variant_maker import PlannedVariant, Points, VariantMaker
from fxoffload.compiler.variant_problem import CallVariants, VariantProblem
from fxoffload.planner.as_measured import measured_step
from fxoffload.planner.chain import NO_EXTRA_MEMORY, Chain, ExtraMemory, concatenate, with_turn
from fxoffload.planner.chain_problem import chain_problem, in_names_of_chain
from fxoffload.planner.problem import Solution
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.simulate import Simulation
from fxoffload.planner.solve import MOST_INTEGERS
from fxoffload.planner.steps import TrainingStep
from fxoffload.step.call_order import CallOrder
from fxoffload.step.edges import EdgeMemory, Edges
from fxoffload.step.readings import PHASES
from fxoffload.step.segment_names import TURN

log = logging.getLogger(__name__)

# Most points of a graph's frontier that are partitioned. Where each layer has a choice of its own, these are the least
# and the most recomputation.
_MOST_VARIANTS = 6
_FEW_VARIANTS = 2
# Where calls need fewer variants than a graph may have, the others are those of a budget that is smaller by this part.
_TIGHTER = 0.1


@dataclass(frozen=True)
class ChainChoice:
    """A way to run a chain.

    Attributes:
        variants: per call, its variant; None: the graph as compiled.
        steps: per call, the variant's step.
        chain: so laid out.
        scheduler: of ``chain``.
        schedule: what moves when; None: the objective is not reached so.
        promised: the solver's solution that it is; None: the solver was not asked.
    """

    variants: CallVariants
    steps: tuple[TrainingStep, ...]
    chain: Chain
    scheduler: Scheduler
    schedule: Schedule | None = None
    promised: Solution | None = None

    def candidates_of(self, call: int) -> tuple[str, ...]:
        """Names in the step of one call, in its order."""
        return tuple(c.name for c in self.steps[call].candidates)


class ChainSearch:
    """The choices for one chain.

    Args:
        calls: the graph of each, in the order of their forwards.
        edge_memory: memory observed at their edges, in the names of the graphs as compiled.
        scheduler: of a step.
        rates: of the machine.
        host_bytes: most bytes on the host.
        order: of the calls; None: the forwards, then the backwards in reverse.
        written: per call, inputs by their names in ``edges`` that the program modifies before the backward: it may,
            since the graph as compiled does not save them, so no variant may either. Empty: there are none.
        reserves: whether one of the variants that a graph may have is to be the one that saves least. Where sizes vary,
            larger calls may come than are planned for now.

    Attributes:
        calls, edge_memory, written: those.
        extra_memory: time and memory outside the graphs, in every choice.
        gap_ms: time between the calls, by the empty segment that stands there; empty where it is not known.
    """

    def __init__(
        self,
        calls: Sequence[GraphDescription],
        edge_memory: Sequence[EdgeMemory],
        scheduler: Callable[[TrainingStep], Scheduler],
        rates: ProfileRates,
        host_bytes: int | None,
        order: CallOrder | None = None,
        *,
        written: Sequence[frozenset[str]] = (),
        reserves: bool = False,
    ) -> None:
        self.calls = list(calls)
        self._order = order
        self.edge_memory = list(edge_memory)
        self._scheduler = scheduler
        self._rates = rates
        self._host_bytes = host_bytes
        self.written = written or [frozenset()] * len(self.calls)
        self._reserves = reserves
        self.extra_memory: ExtraMemory = NO_EXTRA_MEMORY
        self.gap_ms: Mapping[str, float] = {}
        self._kinds = [id(c.variant_maker or c.step) for c in self.calls]
        self._of_variants: dict[tuple[int, PlannedVariant], TrainingStep] = {}
        self._estimates_of: dict[tuple[int, PlannedVariant], TrainingStep] = {}

    def as_compiled(self, aim: SearchAim | None = None) -> ChainChoice:
        """Every graph as it was compiled; scheduled where there is an aim."""
        return self.with_variants((None,) * len(self.calls), aim)

    def plain(self) -> ChainChoice:
        """Every call as plain Inductor has it: as compiled, or the variant that recomputes least where that obeys
        activation checkpointing."""
        kinds = zip(self._kinds, self.calls, strict=True)
        calls = {kind: call for kind, call in kinds if call.may_save_more}
        found = {kind: self._plain(kind, call) for kind, call in calls.items()}
        return self.with_variants(tuple(found.get(kind) for kind in self._kinds))

    def baseline(self, plain: ChainChoice) -> Simulation:
        """Plain Inductor's step, with everything kept. ``plain``: the choice that is nearest to it."""
        if all(call.plain is None for call in self.calls):
            return plain.scheduler.as_inductor()
        others = [self._plain_form(*pair) for pair in zip(self.calls, plain.variants, strict=True)]
        return self._scheduler(self._chain(others).step).as_inductor()

    def _plain_form(self, call: GraphDescription, variant: PlannedVariant | None) -> tuple[TrainingStep, Edges] | None:
        if call.plain is not None or variant is None:
            return call.plain
        return self._of_variant(call, variant), variant.edges

    def checkpointing(self) -> Simulation:
        """The step in which all activation checkpointing is obeyed, and nothing moves."""
        return self._scheduler(self._chain([c.checkpointed for c in self.calls]).step).keep_all()

    def with_variants(self, variants: CallVariants, aim: SearchAim | None = None) -> ChainChoice:
        """The choice in which every call runs its variant."""
        chain = self._layout(variants)
        scheduler = self._scheduler(chain.step)
        steps = tuple(self._steps(variants))
        return ChainChoice(variants, steps, chain, scheduler, None if aim is None else aim.schedule(scheduler))

    def search(self, aim: SearchAim) -> list[ChainChoice]:
        """Choices that recompute something else than the graphs as compiled; none where no graph can."""
        found: list[ChainChoice] = []
        if any(self._variants_by_kind.values()):
            # The choice that recomputes most, whatever the solver thinks of it.
            most = tuple((self._variants_by_kind[kind] or [None])[-1] for kind in self._kinds)
            found.append(self.with_variants(most, aim))
        elif not self._layers:
            return found
        narrowed = self._narrowed(aim)
        if narrowed is None:
            return found
        refused: set[int] = set()

        def lay_out(solution: Solution, aim: SearchAim) -> ChainChoice | None:
            variants, refuse = narrowed.call_variants(solution)
            refused.update(refuse)
            if refuse:
                return None
            return replace(self.with_variants(variants, aim), promised=in_names_of_chain(solution))

        enough_ms = self.as_compiled().scheduler.keep_all().step_ms * (1 + CLOSE)
        found = search_choices(narrowed.problem, aim, lay_out, found, enough_ms=enough_ms)
        if refused and not any(tried.promised for tried in found):
            self._choose_as_one(refused)
            return self.search(aim)
        return found

    def _choose_as_one(self, calls: Iterable[int]) -> None:
        """A mixture of these calls' points cannot stand in for their graphs: as for others, all layers recompute the
        same."""
        for call in calls:
            del self._layers[call]
        self.__dict__.pop("_variants_by_kind", None)

    # -- the choices ---------------------------------------------------------------------------------------------------

    @cached_property
    def _variants_by_kind(self) -> dict[int, list[PlannedVariant]]:
        """Per kind, the partitionings that save less than the graph as compiled, from least to most recomputation;
        where that obeys activation checkpointing, those that save more too."""
        began = time.perf_counter()
        found: dict[int, list[PlannedVariant]] = {}
        for call, (kind, description) in enumerate(zip(self._kinds, self.calls, strict=True)):
            if kind not in found:
                few = call in self._layers
                found[kind] = [v for v in self._find_variants(description, few) if self._may_run(call, v)]
        log.info("partitioned %d variants in %.1f s", sum(map(len, found.values())), time.perf_counter() - began)
        return found

    def _may_run(self, call: int, variant: PlannedVariant) -> bool:
        return not _saves(variant, self.calls[call].edges, self.written[call])

    @cached_property
    def _layers(self) -> dict[int, CallLayers]:
        """Calls that are the only ones of a graph of several layers: their choices. The solver has no more of them all
        than it can branch on; graphs of more layers come first."""
        makers: dict[int, VariantMaker] = {}
        counts = Counter(self._kinds)
        for call, (kind, description) in enumerate(zip(self._kinds, self.calls, strict=True)):
            maker = description.variant_maker
            if maker is not None and counts[kind] == 1 and description.sized is None and maker.room():
                makers[call] = maker
        found: dict[int, CallLayers] = {}
        most = MOST_INTEGERS
        for call in sorted(makers, key=lambda c: -len(next(iter(makers[c].points()), ()))):
            maker, points = makers[call], makers[call].points()
            if most <= 0 or not points or len(points[0]) < 2:
                break
            base = maker.variant(points[0])
            if base is not None and self._may_run(call, base):
                description = self.calls[call]
                is_plain = description.plain is None and not description.may_save_more
                layers = CallLayers(maker, base, is_plain, partial(self._may_run, call))
                most -= layers.num_choices
                if most >= 0:
                    found[call] = layers
        return found

    def _plain(self, kind: int, call: GraphDescription) -> PlannedVariant | None:
        assert call.variant_maker is not None
        if call.variant_maker.room():
            return next(iter(self._variants_by_kind[kind]), None)
        points = call.variant_maker.points()  # it may not be among those that the graph has
        return call.variant_maker.variant(points[0]) if points else None

    def _find_variants(self, call: GraphDescription, few: bool) -> list[PlannedVariant]:
        if call.variant_maker is None:
            return []

        def step_of(variant: PlannedVariant) -> TrainingStep:
            return self._estimate(call, variant)

        count = _FEW_VARIANTS if few else _MOST_VARIANTS
        return _variants_of(call.variant_maker, call.step, step_of, may_save_more=call.may_save_more, count=count)

    def _narrowed(self, aim: SearchAim) -> VariantProblem | None:
        """The problem with as many variants per kind as a graph may have: those that it has, and those that the solver
        would use most. None: it would use none."""
        every: dict[int, list[PlannedVariant | None]] = {
            kind: [None, *found] for kind, found in self._variants_by_kind.items()
        }
        alone = {self._kinds[call] for call in self._layers}
        pairs = zip(self._kinds, self.calls, strict=True)
        makers = {kind: c.variant_maker for kind, c in pairs if c.variant_maker is not None}
        there = {kind: set(maker.variants()) for kind, maker in makers.items()}
        room = {kind: maker.room() for kind, maker in makers.items()}
        shared = {kind: found for kind, found in self._variants_by_kind.items() if found and kind not in alone}
        if all(len(set(found) - there[kind]) <= room[kind] for kind, found in shared.items()):
            return self._problem(every)
        whole = self._problem(every)
        solution = aim.solve(whole.problem)
        if solution is None:
            return None
        used = self._used(whole, solution)
        new = {kind: {every[kind][a] for a in used[kind] if a} - there[kind] for kind in shared}
        if aim.limit_bytes is not None and any(len(new[kind]) < room[kind] for kind in shared):
            tighter = replace(aim, limit_bytes=int((1 - _TIGHTER) * aim.limit_bytes)).solve(whole.problem)
            more = used if tighter is None else self._used(whole, tighter)
            used = {kind: [*first, *(a for a in more[kind] if a not in first)] for kind, first in used.items()}
        picked: dict[int, list[PlannedVariant | None]] = {}
        for kind, variants in every.items():
            best = [a for a in used[kind] if a]
            if self._reserves and room.get(kind) and len(variants) > 1:
                best = [len(variants) - 1, *(a for a in best if a != len(variants) - 1)]
            too_many = [a for a in best if variants[a] not in there[kind]][room.get(kind, 0) :]
            picked[kind] = [None, *(variants[a] for a in sorted(set(best).difference(too_many)))]
        return self._problem(picked)

    def _used(self, whole: VariantProblem, solution: Solution) -> dict[int, list[int]]:
        """Per kind, the numbers of the variants that its calls run, the most common first."""
        used: dict[int, Counter[int]] = {kind: Counter() for kind in self._kinds}
        for call, numbers in whole.chosen(solution):
            if call not in whole.layers:
                used[self._kinds[call]].update(numbers)
        return {kind: [a for a, _ in counts.most_common()] for kind, counts in used.items()}

    def _problem(self, variants: Mapping[int, Sequence[PlannedVariant | None]]) -> VariantProblem:
        """``variants``: per kind, those to choose from; the first is the graph as compiled."""
        bases = {self._kinds[call]: [layers.base] for call, layers in self._layers.items()}
        each = [bases.get(kind) or variants[kind] for kind in self._kinds]
        counts = [len(found) for found in each]
        layouts = [self._layout([found[min(j, len(found) - 1)] for found in each]) for j in range(max(counts))]
        problem = chain_problem(layouts, counts, self._kinds, self._rates, host_bytes=self._host_bytes)
        layers = [[layer] for layer in problem.layers]
        for call, choices in self._layers.items():
            layers[call] = choices.problem_layers(problem.layers[call], layouts[0], call)
        problem = replace(problem, layers=tuple(layer for found in layers for layer in found))
        by_layer = {call: (choices, len(layers[call])) for call, choices in self._layers.items()}
        return VariantProblem(problem, self._kinds, variants, by_layer)

    # -- chains --------------------------------------------------------------------------------------------------------

    def _steps(self, variants: Sequence[PlannedVariant | None]) -> list[TrainingStep]:
        return [c.step if v is None else self._of_variant(c, v) for c, v in zip(self.calls, variants, strict=True)]

    def _of_variant(self, call: GraphDescription, variant: PlannedVariant) -> TrainingStep:
        """The step of a variant of a call; calls that share a step share that of their variant."""
        key = (id(call.step), variant)
        if key not in self._of_variants:
            self._of_variants[key] = no_faster_forward(self._estimate(call, variant), call.step)
        return self._of_variants[key]

    def _estimate(self, call: GraphDescription, variant: PlannedVariant) -> TrainingStep:
        """The variant's step as its partitioning has it."""
        key = (id(call.step), variant)  # partitionings that are not chosen live no longer than this
        if key not in self._estimates_of:
            self._estimates_of[key] = call.step_of(variant)
        return self._estimates_of[key]

    def _layout(self, variants: Sequence[PlannedVariant | None]) -> Chain:
        """The chain whose calls run these."""
        pairs = zip(self.calls, variants, strict=True)
        return self._chain([None if v is None else (self._of_variant(c, v), v.edges) for c, v in pairs])

    def _chain(self, others: Sequence[tuple[TrainingStep, Edges] | None]) -> Chain:
        """The chain whose calls have these steps; None: the graph's own as compiled."""
        steps = [call.step if other is None else other[0] for call, other in zip(self.calls, others, strict=True)]
        known = [{s.name for s in step.storages} for step in steps]
        names: dict[int, dict[str, str]] = {}
        for k, (call, other) in enumerate(zip(self.calls, others, strict=True)):
            if other is not None:
                names[k] = _renamed(call.edges, other[1])
        edge_memory = []
        for item in self.edge_memory:
            members = [(k, names[k].get(n, "") if k in names else n) for k, n in item.members]
            members = [(k, n) for k, n in members if n in known[k]]
            if members:
                edge_memory.append(replace(item, members=tuple(members)))
        chain = concatenate(steps, edge_memory, self._order)
        if self.gap_ms or TURN in dict(self.extra_memory.gaps):
            chain = chain.with_step(measured_step(with_turn(chain.step), dict.fromkeys(PHASES, self.gap_ms)))
        return chain.with_extra_memory(self.extra_memory)


def no_faster_forward(variant: TrainingStep, compiled: TrainingStep) -> TrainingStep:
    """``variant`` with a forward that takes at least as long as that of the graph as compiled.

    Its kernels write less, but the time to read their inputs hides that. 24 layers of a MoE, predicted to save 5.5 ms
    of 77, saved 1 to 2.5 of 87 (H200, 2026-11-22). A plan that counted on it was slower than allowed.
    """
    mine, other = (sum(s.ms for s in step.forward) for step in (variant, compiled))
    if not 0 < mine < other:
        return variant
    return replace(variant, forward=tuple(replace(s, ms=s.ms * other / mine) for s in variant.forward))


def _variants_of(
    variant_maker: VariantMaker,
    compiled: TrainingStep,
    step_of: Callable[[PlannedVariant], TrainingStep] = lambda v: v.step,
    *,
    may_save_more: bool = False,
    count: int = _MOST_VARIANTS,
) -> list[PlannedVariant]:
    """Those of earlier plans, which may be compiled already, and new ones where the graph may have more.

    Args:
        may_save_more: than the graph as compiled.
        count: most new ones.
    """
    there = variant_maker.variants()
    points = variant_maker.points() if variant_maker.room() else ()
    variants = [*there, *(v for v in _partitioned(variant_maker, points, count) if v is not None)]
    found: list[PlannedVariant] = []
    least = math.inf if may_save_more else _saved_bytes(compiled)
    nbytes = {variant: _saved_bytes(step_of(variant)) for variant in variants}
    for variant in sorted(nbytes, key=lambda v: -nbytes[v]):
        if variant in there or nbytes[variant] < least:
            found.append(variant)
            least = min(least, nbytes[variant])
    return found


def _partitioned(
    variant_maker: VariantMaker, points: Sequence[Points], most: int = _MOST_VARIANTS
) -> list[PlannedVariant | None]:
    if not points:
        return []
    sizes = [sum(p.nbytes for p in point.values()) for point in points]
    count = min(most, len(points))
    # Evenly spaced in bytes: many points differ by little.
    levels = [sizes[-1] + (sizes[0] - sizes[-1]) * i // max(count - 1, 1) for i in range(count)]
    wanted = sorted({min(range(len(points)), key=lambda i, level=level: abs(sizes[i] - level)) for level in levels})
    return [variant_maker.variant(points[i]) for i in wanted]


def _saves(variant: PlannedVariant, edges: Edges, written: frozenset[str]) -> bool:
    """Whether it saves a value that the program modifies: one of ``written``, by its name in ``edges``."""
    inputs = {c.name for c in variant.step.candidates if c.is_input}
    pairs = zip(edges.inputs, variant.edges.inputs, strict=True)
    return any(mine in written and name in inputs for mine, name in pairs)


def _saved_bytes(step: TrainingStep) -> int:
    """The bytes that a forward leaves for its backward, as far as they can move."""
    return sum(c.nbytes for c in step.candidates)


def _renamed(compiled: Edges, variant: Edges) -> dict[str, str]:
    """Names of the storages at the edges of a graph under a variant."""
    found: dict[str, str] = {}
    for mine, others in (
        (compiled.inputs, variant.inputs),
        (compiled.outputs, variant.outputs),
        (compiled.tangents, variant.tangents),
        (compiled.gradients, variant.gradients),
    ):
        pairs = zip(mine, others, strict=True)
        found.update((a, b) for a, b in pairs if a is not None and b is not None and a not in found)
    return found
