"""Pass on the candidates: keep or offload, by policy alone. Where there is a plan, it decides instead.

==============  ========================================================================================
``keep_all``    Everything stays on the device.
``offload_all`` Every candidate moves.
``auto``        Every candidate moves, except what the last layer of a graph, and the ops after it, saved. The
                backward begins with those: no compute would hide their reload, and at the peak they are on the
                device in any case.
==============  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from fxoffload.analysis.segmentation import Segmentation
from fxoffload.passes.find_candidates import Candidate

POLICIES = ("auto", "offload_all", "keep_all")


class ChooseActions:
    """One bool per candidate, in order: True to offload."""

    def __init__(self, segmentation: Segmentation, candidates: Sequence[Candidate]) -> None:
        self.segmentation = segmentation
        self.candidates = candidates

    def __call__(self, policy: str) -> tuple[bool, ...]:
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}; the policies are {', '.join(POLICIES)}")
        if policy == "auto":
            tail = self._tail()
            return tuple(not any(n in tail for n in c.nodes) for c in self.candidates)
        return (policy == "offload_all",) * len(self.candidates)

    def _tail(self) -> set[object]:
        segments = self.segmentation.segments
        layers = [i for i, s in enumerate(segments) if s.layer]
        if len(layers) < 2:
            return set()
        return {n for s in segments[layers[-1] :] for n in s.outputs}
