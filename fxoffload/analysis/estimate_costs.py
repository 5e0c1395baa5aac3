"""Pass on the segments of a forward or a backward graph: how long does each take?

::

    layers_3:  view, mm, view, convert, pow, mean, rsqrt, mul, convert, mul, ..., flash_attention, ..., mm
    SegmentCost(ms=7.1, flops=2.9e12, bytes_moved=3.1e9, num_kernels=9, by_kind={"matmul": ..., "fused": ...})

``kernel_fusion`` says which kernels there are and what each moves. One takes the longer of its arithmetic and its
memory traffic, and a launch; kernels run one after the other. Of a kernel of its own whose time was measured
(``MeasuredRates``), that time counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
import torch.fx as fx

from fxoffload.analysis.kernel_fusion import Fusion, Traffic
from fxoffload.analysis.op_costs import (
    assumption_of,
    compute_dtype,
    is_backward_attention,
    is_grouped,
    node_kind,
    op_flops,
)


class Rates(Protocol):
    """How fast a machine is."""

    @property
    def launch_us(self) -> float:
        """What each kernel takes on top of its work."""
        ...

    def matmul_ms(self, flops: float, dtype: torch.dtype) -> float:
        """Time of a matrix product or convolution."""
        ...

    def attention_ms(self, flops: float, dtype: torch.dtype, backward: bool) -> float:
        """Time of an attention kernel."""
        ...

    def memory_ms(self, nbytes: float) -> float:
        """Time to read or write that much device memory."""
        ...


@runtime_checkable
class GroupedRates(Protocol):
    """Rates that tell grouped matrix products from others."""

    def grouped_matmul_ms(self, flops: float, dtype: torch.dtype) -> float:
        """Time of a grouped matrix product (a layer of experts)."""
        ...


@runtime_checkable
class MeasuredRates(Protocol):
    """Rates that know how long some operators take."""

    def op_ms(self, node: fx.Node) -> float | None:
        """Measured time of an operator; None where there is none."""
        ...


@runtime_checkable
class CollectiveRates(Protocol):
    """Rates that know the links between devices too."""

    def collective_ms(self, nbytes: float) -> float:
        """Time of a collective over that much data (the larger of its input and its output)."""
        ...


@dataclass(frozen=True)
class KindCost:
    """The kernels of one kind."""

    ms: float = 0.0
    flops: float = 0.0
    bytes_moved: float = 0.0
    num_kernels: int = 0

    def __add__(self, other: KindCost) -> KindCost:
        return KindCost(
            self.ms + other.ms,
            self.flops + other.flops,
            self.bytes_moved + other.bytes_moved,
            self.num_kernels + other.num_kernels,
        )


@dataclass(frozen=True)
class SegmentCost:
    """The cost of one segment.

    Attributes:
        ms, flops, bytes_moved, num_kernels: of the kernels on the compute stream, which run one after the other.
        by_kind: the same for each kind of kernel (see ``node_kind``). Only here is "collective": collectives have a
            stream and a link of their own, and the segment cannot tell how much of them is exposed.
        assumptions: what had to be assumed -> for how many ops.
    """

    ms: float = 0.0
    flops: float = 0.0
    bytes_moved: float = 0.0
    num_kernels: int = 0
    by_kind: Mapping[str, KindCost] = field(default_factory=dict)
    assumptions: Mapping[str, int] = field(default_factory=dict)


def estimate_segment(nodes: Sequence[fx.Node], rates: Rates) -> SegmentCost:
    """The cost of ``nodes`` (in graph order) compiled as one piece. See ``kernel_fusion``."""
    return _cost_of(Fusion(nodes), rates)


def recompute_ms(nodes: Sequence[fx.Node], rates: Rates) -> float:
    """Time to run exactly ``nodes`` (in graph order) again as part of another segment.

    Differs in one way from a segment of their own. A pointwise result that only fused ops read is not written, since
    the readers' kernels compute it. A kernel that writes nothing for that reason needs no launch of its own. An upper
    estimate: the readers' saved reads of the result are not subtracted.
    """
    return _cost_of(Fusion(nodes, inline=True), rates).ms


def _cost_of(fusion: Fusion, rates: Rates) -> SegmentCost:
    """The cost of all kernels together."""
    by_kind: dict[str, KindCost] = defaultdict(KindCost)
    assumptions: dict[str, int] = defaultdict(int)
    for moved in fusion.traffic():
        if moved.node is None:
            by_kind["fused"] += _fused_cost(moved, rates)
            continue
        by_kind[node_kind(moved.node)] += _cost_alone(moved.node, moved, rates)
        if assumption := assumption_of(moved.node):
            assumptions[assumption] += 1
    total = sum((c for kind, c in by_kind.items() if kind != "collective"), KindCost())
    return SegmentCost(
        total.ms, total.flops, total.bytes_moved, total.num_kernels, dict(by_kind), fusion.assumptions | assumptions
    )


def _cost_alone(node: fx.Node, moved: Traffic, rates: Rates) -> KindCost:
    """Of a kernel of its own."""
    if node_kind(node) == "collective":
        payload = max(moved.read_bytes, moved.written_bytes)
        ms = rates.collective_ms(payload) if isinstance(rates, CollectiveRates) else 0.0
        return KindCost(ms, 0.0, payload, 1)
    nbytes = moved.read_bytes + moved.written_bytes + moved.overwritten_bytes
    flops = op_flops(node)
    if isinstance(rates, MeasuredRates) and (measured := rates.op_ms(node)) is not None:
        return KindCost(measured, flops, nbytes, 1)
    ms = max(_compute_ms(node, flops, rates), rates.memory_ms(nbytes))
    return KindCost(ms + rates.launch_us / 1e3, flops, nbytes, 1)


def _compute_ms(node: fx.Node, flops: float, rates: Rates) -> float:
    if node_kind(node) == "attention":
        return rates.attention_ms(flops, compute_dtype(node), is_backward_attention(node))
    if flops and is_grouped(node) and isinstance(rates, GroupedRates):
        return rates.grouped_matmul_ms(flops, compute_dtype(node))
    return rates.matmul_ms(flops, compute_dtype(node)) if flops else 0.0


def _fused_cost(moved: Traffic, rates: Rates) -> KindCost:
    nbytes = moved.read_bytes + moved.written_bytes
    launch_ms = rates.launch_us / 1e3 if moved.is_launched else 0.0
    return KindCost(rates.memory_ms(nbytes) + launch_ms, 0.0, nbytes, int(moved.is_launched))
