"""Estimates of a joint graph that its own plan and all of its variants share: of what layers may recompute, and of
segments."""

from __future__ import annotations

import torch.fx as fx

from fxoffload.analysis.find_frontier import FindFrontier, LayerClass
from fxoffload.compiler.batch_sizes import BatchSizes
from fxoffload.compiler.partitioning import PartitionSettings, SegmentEstimates
from fxoffload.planner.rates import ProfileRates


class GraphEstimates:
    """Of one joint graph and copies of it."""

    def __init__(self) -> None:
        self._classes: tuple[object, tuple[LayerClass, ...]] | None = None
        self._segments: tuple[object, SegmentEstimates] | None = None

    def layer_classes(
        self, joint: fx.GraphModule, settings: PartitionSettings, rates: ProfileRates
    ) -> tuple[LayerClass, ...]:
        """The layers of ``joint``, by class. They are found again where times of operators or sizes are others.

        ``rates``: those of ``settings``.
        """
        sizes = BatchSizes.of(joint)
        key = (_times(rates), settings.num_user_outputs, settings.static_inputs, sizes and sizes.hints)
        if self._classes is None or self._classes[0] != key:
            find = FindFrontier(
                rates, num_forward_outputs=settings.num_user_outputs, static_inputs=settings.static_inputs
            )
            self._classes = key, find(joint)
        return self._classes[1]

    def segments(self, rates: ProfileRates) -> SegmentEstimates:
        """Estimates with ``rates``, to which partitionings add theirs."""
        key = _times(rates)
        if self._segments is None or self._segments[0] != key:
            self._segments = key, SegmentEstimates()
        return self._segments[1]


def _times(rates: ProfileRates) -> object:
    return rates.profile, dict(rates.op_times)
