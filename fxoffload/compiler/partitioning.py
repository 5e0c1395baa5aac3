"""A partitioning: the joint graph partitioned one way, taken through all passes on a copy, and described as a step.

Nothing is compiled and nothing of the caller's graphs changes, so that a plan can compare several partitionings and
compile one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.estimate_costs import Rates, estimate_segment
from fxoffload.analysis.estimate_memory import dying_inputs, segment_temp_bytes
from fxoffload.analysis.segmentation import Donations, Segmentation
from fxoffload.analysis.values import Storages
from fxoffload.compiler.alike import Alike
from fxoffload.compiler.offload_candidates import offload_candidates_of, rank_offload_candidates
from fxoffload.compiler.pipeline import BACKWARD, FIND, FORWARD, BackwardState, ForwardState, without_proofs
from fxoffload.passes.runner import run_passes
from fxoffload.passes.tag_recompute import TagRecompute
from fxoffload.planner.steps import TrainingStep, from_graphs
from fxoffload.runtime import background
from fxoffload.step.offload_candidate import OffloadCandidate
from fxoffload.torch_private.graphs import copy_graph
from fxoffload.torch_private.symbolic_sizes import hints_at

Partition = Callable[[fx.GraphModule], tuple[fx.GraphModule, fx.GraphModule]]


class SegmentEstimates:
    """Estimates of segments, by their code: partitionings of one graph have most segments in common."""

    def __init__(self) -> None:
        self.ms: Alike[float] = Alike()
        self.temp_bytes: Alike[int] = Alike()


@dataclass(frozen=True)
class PartitionSettings:
    """What a partitioning has to know besides the graph; see ``ForwardState``. ``donates``: whether compiled segments
    may overwrite what only the backward reads. ``logs``: whether plain Inductor breaks the graph at a message.
    ``estimates``: with these ``rates``, made so far."""

    num_user_outputs: int
    static_inputs: frozenset[int]
    device: torch.device
    min_bytes: int
    rates: Rates
    donates: bool = True
    logs: bool = False
    estimates: SegmentEstimates = field(default_factory=SegmentEstimates, compare=False)


@dataclass(frozen=True)
class Partitioning:
    """One way to partition the joint graph.

    Attributes:
        forward: as partitioned; no pass has touched it.
        backward: as partitioned; no pass has touched it.
        forward_state: of the passes on a copy of ``forward``.
        backward_state: of the passes on a copy of ``backward``; None where the forward saves nothing that may move.
        step: None where ``backward_state`` is.
        offload_candidates: the executor's data, in the order of the outer graph's offload ops.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_state: ForwardState
    backward_state: BackwardState | None
    step: TrainingStep | None
    offload_candidates: tuple[OffloadCandidate, ...] = ()

    def step_at(self, sizes: Mapping[Any, int], settings: PartitionSettings) -> TrainingStep:
        """The step as it is with other sizes. ``sizes``: size symbol -> value.

        Raises:
            ValueError: the partitioning has no step.
        """
        if self.backward_state is None:
            raise ValueError("expected a partitioning whose forward saves something that may move")
        with hints_at(sizes):
            return step_of(
                self.forward_state, self.backward_state, self.offload_candidates, settings.rates, settings.estimates
            )


def make_partitioning(
    joint: fx.GraphModule, recompute: str | Mapping[str, Any], partition: Partition, settings: PartitionSettings
) -> Partitioning:
    """Partition a copy of ``joint`` under ``recompute`` (see ``TagRecompute``) and describe the result."""
    background.check()
    tagged = copy_graph(joint)
    TagRecompute(recompute)(tagged)
    forward, backward = partition(tagged)
    return describe(forward, backward, settings)


def describe(forward: fx.GraphModule, backward: fx.GraphModule, settings: PartitionSettings) -> Partitioning:
    """The partitioning of two graphs that are partitioned already."""
    down = ForwardState(
        copy_graph(forward),
        num_user_outputs=settings.num_user_outputs,
        static_inputs=settings.static_inputs,
        device=settings.device,
        min_bytes=settings.min_bytes,
        logs=settings.logs,
    )
    run_passes(FIND, down, "partitioning forward")
    if not down.saved.candidates:
        return Partitioning(forward, backward, down, None, None)
    run_passes(without_proofs(FORWARD), down, "partitioning forward")
    copied = copy_graph(backward)
    # The inputs that AOTAutograd will let the backward overwrite, as far as that can be told before it says so.
    own = own_values(down) if settings.donates else frozenset()
    up = BackwardState(
        copied,
        forward=down,
        copies=frozenset(n.name for c in down.saved.candidates for n in c.nodes),
        donatable=frozenset(n for n in copied.graph.find_nodes(op="placeholder") if n.name in own),
        device=settings.device,
    )
    run_passes(without_proofs(BACKWARD), up, "partitioning backward")
    _, offload_candidates = offload_candidates_of(down)
    rank_offload_candidates(offload_candidates, down.saved.candidates, up)
    step = step_of(down, up, offload_candidates, settings.rates, settings.estimates)
    return Partitioning(forward, backward, down, up, step, tuple(offload_candidates))


def own_values(down: ForwardState) -> frozenset[str]:
    """Names of values that a forward saves for its backward alone, in memory that the backward may overwrite."""
    storages = Storages(down.gm.graph.nodes)
    constants = {storages.root(n) for n in down.gm.graph.find_nodes(op="get_attr")}
    return frozenset(
        c.nodes[0].name
        for c in down.saved.candidates
        if not c.is_input and not c.is_shared and storages.root(c.nodes[0]) not in constants
    )


def step_of(
    down: ForwardState,
    up: BackwardState,
    offload_candidates: Sequence[OffloadCandidate],
    rates: Rates,
    estimates: SegmentEstimates | None = None,
) -> TrainingStep:
    """The step of two graphs that all passes have gone over. ``offload_candidates``: of the forward, ranked.
    ``estimates``: with these rates, made so far.

    Most training loops go on with the loss alone. So outputs count as released and, if one of them is a loss, the
    others count as having no gradients, until a step shows otherwise (``fxoffload.runtime.tracker.outputs.Outputs``).
    """
    assert down.outer is not None and up.outer is not None
    estimates = estimates or SegmentEstimates()
    found = from_graphs(
        down.outer,
        up.outer,
        offload_candidates,
        num_user_outputs=down.num_user_outputs,
        forward_ms=_segment_ms(down.segmentation, rates, estimates.ms),
        backward_ms=_segment_ms(up.segmentation, rates, estimates.ms),
        forward_temp_bytes=_temp_bytes(down.gm, down.segmentation, frozenset(), {}, estimates.temp_bytes),
        backward_temp_bytes=_temp_bytes(up.gm, up.segmentation, up.owned, up.donations, estimates.temp_bytes),
        min_bytes=max(down.min_bytes, 1),
        device=down.device,
    )
    in_head = frozenset(found.backward[0].reads) if down.logs else frozenset()
    return replace(found, holds_outputs=False, no_zeros=in_head & {s.name for s in found.storages if s.is_left_out})


def _segment_ms(segmentation: Segmentation, rates: Rates, alike: Alike[float]) -> dict[str, float]:
    return {s.name: alike.get(s, lambda s=s: estimate_segment(s.nodes, rates)) for s in segmentation.segments}


def _temp_bytes(
    gm: fx.GraphModule, segmentation: Segmentation, owned: frozenset[str], donations: Donations, alike: Alike[int]
) -> dict[str, int]:
    """``owned``: names of the placeholders that are the graph's to free; other placeholders outlive it."""
    dying = dying_inputs(gm, segmentation, owned)
    found = {}
    for segment in segmentation.segments:
        dies, donated = dying.get(segment.name, frozenset()), tuple(donations.get(segment.name, ()))
        marked = {*dies, *(n.name for n in segment.outputs)}
        work_out = partial(segment_temp_bytes, segment, dies, donated)
        found[segment.name] = alike.get(segment, work_out, marked=marked, also=donated)
    return found
