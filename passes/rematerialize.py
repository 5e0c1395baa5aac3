"""Pass on the forward and the backward graph, after ``cut_segments``: recompute cheap values in the segment that reads
them, instead of passing them across a cut.

A cut makes Inductor write to memory values that would else stay in registers. In the backward of a bfloat16 gated MLP
that is ``gate`` in float32, which the two halves of a layer share: 3 GiB at 65,536 tokens. ``gate`` itself is there
anyway and takes 1.5 GiB::

    %wide = convert(%gate, float32)                   %wide  = convert(%gate, float32)
    %silu = ... %wide ...                             %silu  = ... %wide ...
    ---------- cut ----------                   ->    ---------- cut ----------
    %grad = ... %wide ...                             %again = convert(%gate, float32)
                                                      %grad  = ... %again ...

Only arithmetic, element by element, is repeated (never a random number, a reduction, a product of matrices), and only
where fewer bytes are held for it than the value has. The results are those that one piece would give.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx as fx

from fxoffload.analysis.repeatable import Repeatable
from fxoffload.analysis.segmentation import Segmentation
from fxoffload.analysis.values import tensor_of
from fxoffload.passes.cut_segments import segments_of
from fxoffload.passes.settle_nodes import GLUE_KEY
from fxoffload.torch_private.fake_tensors import new_fake_like, run_on_fakes

# Copy -> the name of the node that it repeats.
REPEATS_KEY = "fxoffload_repeats"


class Rematerialize:
    """Repeat cheap values after the cuts. Changes the graph; returns its segments, by the same names.

    A segment of which nothing is left is gone.

    Args:
        moved: see ``CutSegments``.
    """

    def __init__(self, segmentation: Segmentation, *, moved: Mapping[str, int] | None = None) -> None:
        self.segmentation = segmentation
        self.moved = moved or {}

    def __call__(self, gm: fx.GraphModule) -> Segmentation:
        if len(self.segmentation.segments) < 2:
            return self.segmentation
        work = _Repeating(gm, self.segmentation, Repeatable(gm, self.moved))
        if not work.repeated:
            return self.segmentation
        work.rewrite()
        # No recompile: only segments run, and code for a graph of 36 layers takes longer to write than all of this.
        pairs = zip(work.ranges(), self.segmentation.segments, strict=True)
        left = [(nodes, segment) for nodes, segment in pairs if nodes]
        return segments_of(gm, [nodes for nodes, _ in left], [segment for _, segment in left])


class _Repeating:
    def __init__(self, gm: fx.GraphModule, segmentation: Segmentation, values: Repeatable) -> None:
        self.graph = gm.graph
        self.values = values
        self.at = {n: i for i, s in enumerate(segmentation.segments) for n in s.nodes}
        self.num = len(segmentation.segments)
        # Value -> the last segment for which it is there; and the recomputed values.
        self.until, self.repeated = values.lifetimes(self.at, self.num)
        self._copies: dict[tuple[fx.Node, int], fx.Node] = {}
        self._original: dict[fx.Node, fx.Node] = {}

    def rewrite(self) -> None:
        """Put copies where they are read, and drop values that have lost their last reader."""
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node not in self.at:
                continue
            segment = self.at[node]
            for value in node.all_input_nodes:
                if self.at.get(value, segment) < segment and self.values.base.get(value, value) in self.repeated:
                    node.replace_input_with(value, self._copy(value, segment, node))
        for node in reversed(self.graph.nodes):
            if not node.users and self.values.base.get(node, node) in self.repeated:
                self._drop(node)

    def _copy(self, value: fx.Node, segment: int, reader: fx.Node) -> fx.Node:
        """``value`` as ``reader`` in ``segment`` can have it."""
        known = self._copies.get((value, segment))
        if known is not None:
            return known
        is_view = value in self.values.views
        if not is_view and (value not in self.values.cheap or self.until[value] >= segment):
            return value
        # An op that has a copy in its own segment is repeated from the sources of that copy.
        sources = {i: self._copy(self._original.get(i, i), segment, reader) for i in value.all_input_nodes}
        with self.graph.inserting_before(reader):
            copy = self.graph.node_copy(value, lambda i: sources[i])
        copy.meta = {k: v for k, v in value.meta.items() if k != GLUE_KEY}
        copy.meta[REPEATS_KEY] = value.name
        if not is_view:
            tensor = tensor_of(value)
            assert tensor is not None
            copy.meta["val"] = new_fake_like(tensor)  # memory of its own
        elif any(sources[i] is not i for i in sources):
            copy.meta["val"] = run_on_fakes(copy)  # a view of that
        self.at[copy] = segment
        self._original[copy] = value
        self._copies[value, segment] = copy
        return copy

    def _drop(self, node: fx.Node) -> None:
        todo = [node]
        while todo:
            dead = todo.pop()
            if dead.users or dead.op != "call_function" or dead not in self.at:
                continue
            if dead not in self.values.cheap and dead not in self.values.views:
                continue
            inputs = list(dead.all_input_nodes)
            self.graph.erase_node(dead)
            del self.at[dead]
            todo.extend(inputs)

    def ranges(self) -> list[list[fx.Node]]:
        """The nodes of each segment, in the order of the graph."""
        found: list[list[fx.Node]] = [[] for _ in range(self.num)]
        for node in self.graph.nodes:
            if node in self.at:
                found[self.at[node]].append(node)
        return found
