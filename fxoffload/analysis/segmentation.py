"""A graph cut into segments, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx


@dataclass(frozen=True)
class Segment:
    """A contiguous run of ops, compiled as one piece.

    Attributes:
        name: unique in its graph, a valid Python identifier (``layers_3``).
        layer: the layer label, or "" for ops before, between or after the layers.
        inputs: values from outside that the ops read, in order of first use.
        outputs: values of this segment that a later segment or the graph's output reads.
    """

    name: str
    layer: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Segmentation:
    """The segments of one graph, in order."""

    segments: tuple[Segment, ...]


Donations = dict[str, tuple[int, ...]]
