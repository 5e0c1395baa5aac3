"""Re-selects each call's recompute variant from measured times.

Before a chain runs, its times are estimates, and copies are as fast as the profile says. A slower link leaves copies
exposed that a call which recomputes more would not make. Slower graphs hide more of them, so that fewer calls need to
recompute. A larger working set takes more copies, or leaves no choice of what moves within the budget.

Only compiled variants are candidates, so that no step waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fxoffload.compiler.chain_planning import ChainPlanning
from fxoffload.compiler.chain_search import (
    CallDescription,
    CallVariants,
    ChainChoice,
    ChainObjective,
    ChainSearch,
    no_faster_forward,
    saved_bytes,
)
from fxoffload.compiler.measured_chain import MeasuredChain, Times, measured_calls, ratios_of, scaled
from fxoffload.compiler.variant_maker import PlannedVariant
from fxoffload.planner.as_measured import measured_step
from fxoffload.planner.chain import NO_EXTRA_MEMORY, Chain, with_turn
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.steps import TrainingStep
from fxoffload.step.readings import Phase
from fxoffload.step.segment_names import lies_between

# Most of the chains found that are laid out together with the segment at the turn.
_FINISHED = 3


@dataclass(frozen=True)
class Reselected:
    """The result of choosing variants from measured times.

    Attributes:
        variants: per call, its variant; None: the graph as compiled.
        schedule: what moves when; of the chain with a segment for the turn.
        now_ms: a step's time with the variants that ran, by the same measurements; infinite where that misses the aim.
    """

    variants: CallVariants
    schedule: Schedule
    now_ms: float

    @property
    def ms(self) -> float:
        """Time of a step."""
        return self.schedule.simulation.step_ms


def reselect_variants(
    planning: ChainPlanning, found: MeasuredChain, rates: ProfileRates, aim: ChainObjective, host_bytes: int | None
) -> Reselected | None:
    """The best chain of compiled variants for ``aim``, from measurements. None: there is none, or no choice.

    Args:
        planning: of the chain, with the variants that it ran.
        found: measurements of that chain.
        rates: of the machine, with the link as it was found.
        aim: of the plan, in measured time.
    """
    search = MeasuredRecompute(planning, found, rates, host_bytes)
    choices = [c for c in search.search(aim) if c.schedule is not None]
    choices = sorted(choices, key=aim.key)[:_FINISHED]
    now = search.with_variants(planning.choice.variants)
    # Without the turn they may look better or worse than they are, so these two are always among them.
    every = {choice.variants: choice for choice in (*choices, search.as_compiled(), now)}
    finished = {v: aim.schedule(search.scheduler_with_turn(choice)) for v, choice in every.items()}
    scheduled = {v: schedule for v, schedule in finished.items() if schedule is not None}
    if not scheduled:
        return None
    best = min(scheduled, key=lambda v: aim.key_of(scheduled[v]))
    mine = scheduled.get(now.variants)
    return Reselected(best, scheduled[best], float("inf") if mine is None else mine.simulation.step_ms)


class MeasuredRecompute(ChainSearch):
    """The choices for a chain that has run, among the graphs as compiled and their compiled variants, in measured time.
    The estimate of a variant that no call has run is scaled as measurements of the others scale theirs."""

    def __init__(
        self, planning: ChainPlanning, found: MeasuredChain, rates: ProfileRates, host_bytes: int | None
    ) -> None:
        search, choice = planning.chain_search, planning.choice
        graphs = [id(call.step) for call in search.calls]  # calls of one graph share its step
        ran = measured_calls(choice.steps, list(zip(graphs, choice.variants, strict=True)), found)
        self._ratios = ratios_of(choice.chain, found.ms)
        self._ran = ran
        compiled = {
            graph: ran.get((graph, None)) or scaled(call.step, self._ratios)
            for graph, call in zip(graphs, search.calls, strict=True)
        }
        self._graph_of = {id(step): graph for graph, step in compiled.items()}
        self._estimates = {id(compiled[id(call.step)]): call.step for call in search.calls}
        calls = [replace(call, step=compiled[graph]) for graph, call in zip(graphs, search.calls, strict=True)]
        super().__init__(calls, search.edge_memory, planning.scheduler_for(rates, host_bytes), rates, host_bytes)
        self._gaps = _between(found.ms)
        self.extra_memory = found.extra_memory

    def scheduler_with_turn(self, choice: ChainChoice) -> Scheduler:
        """Of the step with the code between the last forward and the first backward."""
        chain = choice.chain.with_extra_memory(NO_EXTRA_MEMORY)
        chain = chain.with_step(measured_step(with_turn(chain.step), self._gaps)).with_extra_memory(self.extra_memory)
        return self._scheduler(chain.step)

    def _find_variants(self, call: CallDescription) -> list[PlannedVariant]:
        return (
            []
            if call.variant_maker is None
            else sorted(call.variant_maker.compiled_variants(), key=lambda v: -saved_bytes(v.step))
        )

    def _of_variant(self, call: CallDescription, variant: PlannedVariant) -> TrainingStep:
        key = (id(call.step), variant)
        if key not in self._of_variants:
            ran = self._ran.get((self._graph_of[id(call.step)], variant))
            estimate = no_faster_forward(call.step_of(variant), self._estimates[id(call.step)])
            self._of_variants[key] = ran or scaled(estimate, self._ratios)
        return self._of_variants[key]

    def _layout(self, variants: Sequence[PlannedVariant | None]) -> Chain:
        chain = super()._layout(variants)
        return chain.with_step(measured_step(chain.step, self._gaps))


def _between(ms: Times) -> Mapping[Phase, Mapping[str, float]]:
    """Of the code between calls alone."""
    return {phase: {name: t for name, t in times.items() if lies_between(name)} for phase, times in ms.items()}
