"""Pass on the segments of a forward or a backward graph: how many bytes does each allocate at its worst moment?

::

    layers_3:  reads 4 saved values that die here (1.2 GiB), returns 9 gradients (386 MiB), at most 672 MiB above entry

``[Note: How a segment's memory is walked]`` ``kernel_fusion`` says which kernels there are, and what each reads from
memory and writes to it. A kernel's results are allocated before it runs. After it, values that it was the last to read
are freed, and so are results without a reader. On top come:

1. *The order.* Inductor starts from the order of the graph, where a pointwise result stands at its first reader that
   needs it in memory (at the end, where only the caller does). It then tries three others: greedy by bytes; first come,
   first served; depth first from the kernel that touches least. It takes the one that peaks least by its own count,
   which knows neither hidden memory nor results written in place. So does this pass. Where a value is read in parts (a
   rotation by halves), Inductor counts other bytes. There the worst order counts that it may take for an improvement.
2. *In place.* A fused kernel writes a result over a value that it is the last to read, under three conditions. Both are
   as large; each element is read only where it is written; no result that the kernel computes later needs the value. So
   of two results that are made of the same values, one goes in place. Of the inputs, only donated ones qualify.
3. *Hidden memory* that an operator allocates and frees itself: ``hidden_memory``.

Not modelled: what ``kernel_fusion`` does not (so their workspaces too); results of one op that Inductor takes out of
their tuple late; workspaces of cuDNN; rounding to the allocator's blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.fx as fx

from fxoffload.analysis.in_place import bytes_in_place
from fxoffload.analysis.kernel_order import likely_orders
from fxoffload.analysis.segment_kernels import Kernel, SegmentKernels
from fxoffload.analysis.segmentation import Segment, Segmentation
from fxoffload.analysis.values import Storages, output_values, tensor_of


def segment_temp_bytes(segment: Segment, dying: Collection[str], donated: Collection[int] = ()) -> int:
    """``SegmentStep.temp_bytes``. ``dying``: names of inputs that die in it; ``donated``: positions of those that it
    may also overwrite."""
    return estimate_temp_bytes(segment.nodes, segment.outputs, dying, donated={segment.inputs[i].name for i in donated})


def estimate_temp_bytes(
    nodes: Sequence[fx.Node],
    outputs: Collection[fx.Node],
    dying: Collection[str] = (),
    *,
    donated: Collection[str] = (),
) -> int:
    """Most bytes that ``nodes`` (in graph order), compiled as one piece, allocate above those live when they begin.

    Sizes are hints; a value without one counts nothing. See ``[Note: How a segment's memory is walked]``.

    Args:
        outputs: those of their values that live on.
        dying: names of values from outside whose memory is free once they have been read.
        donated: names of values among these that may be overwritten.
    """
    segment = SegmentKernels(nodes, outputs, dying, donated)
    return max(_peak_of(segment, order) for order in likely_orders(segment))


def _peak_of(segment: SegmentKernels, order: Sequence[Kernel]) -> int:
    live = peak = 0
    for kernel, freed in zip(order, segment.freed(order, segment.dying), strict=True):
        live += kernel.nbytes
        peak = max(peak, live - bytes_in_place(segment, kernel, freed) + kernel.hidden)
        live -= sum(segment.size.get(buffer, 0) for buffer in freed)
    return peak


def dying_inputs(
    gm: fx.GraphModule, segmentation: Segmentation, handed_over: Collection[str] = ()
) -> dict[str, frozenset[str]]:
    """Segment name -> inputs whose memory dies in it: it is the last to read it, and the graph does not return it.

    Args:
        handed_over: names of graph inputs to which only this graph has references while it runs (saved activations).
    """
    storages = Storages(gm.graph.nodes)
    held = {storages.root(v) for v in output_values(gm.graph) if isinstance(v, fx.Node)}
    held |= {
        storages.root(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr") and n.name not in handed_over
    }
    last: dict[fx.Node, str] = {}
    for segment in segmentation.segments:
        last.update((storages.root(v), segment.name) for v in (*segment.inputs, *segment.outputs))
    return {
        s.name: frozenset(
            v.name
            for v in s.inputs
            if tensor_of(v) is not None and storages.root(v) not in held and last[storages.root(v)] == s.name
        )
        for s in segmentation.segments
    }
