"""Facts about a step that ran: plans, compiled graphs, counters. Plain data, which advice is a function of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxoffload.compiled_graph import CompiledGraph, Returned, graphs, plain_graphs
from fxoffload.counters import Stats
from fxoffload.plan_report.plan import Plan
from fxoffload.plan_report.registry import plans
from fxoffload.plan_report.table import label_ranges
from fxoffload.report import stats


@dataclass(frozen=True)
class GraphFacts:
    """One compiled graph, or several that are alike in all of this.

    Attributes:
        layers: its layers as ranges, or "" where it has none.
        plan: number of its own plan; None: it has none.
        keeps: why it keeps everything; "" where it does not.
        returns: what its forward hands to the caller.
        holds_outputs: whether the caller still holds that when the backward has ended; None: unknown.
        has_backward: whether a backward of it has run.
    """

    layers: str
    plan: int | None
    keeps: str = ""
    returns: tuple[Returned, ...] = ()
    holds_outputs: bool | None = None
    has_backward: bool = True
    count: int = 1

    @staticmethod
    def of(graph: CompiledGraph) -> GraphFacts:
        """Those of a compiled graph, now."""
        box = graph.plan_box
        return GraphFacts(
            label_ranges(graph.layer_names),
            None if box is None else box.index,
            _why_it_keeps(graph),
            graph.returns,
            graph.outputs.are_held,
            graph.num_backwards > 0,
        )

    @property
    def logits_bytes(self) -> int:
        """Bytes of the outputs without the loss; 0 where there is no loss."""
        has_loss = any(r.is_loss for r in self.returns)
        return sum(r.nbytes for r in self.returns if not r.is_loss) if has_loss else 0


def _why_it_keeps(graph: CompiledGraph) -> str:
    if graph.keeps_everything:
        return "its backward fell back to plain Inductor (on_error='fallback')"
    if graph.policy == "keep_all":
        return "its policy is keep_all"
    return ""


@dataclass(frozen=True)
class StepFacts:
    """Everything that ``explain`` reads.

    Attributes:
        plans: as ``fxoffload.plans()``.
        graphs: that fxoffload compiled; alike ones together.
        plain: how many graphs are plain Inductor's and have no plan that says why, by reason.
        stats: as ``fxoffload.stats()``.
    """

    plans: tuple[Plan, ...]
    graphs: tuple[GraphFacts, ...] = ()
    plain: Mapping[str, int] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)

    @staticmethod
    def now() -> StepFacts:
        """Of this process. Waits for copies that are still running."""
        counts: dict[GraphFacts, int] = {}
        for graph in graphs():
            found = GraphFacts.of(graph)
            counts[found] = counts.get(found, 0) + 1
        alike = (GraphFacts(**{**vars(found), "count": count}) for found, count in counts.items())
        return StepFacts(tuple(plans()), tuple(alike), plain_graphs(), stats())
