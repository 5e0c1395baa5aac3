"""Makes variants of a graph that is compiled already: the same forward and backward with another recompute choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxoffload.compiler.draft import Draft
from fxoffload.passes.find_candidates import SavedValues
from fxoffload.passes.find_frontier import RecomputePoint
from fxoffload.planner.steps import TrainingStep
from fxoffload.runtime.calls import Edges

# Of one graph, besides the one that was compiled first.
MOST_VARIANTS = 2

Points = Mapping[str, RecomputePoint]  # layer -> point


@dataclass(frozen=True, eq=False)
class VariantDraft:
    """A variant that is not compiled.

    Attributes:
        draft: its graphs.
        step: of one forward and backward of it.
        edges: of its graphs, by the positions of the graph that was compiled first.
        saved: what its forward saves; ``Choice.offload`` has one bool for each candidate.
    """

    draft: Draft
    step: TrainingStep
    edges: Edges
    saved: SavedValues


class Recipe:
    """Everything that is kept of a graph to make variants of it."""

    def points(self) -> tuple[Points, ...]:
        """The recompute choices, from least to most recomputation."""
        raise NotImplementedError

    def draft(self, points: Points) -> VariantDraft | None:
        """The variant that realises a choice; None where it cannot stand in for the graph that was compiled first."""
        raise NotImplementedError

    def add(self, draft: VariantDraft) -> int:
        """Reserve the next number for a draft; the same draft has the same number again.

        Raises:
            RuntimeError: there are as many variants as there may be.
        """
        raise NotImplementedError

    def compile(self, number: int) -> None:
        """Compile what was reserved, unless it is compiled. Whatever it raises, nothing but the number is lost."""
        raise NotImplementedError

    def is_compiled(self, number: int) -> bool:
        """Whether calls may run it."""
        raise NotImplementedError
