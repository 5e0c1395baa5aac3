"""Pass on the segments of a forward or a backward graph: how long does each take?

::

    layers_3:  view, mm, view, convert, pow, mean, rsqrt, mul, convert, mul, ..., flash_attention, ..., mm
    7.1 ms

``kernel_fusion`` says which kernels there are and what each moves. One takes the longer of its arithmetic and its
memory traffic, and a launch; kernels run one after the other. Of a kernel of its own whose time was measured
(``Rates.op_ms``), that time counts. Collectives are left out: they have a stream and a link of their own, and the
segment cannot tell how much of them is exposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.fx as fx

from fxoffload.analysis.kernel_fusion import Fusion
from fxoffload.analysis.op_costs import compute_dtype, is_backward_attention, is_grouped, node_kind, op_flops


class Rates(Protocol):
    """How fast a machine is. Times are in milliseconds, sizes in bytes."""

    @property
    def launch_us(self) -> float:
        """What each kernel takes on top of its work."""
        ...

    def op_ms(self, node: fx.Node) -> float | None:
        """Measured time of an operator; None where there is none."""
        ...

    def matmul_ms(self, flops: float, dtype: torch.dtype) -> float:
        """Time of a matrix product or convolution."""
        ...

    def grouped_matmul_ms(self, flops: float, dtype: torch.dtype) -> float:
        """Time of a grouped matrix product (a layer of experts)."""
        ...

    def attention_ms(self, flops: float, dtype: torch.dtype, backward: bool) -> float:
        """Time of an attention kernel."""
        ...

    def memory_ms(self, nbytes: float) -> float:
        """Time to read or write that much device memory."""
        ...


def estimate_segment(nodes: Sequence[fx.Node], rates: Rates) -> float:
    """Milliseconds of ``nodes`` (in graph order) compiled as one piece. See ``kernel_fusion``."""
    return math.fsum(_kernel_ms(node, nbytes, rates) for node, nbytes in Fusion(nodes).traffic())


def _kernel_ms(node: fx.Node | None, nbytes: int, rates: Rates) -> float:
    """``node``: the op of a kernel of its own; None: it is fused. ``nbytes``: that it moves."""
    compute_ms = 0.0
    if node is not None:
        if node_kind(node) == "collective":
            return 0.0
        if (measured := rates.op_ms(node)) is not None:
            return measured
        compute_ms = _compute_ms(node, rates)
    return max(compute_ms, rates.memory_ms(nbytes)) + rates.launch_us / 1e3


def _compute_ms(node: fx.Node, rates: Rates) -> float:
    flops = op_flops(node)
    if node_kind(node) == "attention":
        return rates.attention_ms(flops, compute_dtype(node), is_backward_attention(node))
    if not flops:
        return 0.0
    product_ms = rates.grouped_matmul_ms if is_grouped(node) else rates.matmul_ms
    return product_ms(flops, compute_dtype(node))
