"""The executor's data about each storage that may leave, computed from the segments of both graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.fx as fx

from fxoffload.analysis.labels import CANDIDATES_KEY
from fxoffload.analysis.segmentation import Segment, Segmentation
from fxoffload.compiler.pipeline import BackwardState, ForwardState
from fxoffload.passes.find_candidates import Candidate
from fxoffload.step.offload_candidate import OffloadCandidate


def offload_candidates_of(state: ForwardState) -> tuple[list[Candidate], list[OffloadCandidate]]:
    """Candidates in the order of the outer graph's offload ops, and the executor's data of each; not ranked yet."""
    assert state.outer is not None
    ordered = [c for node in state.outer.graph.nodes for c in node.meta.get(CANDIDATES_KEY, ())]
    paces = _values_of_layers(state.segmentation, lambda s: s.outputs)
    offload_candidates = [
        OffloadCandidate(
            c.name,
            len(c.nodes),
            c.is_input,
            paces_forward=any(n.name in paces for n in c.nodes),
        )
        for c in ordered
    ]
    return ordered, offload_candidates


def rank_offload_candidates(
    offload_candidates: Sequence[OffloadCandidate], candidates: Sequence[Candidate], state: BackwardState
) -> None:
    """Tell the forward in which order its storages will be needed."""
    order: dict[str, int] = {}
    for i, segment in enumerate(state.segmentation.segments):
        for value in segment.inputs:
            order.setdefault(value.name, i)
    paces = _values_of_layers(state.segmentation, lambda s: s.inputs)
    read = {n.name for n in state.gm.graph.find_nodes(op="placeholder") if n.users}
    names = {c.name: [n.name for n in c.nodes] for c in candidates}
    last = len(state.segmentation.segments)
    for candidate in offload_candidates:
        mine = names[candidate.name]
        candidate.unread = not candidate.is_input and read.isdisjoint(mine)
        candidate.paces_backward = not paces.isdisjoint(mine)
        candidate.rank = min((order[n] for n in mine if n in order), default=last)


def _values_of_layers(segmentation: Segmentation, values: Callable[[Segment], Sequence[fx.Node]]) -> frozenset[str]:
    """Names of values that layer segments make (or read); of all segments where none is a layer."""
    layers = [s for s in segmentation.segments if s.layer] or segmentation.segments
    return frozenset(n.name for s in layers for n in values(s))
