"""Pass on the segments: where the forward turns into the backward.

What the forward saves last, the backward reads first. Nothing could hide its copies: with a backward that follows at
once, the values would still be on their way down when they are wanted back. The turn is

- The candidates made last after the last layer (a language model's logits): as many bytes as one segment of a layer
  saves, or one storage more.
- Where those are few, the candidates that the last segment of the last layer makes: about as many bytes as are in
  flight then anyway.

While no other forward waits for its backward, the executor leaves the turn on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from fxoffload.analysis.segmentation import Segment, Segmentation
from fxoffload.passes.find_candidates import Candidate


@dataclass(frozen=True)
class Turn:
    """Attributes:
    names: of the candidates that belong to the turn.
    heavy_head: whether the ops after the layers save about as much as a segment of a layer, or more.
    """

    names: frozenset[str] = frozenset()
    heavy_head: bool = False


class FindTurn:
    """Find the turn of a forward graph. A graph whose segments are no layers has none."""

    name = "find_turn"

    def __init__(self, segmentation: Segmentation, candidates: Sequence[Candidate]) -> None:
        self.segments = segmentation.segments
        self.candidates = candidates

    def __call__(self, gm: fx.GraphModule) -> Turn:
        layers = [i for i, s in enumerate(self.segments) if s.layer]
        if len(layers) < 2:
            return Turn()
        last = layers[-1]
        head = self._made_in(self.segments[last + 1 :])
        largest = max(_bytes(self._made_in([self.segments[i]])) for i in layers)
        if 2 * _bytes(head) >= largest:
            order = {n: i for i, n in enumerate(gm.graph.nodes)}
            stays: list[Candidate] = []
            for candidate in sorted(head, key=lambda c: max(order[n] for n in c.nodes), reverse=True):
                if _bytes(stays) >= largest:
                    break
                stays.append(candidate)
            return Turn(frozenset(c.name for c in stays), heavy_head=True)
        return Turn(frozenset(c.name for c in self._made_in(self.segments[last:])))

    def _made_in(self, segments: Sequence[Segment]) -> list[Candidate]:
        made = {n for s in segments for n in s.outputs}
        return [c for c in self.candidates if made.issuperset(c.nodes)]


def _bytes(candidates: Sequence[Candidate]) -> int:
    return sum(c.nbytes or 0 for c in candidates)
