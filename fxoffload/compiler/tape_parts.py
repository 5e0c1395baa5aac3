"""The data that the plan of a chain of calls has about each of its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fxoffload._torch_compat import is_rng_state
from fxoffload._torch_sizes import hints_at, symbols_of
from fxoffload.compiled_graph import CompiledGraph
from fxoffload.compiler.batch_sizes import BatchSizes, Sizes
from fxoffload.compiler.draft import Draft, DraftSettings, step_of
from fxoffload.compiler.fit import Signature
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.compiler.recipe import Recipe, VariantDraft, edges_at, with_all_inputs
from fxoffload.compiler.replan import as_measured
from fxoffload.errors import UnsupportedError
from fxoffload.planner.goal import PlanGoal
from fxoffload.planner.plan import Basis
from fxoffload.planner.rates import ProfileRates
from fxoffload.planner.steps import TrainingStep, edges_of
from fxoffload.runtime.engine import Budgets
from fxoffload.runtime.outer_program import Movable
from fxoffload.runtime.steps.held import Edges


@dataclass(frozen=True)
class TapeGoal:
    """The settings that the graphs of one chain have to share.

    Attributes:
        goal: of the plan.
        budgets: of the options.
        profile: name of the profile, None for the device's.
        device: of the graphs.
        calibrates: whether the plan is remade with measured times.
        paces: whether forwards may be paced (``fxoffload.planner.pacing``).
        records: whether the allocator may be asked to record its events.
    """

    goal: PlanGoal
    budgets: Budgets
    profile: str | None
    device: torch.device
    calibrates: bool = True
    paces: bool = True
    records: bool = True


@dataclass(frozen=True)
class SizedGraph:
    """A graph whose sizes vary from call to call.

    Attributes:
        sizes: that vary.
        forward: as compiled.
        backward: as compiled.
        movables: of the forward.
    """

    sizes: BatchSizes
    forward: ForwardState
    backward: BackwardState
    movables: tuple[Movable, ...]

    def step_at(self, sizes: Sizes, rates: ProfileRates) -> TrainingStep:
        """One forward and backward of calls of these sizes."""
        with hints_at(self.sizes.named(sizes)):
            return step_of(self.forward, self.backward, self.movables, rates)


@dataclass(frozen=True)
class Part:
    """The data that the plan of a chain has about one of its graphs.

    Attributes:
        graph: as compiled.
        step: of one forward and backward of it.
        rates: that its times were estimated with.
        goal: of the chain.
        edges: of the graph, in the names of ``step``.
        recipe: makes variants of the graph that recompute more; None: there are none.
        sized: the graph, where its sizes vary; None: they do not.
        sizes: that ``step`` is of; empty: those that the graph was compiled for.
        warned: kinds of warnings that plans which begin here have given.
        checkpointed: of a graph with a plan of its own, which replaces activation checkpointing: one forward and
            backward under that, and its edges.
        basis: the source of its times (``Plan.basis``).
        estimate: the step before its segments ran on made-up inputs; None: they did not.
    """

    graph: CompiledGraph
    step: TrainingStep
    rates: ProfileRates
    goal: TapeGoal
    edges: Edges
    recipe: Recipe | None = None
    sized: SizedGraph | None = None
    sizes: Sizes = ()
    warned: set[str] = field(default_factory=set, compare=False)
    checkpointed: tuple[TrainingStep, Edges] | None = None
    basis: Basis = "estimated"
    estimate: TrainingStep | None = None

    @property
    def is_checkpointed(self) -> bool:
        """Whether a plan replaces activation checkpointing in it."""
        return self.may_save_more or self.checkpointed is not None

    @property
    def may_save_more(self) -> bool:
        """Whether the graph as compiled obeys activation checkpointing, and variants of it need not."""
        return self.recipe is not None and self.recipe.is_checkpointed

    def at(self, sizes: Sizes) -> Part:
        """The same for calls of these sizes; as it is where none vary."""
        if self.sized is None or not sizes:
            return self
        return replace(self, step=self.sized.step_at(sizes, self.rates), sizes=sizes)

    def step_of(self, variant: VariantDraft) -> TrainingStep:
        """Of a variant of the graph, with the sizes that ``step`` has."""
        if self.recipe is None or self.sized is None or not self.sizes:
            return variant.step if self.estimate is None else as_measured(variant.step, self.estimate, self.step)
        return self.recipe.step_at(variant, self.sized.sizes.named(self.sizes))


@dataclass(frozen=True)
class Checkpointed:
    """A graph as activation checkpointing would have it, where its own plan replaces that."""

    draft: Draft
    settings: DraftSettings

    def part(self, forward: ForwardState, backward: BackwardState) -> tuple[TrainingStep, Edges]:
        """One forward and backward of it, and its edges by the positions of the graph that is compiled."""
        assert self.draft.step is not None
        first = Signature.of(forward.gm, backward.gm, self.settings.num_user_outputs)
        return self.draft.step, edges_at(first, self.draft, self.settings)


def describe_part(
    graph: CompiledGraph,
    forward: ForwardState,
    backward: BackwardState,
    movables: Sequence[Movable],
    goal: TapeGoal,
    rates: ProfileRates,
    recipe: Recipe | None = None,
) -> tuple[Part, Edges] | None:
    """Two compiled graphs as data for a plan; None where nothing that is saved may move.

    ``rates``: of the device. ``recipe``: of variants of them; the edges then name the inputs that only a variant may
    save too.

    Raises:
        UnsupportedError: sizes vary from call to call and are not told as arguments.
    """
    sized = None
    if is_dynamic(forward, backward):
        sizes = _sizes_of(forward, backward)
        if sizes is None:
            raise UnsupportedError("sizes vary from call to call, and not all of them are arguments of the graph")
        sized = SizedGraph(sizes, forward, backward, tuple(movables))
    assert forward.outer is not None and backward.outer is not None
    step = step_of(forward, backward, movables, rates)
    if not step.takes or not step.forward or not step.backward:
        return None
    edges = edges_of(
        forward.outer,
        backward.outer,
        movables,
        num_user_outputs=forward.num_user_outputs,
        min_bytes=max(forward.min_bytes, 1),
        device=forward.device,
    )
    if recipe is not None:
        edges = with_all_inputs(edges, forward)
    basis: Basis = "operators" if rates.op_times else "estimated"
    return Part(graph, step, rates, goal, edges, recipe, sized, basis=basis), edges


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
    """What sizes of the two graphs are made of, where they vary. Of the states of random generators, which the
    recomputation of a random op or an attention reads, the size has a symbol that stands for nothing."""
    nodes = [n for state in (forward, backward) if state is not None for n in state.gm.graph.nodes]
    found = {s for n in nodes for value in tree_leaves(n.meta.get("val")) for s in symbols_of(value)}
    return found - {s for n in nodes if is_rng_state(n) for s in symbols_of(n.meta.get("val"))}


def parts_at(parts: Sequence[Part], sizes: Sequence[Sizes]) -> list[Part]:
    """The parts of calls of these sizes (empty: none vary). Calls that are alike have the same part."""
    found: dict[tuple[int, Sizes], Part] = {}
    each = list(zip(parts, sizes or [()] * len(parts), strict=True))
    for part, size in each:
        if (id(part), size) not in found:
            found[id(part), size] = part.at(size)
    return [found[id(part), size] for part, size in each]
