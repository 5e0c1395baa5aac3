"""The data that the plan of a chain of calls has about each of its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler.batch_sizes import BatchSizes, Sizes
from fxoffload.compiler.fit import Signature
from fxoffload.compiler.partitioning import Partitioning, PartitionSettings, step_of
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.compiler.planning import GraphPlanning
from fxoffload.compiler.variant_maker import PlannedVariant, VariantMaker, edges_at, with_all_inputs
from fxoffload.errors import UnsupportedError
from fxoffload.plan_report.plan import Plan
from fxoffload.planner.as_measured import as_measured
from fxoffload.planner.objective import Objective
from fxoffload.planner.plan import Basis, Decision
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.steps import TrainingStep, edges_of
from fxoffload.runtime.engine import Budgets
from fxoffload.step.edges import Edges
from fxoffload.step.offload_candidate import OffloadCandidate
from fxoffload.torch_private.partitioner import is_rng_state
from fxoffload.torch_private.pytree import tree_leaves
from fxoffload.torch_private.symbolic_sizes import hints_at, symbols_of


@dataclass(frozen=True)
class ChainSettings:
    """The settings that the graphs of one chain have to share.

    Attributes:
        profile: name of the profile, None for the device's.
        calibrates: whether the plan is remade with measured times.
        paces: whether forwards may be paced (``fxoffload.compiler.pacing``).
        records: whether the allocator may be asked to record its events.
    """

    objective: Objective
    budgets: Budgets
    profile: str | None
    device: torch.device
    calibrates: bool = True
    paces: bool = True
    records: bool = True


@dataclass(frozen=True)
class SizedGraph:
    """A graph whose sizes vary from call to call."""

    sizes: BatchSizes
    forward: ForwardState
    backward: BackwardState
    offload_candidates: tuple[OffloadCandidate, ...]

    def step_at(self, sizes: Sizes, rates: ProfileRates) -> TrainingStep:
        """One forward and backward of calls of these sizes."""
        with hints_at(self.sizes.named(sizes)):
            return step_of(self.forward, self.backward, self.offload_candidates, rates)


@dataclass(frozen=True)
class GraphDescription:
    """The data that the plan of a chain has about one of its graphs.

    Attributes:
        step: of one forward and backward of it.
        rates: that its times were estimated with.
        settings: that the graphs of its chain share.
        edges: of the graph, in the names of ``step``.
        variant_maker: makes variants of the graph that recompute more; None: there are none.
        sized: the graph, where its sizes vary; None: they do not.
        sizes: that ``step`` is of; empty: those that the graph was compiled for.
        warned: kinds of warnings that plans which begin here have given.
        plain: of a graph with a plan of its own: one forward and backward as plain Inductor has it, and its edges.
        checkpointed: the same under activation checkpointing, where its own plan replaces that.
        recomputed: what a plan of its own recomputes, whatever the plan of the chain moves.
        basis: the source of its times (``Plan.basis``).
        estimate: the step before anything of it was measured; None: nothing was.
    """

    graph: CompiledGraph
    step: TrainingStep
    rates: ProfileRates
    settings: ChainSettings
    edges: Edges
    variant_maker: VariantMaker | None = None
    sized: SizedGraph | None = None
    sizes: Sizes = ()
    warned: set[str] = field(default_factory=set, compare=False)
    plain: tuple[TrainingStep, Edges] | None = None
    checkpointed: tuple[TrainingStep, Edges] | None = None
    recomputed: tuple[Decision, ...] = ()
    basis: Basis = "estimated"
    estimate: TrainingStep | None = None

    @property
    def is_checkpointed(self) -> bool:
        """Whether a plan replaces activation checkpointing in it."""
        return self.may_save_more or self.checkpointed is not None

    @property
    def may_save_more(self) -> bool:
        """Whether the graph as compiled obeys activation checkpointing, and variants of it need not."""
        return self.variant_maker is not None and self.variant_maker.is_checkpointed

    def at(self, sizes: Sizes) -> GraphDescription:
        """The same for calls of these sizes; as it is where none vary."""
        if self.sized is None or not sizes:
            return self
        return replace(self, step=self.sized.step_at(sizes, self.rates), sizes=sizes)

    def measured(self, step: TrainingStep, basis: Basis) -> GraphDescription:
        """The same with measurements in the place of estimates; other forms of the graph are corrected by them.

        Args:
            step: as measured.
            basis: the source of the measurements.
        """
        estimate = self.estimate or self.step
        others = {
            name: None if form is None else (as_measured(form[0], self.step, step), form[1])
            for name, form in (("plain", self.plain), ("checkpointed", self.checkpointed))
        }
        return replace(self, step=step, estimate=estimate, basis=basis, **others)

    def step_of(self, variant: PlannedVariant) -> TrainingStep:
        """Of a variant of the graph, with the sizes that ``step`` has."""
        if self.variant_maker is None or self.sized is None or not self.sizes:
            return variant.step if self.estimate is None else as_measured(variant.step, self.estimate, self.step)
        return self.variant_maker.step_at(variant, self.sized.sizes.named(self.sizes))


@dataclass(frozen=True)
class OtherForm:
    """A graph with a plan of its own in another form: as plain Inductor or activation checkpointing would have it."""

    partitioning: Partitioning
    settings: PartitionSettings

    def description(self, forward: ForwardState, backward: BackwardState) -> tuple[TrainingStep, Edges]:
        """One forward and backward of it, and its edges by the positions of the graph that is compiled."""
        assert self.partitioning.step is not None
        first = Signature.of(forward.gm, backward.gm, self.settings.num_user_outputs)
        return self.partitioning.step, edges_at(first, self.partitioning, self.settings)


def other_forms(planned: GraphPlanning, settings: PartitionSettings) -> dict[str, OtherForm]:
    """The forms of a graph that its own plan replaces, by their names in ``GraphDescription``.

    Plain Inductor's is none where the plan recomputes the same. Activation checkpointing's always is: it says what the
    step is compared with.
    """
    base = planned.base
    is_plain = base is None or base.step == planned.partitioning.step
    forms = {"plain": None if is_plain else base, "checkpointed": planned.checkpointed}
    return {name: OtherForm(form, settings) for name, form in forms.items() if form is not None and form.step}


def recomputed_by(plan: Plan) -> tuple[Decision, ...]:
    """The decisions of a graph's own plan to recompute: they are compiled."""
    return tuple(decision for decision in plan.decisions if decision.action == "recompute")


def describe_graph(
    graph: CompiledGraph,
    forward: ForwardState,
    backward: BackwardState,
    offload_candidates: Sequence[OffloadCandidate],
    settings: ChainSettings,
    rates: ProfileRates,
    variant_maker: VariantMaker | None = None,
) -> tuple[GraphDescription, Edges] | None:
    """Two compiled graphs as data for a plan; None where nothing that is saved may move.

    ``settings``: of the chain. ``rates``: of the device. ``variant_maker``: makes variants of them; the edges then
    name the inputs that only a variant may save too.

    Raises:
        UnsupportedError: sizes vary from call to call and are not told as arguments.
    """
    sized = None
    if is_dynamic(forward, backward):
        sizes = _sizes_of(forward, backward)
        if sizes is None:
            raise UnsupportedError("sizes vary from call to call, and not all of them are arguments of the graph")
        sized = SizedGraph(sizes, forward, backward, tuple(offload_candidates))
    assert forward.outer is not None and backward.outer is not None
    step = step_of(forward, backward, offload_candidates, rates)
    if not step.takes or not step.forward or not step.backward:
        return None
    edges = edges_of(
        forward.outer,
        backward.outer,
        offload_candidates,
        num_user_outputs=forward.num_user_outputs,
        min_bytes=max(forward.min_bytes, 1),
        device=forward.device,
    )
    if variant_maker is not None:
        edges = with_all_inputs(edges, forward)
    basis: Basis = "operators" if rates.op_times else "estimated"
    return GraphDescription(graph, step, rates, settings, edges, variant_maker, sized, basis=basis), edges


def _sizes_of(forward: ForwardState, backward: BackwardState) -> BatchSizes | None:
    """The sizes that vary; None where the arguments of the forward do not tell all of them."""
    sizes = BatchSizes.of(forward.gm)
    if sizes is None or not _symbols(forward, backward) <= set(sizes.symbols):
        return None
    return sizes


def is_dynamic(forward: ForwardState, backward: BackwardState | None = None) -> bool:
    """Whether sizes vary from call to call."""
    return bool(_symbols(forward, backward))


def _symbols(forward: ForwardState, backward: BackwardState | None) -> set[Any]:
    """The symbols that sizes of the two graphs are made of, where they vary. The states of random generators, which the
    recomputation of a random op or an attention reads, have a size with a symbol that stands for nothing."""
    nodes = [n for state in (forward, backward) if state is not None for n in state.gm.graph.nodes]
    found = {s for n in nodes for value in tree_leaves(n.meta.get("val")) for s in symbols_of(value)}
    return found - {s for n in nodes if is_rng_state(n) for s in symbols_of(n.meta.get("val"))}


def descriptions_at(descriptions: Sequence[GraphDescription], sizes: Sequence[Sizes]) -> list[GraphDescription]:
    """The descriptions of calls of these sizes (empty: none vary). Calls that are alike share one."""
    found: dict[tuple[int, Sizes], GraphDescription] = {}
    each = list(zip(descriptions, sizes or [()] * len(descriptions), strict=True))
    for description, size in each:
        if (id(description), size) not in found:
            found[id(description), size] = description.at(size)
    return [found[id(description), size] for description, size in each]
