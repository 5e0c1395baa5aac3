"""Pass 5, on the backward graph: which inputs may each segment overwrite?

Inductor reuses a *donated* input's memory in place. AOTAutograd's list of donated values is for the whole backward;
applied to a segment it names the wrong inputs (gradients were off by 11 % and ``grad_output`` was overwritten). Here
each segment gets its own list: a saved value or an intermediate that it is the last to read, whose memory nothing else
shares, and that is not returned.

::

    layers_1(%tangent, %mm_1, %grad_3)      donates 1, 2    (%mm_1: saved, last read here; %grad_3: intermediate)

A segment that calls a nested region, or a branch, donates nothing: Inductor would apply the list to that graph too.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.fx as fx

from fxoffload.analysis.segmentation import Donations, Segmentation
from fxoffload.analysis.values import Storages, output_values, tensor_of
from fxoffload.torch_private.graphs import calls_graph


class ChooseDonations:
    """Segment name -> positions of donated inputs.

    Args:
        donatable: placeholders that belong to this backward alone (AOTAutograd's own analysis).
    """

    def __init__(self, segmentation: Segmentation, donatable: Collection[fx.Node]) -> None:
        self.segmentation = segmentation
        self.donatable = frozenset(donatable)

    def __call__(self, gm: fx.GraphModule) -> Donations:
        storages = Storages(gm.graph.nodes)
        last_read: dict[fx.Node, str] = {}
        crossing = set(gm.graph.find_nodes(op="placeholder")) | set(gm.graph.find_nodes(op="get_attr"))
        for segment in self.segmentation.segments:
            last_read.update(dict.fromkeys(segment.inputs, segment.name))
            crossing.update(segment.outputs)
        returned = {storages.root(v) for v in output_values(gm.graph) if isinstance(v, fx.Node)}

        def fits(value: fx.Node, segment: str) -> bool:
            if tensor_of(value) is None or last_read[value] != segment or storages.root(value) in returned:
                return False
            if value.op != "call_function" and value not in self.donatable:
                return False
            return not any(other in crossing for other in storages.members(value) if other is not value)

        return {
            s.name: ()
            if any(calls_graph(n) for n in s.nodes)
            else tuple(i for i, value in enumerate(s.inputs) if fits(value, s.name))
            for s in self.segmentation.segments
        }
