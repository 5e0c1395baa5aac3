"""Re-selects each call's recompute variant from measured times.

Before a chain runs, its times are estimates, and copies are as fast as the profile says. A slower link leaves copies
exposed that a call which recomputes more would not make. Slower graphs hide more of them, so that fewer calls need to
recompute. A larger working set takes more copies, or leaves no choice of what moves within the budget.

Only compiled variants are candidates, so that no step waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fxoffload.compiler.measured_chain import MeasuredChain, Times, measured_calls, ratios_of, scaled
from fxoffload.compiler.recipe import VariantDraft
from fxoffload.compiler.replan import measured_step
from fxoffload.compiler.tape_recompute import (
    CallPart,
    TapeAim,
    TapeOption,
    TapeRecompute,
    Variants,
    no_faster_forward,
    saved_bytes,
)
from fxoffload.planner.chain import BESIDE_NOTHING, Chain, with_turn
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.schedule import Schedule, Scheduler
from fxoffload.planner.steps import TrainingStep
from fxoffload.runtime.clocks.chain_clock import lies_between
from fxoffload.runtime.clocks.segment_readings import Phase

if TYPE_CHECKING:
    from fxoffload.compiler.tape_plan import TapePlanning

# Most of the chains found that are laid out together with the segment at the turn.
_FINISHED = 3


@dataclass(frozen=True)
class Again:
    """The result of choosing variants from measured times.

    Attributes:
        variants: per call, its variant; None: the graph as compiled.
        schedule: what moves when; of the chain with a segment for the turn.
        now_ms: a step's time with the variants that ran, by the same measurements; infinite where that misses the aim.
    """

    variants: Variants
    schedule: Schedule
    now_ms: float

    @property
    def ms(self) -> float:
        """Time of a step."""
        return self.schedule.simulation.step_ms


def choose_again(
    planning: TapePlanning, found: MeasuredChain, rates: ProfileRates, aim: TapeAim, host_bytes: int | None
) -> Again | None:
    """The best chain of compiled variants for ``aim``, from measurements. None: there is none, or no choice.

    Args:
        planning: of the chain, with the variants that it ran.
        found: measurements of that chain.
        rates: of the machine, with the link as it was found.
        aim: of the plan, in measured time.
        host_bytes: most bytes on the host.
    """
    ways = MeasuredRecompute(planning, found, rates, host_bytes)
    options = [o for o in ways.search(aim) if o.schedule is not None]
    options = sorted(options, key=aim.key)[:_FINISHED]
    now = ways.with_variants(planning.option.variants)
    # Without the turn they may look better or worse than they are, so these two are always among them.
    every = {option.variants: option for option in (*options, ways.as_compiled(), now)}
    finished = {v: aim.schedule(ways.scheduler_with_turn(option)) for v, option in every.items()}
    scheduled = {v: schedule for v, schedule in finished.items() if schedule is not None}
    if not scheduled:
        return None
    best = min(scheduled, key=lambda v: aim.key_of(scheduled[v]))
    mine = scheduled.get(now.variants)
    return Again(best, scheduled[best], float("inf") if mine is None else mine.simulation.step_ms)


class MeasuredRecompute(TapeRecompute):
    """The options of a chain that has run: of the graphs as compiled and the variants that are compiled, in measured
    time. The estimate of one that no call has run is scaled as measurements of the others scale theirs."""

    def __init__(
        self, planning: TapePlanning, found: MeasuredChain, rates: ProfileRates, host_bytes: int | None
    ) -> None:
        ways, option = planning.ways, planning.option
        graphs = [id(call.step) for call in ways.calls]  # calls of one graph share its step
        ran = measured_calls(option.steps, list(zip(graphs, option.variants, strict=True)), found)
        self._ratios = ratios_of(option.chain, found.ms)
        self._ran = ran
        compiled = {
            graph: ran.get((graph, None)) or scaled(call.step, self._ratios)
            for graph, call in zip(graphs, ways.calls, strict=True)
        }
        self._graph_of = {id(step): graph for graph, step in compiled.items()}
        self._estimates = {id(compiled[id(call.step)]): call.step for call in ways.calls}
        calls = [replace(call, step=compiled[graph]) for graph, call in zip(graphs, ways.calls, strict=True)]
        super().__init__(calls, ways.held, planning.scheduler_for(rates, host_bytes), rates, host_bytes)
        self._gaps = _between(found.ms)
        self.beside = found.beside

    def scheduler_with_turn(self, option: TapeOption) -> Scheduler:
        """Of the step with the code between the last forward and the first backward."""
        chain = option.chain.with_beside(BESIDE_NOTHING)
        chain = chain.with_step(measured_step(with_turn(chain.step), self._gaps)).with_beside(self.beside)
        return self._scheduler(chain.step)

    def _find_drafts(self, call: CallPart) -> list[VariantDraft]:
        return [] if call.recipe is None else sorted(call.recipe.compiled_drafts(), key=lambda d: -saved_bytes(d.step))

    def _of_variant(self, call: CallPart, variant: VariantDraft) -> TrainingStep:
        key = (id(call.step), variant)
        if key not in self._of_variants:
            ran = self._ran.get((self._graph_of[id(call.step)], variant))
            estimate = no_faster_forward(call.step_of(variant), self._estimates[id(call.step)])
            self._of_variants[key] = ran or scaled(estimate, self._ratios)
        return self._of_variants[key]

    def _layout(self, variants: Sequence[VariantDraft | None]) -> Chain:
        chain = super()._layout(variants)
        return chain.with_step(measured_step(chain.step, self._gaps))


def _between(ms: Times) -> Mapping[Phase, Mapping[str, float]]:
    """Of the code between calls alone."""
    return {phase: {name: t for name, t in times.items() if lies_between(name)} for phase, times in ms.items()}
