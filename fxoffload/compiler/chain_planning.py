"""Plans all compiled graphs of a step together, where none of them has a plan of its own.

A graph of one layer has nothing to choose from; a step of many such graphs has (each layer compiled on its own, as with
FSDP2). After the same chain of calls was seen twice (``fxoffload.runtime.tracker.step_tracker``), it is planned like
one graph: each call's values are kept, offloaded or recomputed. Keep and offload need nothing but the plan. To
recompute more, a graph gets a variant (``fxoffload.compiler.variant_maker``), which is compiled when the plan is
followed for the first time. Graphs that obey activation checkpointing as compiled get variants that recompute less.
Unless the user asks for something, the plan then takes no more than checkpointing's own peak. Nothing is exchanged
between ranks.

Where sizes vary from call to call, a chain is planned for some sizes: graphs, and their variants, are described as they
are with those. A variant is compiled when the first size wants it, and serves all.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fxoffload.compiler.batch_sizes import Sizes
from fxoffload.compiler.chain_graphs import GraphDescription, descriptions_at
from fxoffload.compiler.chain_search import ChainChoice, ChainSearch
from fxoffload.compiler.explain import (
    ExplainRow,
    floors_of,
    grouped,
    mask_rows,
    producer_of,
    reason_of,
    recompute_reason,
    recomputed_rows,
    why_it_stays,
)
from fxoffload.compiler.pacing import paced_calls, rates_with_pace
from fxoffload.compiler.planning import TUNING_BYTES, WORTH, around_bytes, bytes_for_graphs
from fxoffload.compiler.search_rounds import SearchAim
from fxoffload.compiler.variant_maker import VariantMaker
from fxoffload.passes.find_candidates import SavedValues
from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.registry import PlanBox
from fxoffload.plan_report.summary import aim_of, gain_of, slower_than_allowed
from fxoffload.planner.chain import NO_EXTRA_MEMORY, Chain, ExtraMemory, with_turn
from fxoffload.planner.extra_memory import extra_memory_of_larger, extra_memory_when_calls_begin, raised
from fxoffload.planner.plan import BASES, Decision, Prediction
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.simulate import Simulation, simulate
from fxoffload.planner.steps import TrainingStep
from fxoffload.planner.windows import no_windows
from fxoffload.progress import working
from fxoffload.runtime import background
from fxoffload.runtime.engine import engine_for
from fxoffload.runtime.tracker.chains import ChainPlan, PlanObserver, Seen, volume_of
from fxoffload.runtime.tracker.tracked_graph import TrackedGraph
from fxoffload.sizes import format_bytes
from fxoffload.step.choice import Choice
from fxoffload.step.edges import EdgeMemory

log = logging.getLogger(__name__)

_GRADIENTS = "They were seen to stay until the step's end; let them add up in .grad tensors that are there already"
# Variants have to save ``WORTH`` of the peak too; within a budget, this part of the step's time.
_WORTH_MS = 0.005
# Sizes below the largest leave this part of the budget, where they have to move something. Each of them fills its
# budget in an order of its own, and the allocator may find no room for one among blocks that others left. Then the
# device's reserved memory grows: by up to 5 % of the budget in 200 steps of random lengths (two H100s, 2026-11-25). The
# largest uses this room itself. In proportion to its activations, the next size of the grid still has as much of the
# budget as the largest.
_SPARE = 1 / 16


class ChainPlanning:
    """Plans one chain.

    Args:
        descriptions: of its calls, in the order of their forwards, at the sizes that are planned for.
        seen: of the chain.
        written: per call, inputs that the program modifies before the backward (``TrackedGraph.written``).
        sizes: per call, those that are planned for; empty where none vary.

    Attributes:
        choice: the choice of variants that the plan takes: at first, every graph as it was compiled.
        plain: the graphs as compiled; where those obey activation checkpointing, as plain Inductor has them.
        baseline: plain Inductor's step.
        is_plain_compiled: whether that is the step of the graphs as compiled, with everything kept.
        checkpointing: the step in which all activation checkpointing that the plan replaces is obeyed; None: there is
            none.
        expected_ms: estimated time of plain Inductor's step, on which the decisions rest.
        fixed: of every schedule from now on; see ``Scheduler``.
        numbers: per call, that of its variant; once it is to be followed.
        order, others_bytes, margin_bytes: as of ``Seen``.
        first_bytes: the same as ``Seen.left_bytes``, where it was read at these sizes.
        extra_memory: memory known to be on the device outside the graphs, with the margin: from the steps before the
            plan, then from those that were measured.
        forward_ms: of each call: an estimate, until steps were measured.
        paced: per call, whether its forward is, by the latest ``choices``.
    """

    def __init__(
        self,
        descriptions: Sequence[GraphDescription],
        seen: Seen,
        written: Sequence[frozenset[str]],
        sizes: Sequence[Sizes] = (),
    ) -> None:
        self.descriptions = descriptions
        self.fixed: Mapping[str, bool] = {}
        self.sizes = tuple(sizes)
        self.order = seen.order
        self.others_bytes = seen.others_bytes
        self.first_bytes = seen.left_bytes if not sizes or tuple(sizes) == seen.sizes else 0
        self.margin_bytes = seen.margin_bytes
        self._between = seen.between
        self._quick: ChainChoice | None = None  # the graphs as compiled, scheduled without a budget
        self._is_largest = not sizes or volume_of(sizes) >= seen.most_volume
        settings = descriptions[0].settings
        self.objective, self.rates = settings.objective, descriptions[0].rates
        self.device, self.budgets = settings.device, settings.budgets
        # Of one call each, as measured later. Where sizes vary, calls may be shorter than those that are planned for.
        self.forward_ms = [sum(s.ms for s in d.step.forward) for d in descriptions]
        self.paced = [False] * len(descriptions)
        self._paces = settings.paces and not self.sizes
        if self._paces:
            self.rates = rates_with_pace(self.rates, self.forward_ms)
        self.host_bytes = engine_for(settings.device).host_budget_bytes(settings.budgets)
        self.chain_search = self._chain_search(descriptions, seen.edge_memory, written)
        self.choice = self.compiled = self.chain_search.as_compiled()
        self.extra_memory = NO_EXTRA_MEMORY
        is_checkpointed = any(c.is_checkpointed for c in self.chain_search.calls)
        if seen.live_bytes:
            self.extra_memory = self._extra_memory(seen, written)
        self.chain_search.extra_memory = self.extra_memory = self.with_margin(self.extra_memory)
        self.chain_search.gap_ms = self._gap_ms(seen)
        self.choice = self.compiled = self.chain_search.as_compiled()
        self.others: list[ChainChoice] = []
        self.plain = self.compiled
        self.checkpointing: Simulation | None = None
        if is_checkpointed:
            self.plain = self.chain_search.plain()
            self.checkpointing = self.chain_search.checkpointing()
            self.objective = self.objective.at_checkpointing(self.checkpointing.peak_bytes + around_bytes(self.device))
        self.baseline: Simulation = self.chain_search.baseline(self.plain)
        self.is_plain_compiled = not is_checkpointed and all(c.plain is None for c in self.chain_search.calls)
        self.expected_ms = self.baseline.step_ms
        self.numbers = [0] * len(descriptions)
        self.summary = self._aim = ""
        self._least: dict[int, tuple[ChainChoice, Schedule]] = {}  # by the choice's id, which it keeps alive

    @property
    def limit_bytes(self) -> int | None:
        """The graphs' part of the budget; None: there is none."""
        budget = self.objective.budget_bytes
        return None if budget is None else bytes_for_graphs(budget, self.device)

    @property
    def promises_budget(self) -> bool:
        """Whether there is a budget that the user asked for."""
        return self.limit_bytes is not None and not self.objective.is_checkpointing

    @property
    def calibrates(self) -> bool:
        """Whether it is replanned with measured times. Where sizes vary, they are not those of one step."""
        return self.descriptions[0].settings.calibrates and not self.sizes

    @property
    def is_measured(self) -> bool:
        """Whether steps that ran the graphs as compiled were measured."""
        return all(d.basis == "steps" for d in self.descriptions)

    @property
    def records(self) -> bool:
        """Whether the allocator may be asked to record its events."""
        return self.descriptions[0].settings.records

    @property
    def _of_sizes(self) -> str:
        """The sizes, in words: of the first call that has any; those of the others follow from them."""
        first = next((s for s in self.sizes if s), ())
        return f", sizes {', '.join(map(str, first))}" if first else ""

    def _warn_of_the_budget(self, kind: str, text: str) -> None:
        """Warn, unless the budget is activation checkpointing's peak: that is no promise, and the summary says it."""
        if not self.objective.is_checkpointing:
            self.warn(kind, text)

    def warn(self, kind: str, text: str) -> None:
        """Once, whatever the sizes are, and however often the chain is planned."""
        warned = self.descriptions[0].warned
        if kind not in warned:
            warned.add(kind)
            background.warn(text)

    @property
    def chain(self) -> Chain:
        """The chain that is scheduled."""
        return self.choice.chain

    def _chain_search(
        self,
        descriptions: Sequence[GraphDescription],
        edge_memory: Sequence[EdgeMemory],
        written: Sequence[frozenset[str]],
    ) -> ChainSearch:
        return ChainSearch(
            descriptions,
            edge_memory,
            self._scheduler,
            self.rates,
            self.host_bytes,
            self.order,
            written=written,
            reserves=bool(self.sizes),
        )

    def _scheduler(self, step: TrainingStep) -> Scheduler:
        return Scheduler(
            step,
            fixed=self.fixed,
            rates=self.rates,
            host_bytes=self.host_bytes,
            in_flight_budget=self.budgets.in_flight,
            prefetch_budget=self.budgets.prefetch,
        )

    def _extra_memory(self, seen: Seen, written: Sequence[frozenset[str]]) -> ExtraMemory:
        """Memory on the device outside the graphs.

        Where sizes vary, it comes from steps of this size, or nearly: they may have been shorter than the planned ones
        by less than a step of the grid. Where none could be measured, it comes from those of another size.
        """

        def at(step: Seen) -> tuple[int, ExtraMemory]:
            ran = self.compiled
            if step.sizes != self.sizes:
                ran = self._chain_search(
                    descriptions_at(self.descriptions, step.sizes), step.edge_memory, written
                ).as_compiled()
            return step.volume, self._seen_extra_memory(ran, step)

        size, found = volume_of(self.sizes), at(seen)
        if size <= seen.volume:
            return found[1]
        return extra_memory_of_larger(size, found, None if seen.other is None else at(seen.other))

    def with_margin(self, extra_memory: ExtraMemory) -> ExtraMemory:
        """``extra_memory`` plus the excess of steps over earlier plans of this chain; its place in the step is
        unknown."""
        return raised(extra_memory, self.margin_bytes, len(self.descriptions))

    def without_margin(self, extra_memory: ExtraMemory) -> ExtraMemory:
        """The reverse."""
        return raised(extra_memory, -self.margin_bytes, len(self.descriptions))

    def _gap_ms(self, seen: Seen) -> dict[str, float]:
        """Time between the calls, by the empty segment that stands there."""
        scale = volume_of(self.sizes) / seen.volume if self.sizes and seen.volume else 1.0
        return {self.chain.gap_before(at): ms * scale for at, ms in seen.gap_ms().items()}

    def _seen_extra_memory(self, compiled: ChainChoice, seen: Seen) -> ExtraMemory:
        """Memory outside the graphs in the first steps under a budget (``TrackedGraph.at_first``)."""
        chain = compiled.chain
        goes: dict[str, bool] = {}
        for k, description in enumerate(self.descriptions):
            names = dict(zip(compiled.candidates_of(k), chain.candidates[k], strict=True))
            planned = description.graph.planned  # its own plan, before
            went = description.graph.actions["auto"] if planned is None else planned.offload
            flags = zip(description.graph.saved.candidates, went, strict=True)
            goes.update({name: go for c, go in flags if (name := names[c.name]) is not None})
        step = with_turn(chain.step)
        ran = simulate(step, step.decide(goes), copies=self.rates, windows=no_windows(step))
        return extra_memory_when_calls_begin(chain, ran, seen.live_bytes, seen.gap_bytes)

    def quick(self) -> Schedule | None:
        """The schedule of the graphs as they are compiled.

        None: they do not meet the objective. Steps without any plan offload everything: 800 ms instead of 420 (stock
        FSDP2, two H200s, 2026-11-28).
        """
        if self.limit_bytes is None:
            aim = SearchAim(max_ms=self._most_ms)
            self._quick = self.chain_search.as_compiled(aim)
            return self._quick.schedule
        return self.compiled.scheduler.least_time(self.limit_bytes)

    @property
    def _most_ms(self) -> float:
        """Most time that a step may take without a budget.

        Graphs recompute what their own plans say, which may take longer than the slowdown that is allowed. To move what
        hides costs no more.
        """
        return max(self.objective.most_ms(self.baseline.step_ms), self.plain.scheduler.keep_all().step_ms)

    def run(self) -> Schedule:
        """The schedule that meets the objective best."""
        if self.objective.budget_bytes is not None:
            return self._within(self.objective.budget_bytes)
        slowdown = self.objective.max_slowdown or 0.0
        found = self._take(SearchAim(max_ms=self._most_ms))
        if found is None or found.simulation.peak_bytes > (1 - WORTH) * self.baseline.peak_bytes:
            self.choice = self.plain
            instead = "nothing moves" if any(d.recomputed for d in self.descriptions) else "everything is kept"
            self.summary = f"at most {100 * slowdown:.3g} % slowdown would save next to nothing: {instead}"
            return self._keep_all()
        self._say(aim_of(self.objective), found)
        return found

    def _say(self, aim: str, found: Schedule) -> None:
        """The summary of a plan that gains something. ``aim``: the goal of the search, in words."""
        self._aim, self.summary = aim, f"{aim}: {self.gain(found)}"

    def in_measured_time(
        self, descriptions: Sequence[GraphDescription], gap_ms: Mapping[str, float], found: Schedule
    ) -> Schedule:
        """``found``, which ``run`` has returned, with times from steps that ran the graphs as compiled.

        The decisions stay. Ranks measure different times in steps, more so than of segments alone. Where one rank
        recomputes and another one copies, both wait: 477 ms for 438 (FSDP2, two H200s, 2026-11-28).

        Args:
            descriptions: of the calls, as measured.
            gap_ms: time between the calls. Copies make it longer, so the least that was seen counts.
            found: the schedule.
        """
        old, ran, seen = self.chain_search, self.choice.variants, self.chain_search.gap_ms
        compiled = self.compiled.schedule
        self.descriptions = descriptions
        self.forward_ms = [sum(s.ms for s in d.step.forward) for d in descriptions]
        search = self.chain_search = self._chain_search(descriptions, old.edge_memory, old.written)
        search.extra_memory = self.extra_memory
        search.gap_ms = {**seen, **{name: min(ms, seen.get(name, ms)) for name, ms in gap_ms.items()}}
        self.compiled = search.as_compiled()
        if compiled is not None:
            self.compiled = replace(self.compiled, schedule=self._again(self.compiled, compiled))
        self.plain = search.with_variants(self.plain.variants)
        self.baseline = search.baseline(self.plain)
        if self.checkpointing is not None:
            self.checkpointing = search.checkpointing()
        self.choice = search.with_variants(ran)
        measured = self._again(self.choice, found)
        if self._aim:
            self._say(self._aim, measured)
        return measured

    def _again(self, choice: ChainChoice, found: Schedule) -> Schedule:
        """``found``, simulated with the times that ``choice`` has."""
        now = simulate(choice.chain.step, found.offload, copies=self.rates, windows=found.windows)
        return Schedule(found.offload, found.windows, now)

    def _within(self, budget: int) -> Schedule:
        limit = bytes_for_graphs(budget, self.device)
        is_promised = not self._is_largest and not self.objective.is_checkpointing
        spare = int(_SPARE * limit) if is_promised and self.baseline.peak_bytes > limit else 0
        found = self._take(SearchAim(limit_bytes=limit - spare))
        if found is None and spare:
            spare = 0
            found = self._take(SearchAim(limit_bytes=limit))
        if found is None:
            found = self._smallest(self.choice)
            least = found.simulation.peak_bytes + budget - limit
            self._warn_of_the_budget(
                "least",
                f"expected an activation_budget of at least {format_bytes(least)} ({least} bytes) for a step of "
                f"{_counted(len(self.descriptions), 'call')} of compiled graphs{self._of_sizes}, found "
                f"{format_bytes(budget)}; the step takes the least that was found. Raise the budget, or make the batch "
                "smaller",
            )
            self._say(f"no plan fits into {format_bytes(budget)}; the least peak found", found)
            return found
        leaves = ", a sixteenth of it left for the allocator" if spare else ""
        self._say(f"{aim_of(self.objective)}{leaves}", found)
        if (told := slower_than_allowed(self.objective, found.simulation, self.baseline)) is not None:
            self.warn("slowdown", told)
        return found

    def _take(self, aim: SearchAim) -> Schedule | None:
        """Set ``choice`` to the best one; its schedule, None where it misses the aim. Graphs as they were compiled are
        taken where others are hardly better: variants have to be compiled."""
        self.compiled = self._quick or self.chain_search.as_compiled(aim)
        mine = self.compiled.schedule
        self.choice = self.compiled
        if mine is not None and aim.limit_bytes is not None and not self._is_slow(mine):
            return mine
        self.others = self.chain_search.search(aim)
        for choice in self.others:
            if aim.key(choice) < aim.key(self.choice):
                self.choice = choice
        mine, best = self.compiled.schedule, self.choice.schedule
        if mine is not None and best is not None and not self._is_worth_it(best, mine, aim):
            self.choice = self.compiled
        return self.choice.schedule

    def _is_slow(self, found: Schedule) -> bool:
        return found.simulation.step_ms > (1 + _WORTH_MS) * self.baseline.step_ms

    def _is_worth_it(self, found: Schedule, compiled: Schedule, aim: SearchAim) -> bool:
        if aim.limit_bytes is not None:
            return found.simulation.step_ms < compiled.simulation.step_ms - _WORTH_MS * self.baseline.step_ms
        return found.simulation.peak_bytes <= (1 - WORTH) * compiled.simulation.peak_bytes

    def _keep_all(self) -> Schedule:
        """It moves nothing, so no window binds."""
        found = self.plain.scheduler.least_time(
            max(self.baseline.peak_bytes, self.plain.scheduler.keep_all().peak_bytes)
        )
        assert found is not None
        return found

    def gain(self, found: Schedule, baseline: Prediction | None = None) -> str:
        pairs = zip(self.choice.variants, self.plain.variants, strict=True)
        count = sum(mine is not plain for mine, plain in pairs)
        how = f", {count} of {len(self.descriptions)} calls recompute more" if count else ""
        if count == len(self.descriptions) == 1:
            how = ", with more recomputation"
        return gain_of(found.simulation, baseline or self.baseline) + how

    # -- to be followed ------------------------------------------------------------------------------------------------

    def to_follow(
        self,
        tracked_graphs: tuple[weakref.ref[TrackedGraph], ...],
        schedule: Schedule,
        box: PlanBox,
        observe: Callable[
            [ChainPlanning, Schedule, tuple[weakref.ref[TrackedGraph], ...], PlanBox], PlanObserver | None
        ],
    ) -> ChainPlan:
        """The plan as calls follow it. Variants are compiled when it is followed for the first time, or before; where
        that fails, graphs run as they were compiled. ``observe``: makes what measures its first steps."""
        wanted = [(d.variant_maker, v) for d, v in zip(self.descriptions, self.choice.variants, strict=True)]
        self.numbers = [m.add(v) if m is not None and v is not None else 0 for m, v in wanted]
        first = self._first_choices()
        found = self._to_follow(tracked_graphs, schedule, box, observer=observe(self, schedule, tracked_graphs, box))
        if not self._missing():
            return found

        def otherwise() -> ChainPlan:
            self.choice, self.numbers = self.compiled, [0] * len(self.descriptions)
            instead = self.compiled.schedule or self.compiled.scheduler.smallest()
            self.summary = f"its variants could not be compiled; with the graphs as they are: {self.gain(instead)}"
            return self._to_follow(tracked_graphs, instead, PlanBox(self.describe(instead)))

        return replace(found, prepare=self.compile_variants, otherwise=otherwise, first=first)

    def _missing(self) -> list[tuple[VariantMaker, int]]:
        """Variants that calls are to run and that are not compiled: their makers and numbers."""
        pairs = dict.fromkeys(zip((d.variant_maker for d in self.descriptions), self.numbers, strict=True))
        return [(m, n) for m, n in pairs if m is not None and n and not m.is_compiled(n)]

    def may_compile_during_steps(self) -> bool:
        """Whether all variants may be compiled while steps run."""
        return all(m.may_compile_during_steps() for m, _ in self._missing())

    def compile_variants(self, *, during_steps: bool = False) -> None:
        """Compile the variants that calls are to run. ``during_steps``: other threads train meanwhile."""
        began, missing = time.perf_counter(), self._missing()
        with working("compiling variants", in_background=during_steps) as work:
            for i, (variant_maker, number) in enumerate(missing):
                background.check()
                work.what = f"compiling variant {i + 1} of {len(missing)}"
                variant_maker.compile(number, during_steps=during_steps)
        log.info("compiled variants in %.1f s", time.perf_counter() - began)

    def choices_until_compiled(self) -> tuple[Choice, ...] | None:
        """Each call's choice as the graphs are compiled, until the variants are; None: nothing meets the objective."""
        schedule = self.compiled.schedule
        if schedule is None:
            return None
        return tuple(self._choice(k, self.compiled, schedule, 0) for k in range(len(self.descriptions)))

    def _first_choices(self) -> tuple[Choice, ...]:
        """For the step in which the variants' kernels are tuned: the budget is met then too, where that is possible."""
        if self.device.type != "cuda" or self.objective.is_checkpointing or self.limit_bytes is None:
            return ()
        found = self.choice.scheduler.least_time(self.limit_bytes - TUNING_BYTES)
        return self.choices(found or self._smallest(self.choice))

    def _to_follow(
        self,
        tracked_graphs: tuple[weakref.ref[TrackedGraph], ...],
        schedule: Schedule,
        box: PlanBox,
        *,
        observer: PlanObserver | None = None,
    ) -> ChainPlan:
        """With its budget control, where a budget was promised."""
        budget, limit = (self.objective.budget_bytes, self.limit_bytes) if self.promises_budget else (None, None)
        least = () if budget is None else self.choices(self._smallest(self.choice))
        return ChainPlan(
            tracked_graphs,
            self.choices(schedule),
            box,
            observer=observer,
            sizes=self.sizes,
            budget_bytes=budget,
            is_least=limit is not None and schedule.simulation.peak_bytes > limit,
            spare_bytes=self.spare_of(schedule),
            least=least,
            costs_time=any(schedule.offload) or any(self.numbers),
            order=self.order,
        )

    def spare_of(self, schedule: Schedule) -> int:
        """The rest of the budget under a schedule."""
        return 0 if self.limit_bytes is None else max(self.limit_bytes - schedule.simulation.peak_bytes, 0)

    def _smallest(self, choice: ChainChoice) -> Schedule:
        """The least peak of a choice."""
        if id(choice) not in self._least:
            self._least[id(choice)] = choice, choice.scheduler.smallest()
        return self._least[id(choice)][1]

    def summary_of(self, schedule: Schedule, baseline: Prediction) -> str:
        """The plan's summary for ``schedule``, in measured time, as ``baseline`` is."""
        self.summary = f"{aim_of(self.objective)}, by what was measured: {self.gain(schedule, baseline)}"
        return self.full_summary

    @property
    def full_summary(self) -> str:
        """The plan's summary."""
        found = self.checkpointing
        if found is None:
            return f"{self._over}, {self.summary}"
        ran = zip(self.chain_search.calls, self.choice.variants, strict=True)
        is_obeyed = all(variant is None for call, variant in ran if call.is_checkpointed)
        is_obeyed = is_obeyed and not any(call.checkpointed for call in self.chain_search.calls)
        instead = "with the recomputation of" if is_obeyed else "in place of"
        costs = f"{format_bytes(found.peak_bytes + around_bytes(self.device))} in {found.step_ms:.3g} ms"
        return f"{self._over}, {self.summary}; {instead} activation checkpointing ({costs})"

    def choices(self, schedule: Schedule) -> tuple[Choice, ...]:
        """Each call's choice under a schedule of the chosen variants."""
        if self._paces:
            self.paced = paced_calls(self.forward_ms, schedule, self.rates)
        each = enumerate(zip(self.numbers, self.paced, strict=True))
        return tuple(replace(self._choice(k, self.choice, schedule, n), paced=pace) for k, (n, pace) in each)

    def _choice(self, call: int, choice: ChainChoice, schedule: Schedule, number: int) -> Choice:
        """The choice of one call, in the order of the candidates of the variant that it runs."""
        go = _by_name(choice, call, schedule)
        offload = tuple(go[c.name] for c in self._saved(choice, call).candidates)
        windows = choice.chain.windows_of(call, schedule.windows)
        return Choice(offload, windows, number, watches=True)

    def _saved(self, choice: ChainChoice, call: int) -> SavedValues:
        variant = choice.variants[call]
        return self.descriptions[call].graph.saved if variant is None else variant.saved

    # -- the description -----------------------------------------------------------------------------------------------

    @property
    def _over(self) -> str:
        calls, graphs = len(self.descriptions), len({id(d.graph) for d in self.descriptions})
        return f"over {_counted(calls, 'call')} of {_counted(graphs, 'graph')}{self._of_sizes}"

    def describe(self, schedule: Schedule) -> Plan:
        """The plan as users see it."""
        # The first of the others recomputes everything that it may.
        tried = (self.compiled, self.choice, *self.others[:1])
        smallest = {id(c): self._smallest(c).simulation.peak_bytes for c in tried}
        return Plan(
            graph=-1,
            label=f"a step {self._over}",
            device=self.rates.profile.title,
            activation_budget=self.objective.budget_bytes,
            max_slowdown=self.objective.max_slowdown,
            source=self.objective.source,
            summary=self.full_summary,
            basis=BASES[min(BASES.index(d.basis) for d in self.descriptions)],
            estimate_error=self.rates.profile.estimate_error,
            predicted=Prediction.of(schedule.simulation),
            baseline=Prediction.of(self.baseline),
            checkpointing=None if self.checkpointing is None else Prediction.of(self.checkpointing),
            smallest_budget_bytes=min(smallest.values()) + around_bytes(self.device),
            decisions=self.decisions(schedule),
            floors=tuple(floors_of(self.chain.step, schedule.simulation, _GRADIENTS)),
            between_steps_ms=None if self._between is None else self._between.least_ms(),
            simulation=schedule.simulation,
        )

    def decisions(self, schedule: Schedule) -> tuple[Decision, ...]:
        """What happens to every value."""
        rows = (row for k in range(len(self.descriptions)) for row in self._rows(k, schedule))
        own = dict.fromkeys(d.recomputed for d in self.descriptions)
        return (*grouped(rows), *(decision for decisions in own for decision in decisions))

    def _rows(self, call: int, schedule: Schedule) -> Iterable[ExplainRow]:
        label, saved = f"call {call}", self._saved(self.choice, call)
        infos = {s.name: s for s in self.chain.step.candidates}
        names = dict(zip(self.choice.candidates_of(call), self.chain.candidates[call], strict=True))
        go = _by_name(self.choice, call, schedule)
        for c in saved.candidates:
            name = names[c.name]
            info = None if name is None else infos[name]
            if info is None:
                reason = "others hold it too: to move it would free nothing"
            else:
                reason = reason_of(go[c.name], info, schedule.simulation, is_input=info.is_input)
            nbytes = info.nbytes if info is not None and self.sizes else c.nbytes or 0
            yield ExplainRow(
                label, c.name, producer_of(c), nbytes, "offload" if go[c.name] else "keep", reason, c.label
            )
        for item in saved.skipped:
            if not item.reason.startswith("parameter"):
                yield ExplainRow(label, item.name, "", item.nbytes or 0, "stay", why_it_stays(item), item.label)
        yield from mask_rows(self.descriptions[call].graph.masks, label)
        if self.choice.variants[call] is not self.plain.variants[call]:
            stays = {n.name for c in saved.candidates for n in c.nodes} | {s.name for s in saved.skipped}
            reason = recompute_reason(self.chain.step.compute_ms - self.plain.chain.step.compute_ms)
            yield from recomputed_rows(self._saved(self.plain, call).candidates, stays, lambda _: label, reason)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _by_name(choice: ChainChoice, call: int, schedule: Schedule) -> dict[str, bool]:
    return dict(zip(choice.candidates_of(call), choice.chain.offload_of(call, schedule.offload), strict=True))
