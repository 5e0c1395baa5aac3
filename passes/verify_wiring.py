"""Pass 7: prove that an outer graph computes what its inner graph computes, or name the node where the two part.

The walk keeps which inner value each outer node stands for. A copy, a reload and the result of a wait stand for the
value that was offloaded::

    %silu, %mm  = getitems of layers_0          stand for %silu, %mm: outputs 0 and 1 of the segment
    %copy       = offload([%mm])[0]             stands for %mm
    %layers_1   = call_module[layers_1](%silu)  the segment's input 0 is %silu: wired as cut
    return (%out, %copy)                        the inner graph returns (%out, %mm): wired as saved

There is one rule, ``miswired``. Every op of the inner graph runs once and in order, inside the call of its segment.
Every segment is called once and in order. Each of its inputs and each returned value stands for the inner value in
that place. The outer graph has no ops but segment calls, getitems and ``torch.ops.fxoffload.*``.
"""

from __future__ import annotations

import operator

import torch.fx as fx

from fxoffload import ops
from fxoffload.analysis.segmentation import Segment, Segmentation
from fxoffload.analysis.values import output_values
from fxoffload.errors import VerificationError
from fxoffload.ops import is_op

RULES = ("miswired",)

_WITHOUT_VALUE = (ops.release, ops.wait_offload, ops.prefetch)
_PACKED = (ops.offload, ops.reload, ops.wait_reload)


class VerifyWiring:
    """Raises ``VerificationError`` (an AssertionError: a bug of ours) where the outer graph is wired differently.

    Args:
        gm: the inner graph, after the passes that reorder it.
    """

    name = "verify_wiring"

    def __init__(self, gm: fx.GraphModule, segmentation: Segmentation) -> None:
        self.gm = gm
        self.segmentation = segmentation

    def __call__(self, outer: fx.GraphModule) -> fx.GraphModule:
        self._check_cuts(outer)
        stands: dict[fx.Node, object] = {}
        self._heads(outer, stands)
        waiting = list(self.segmentation.segments)
        for node in outer.graph.nodes:
            if node.op == "call_module":
                if not waiting or waiting[0].name != node.target:
                    raise _error(node, f"is called where {waiting[0].name if waiting else 'nothing'} is next")
                self._segment(node, waiting.pop(0), stands)
            elif node.target is operator.getitem:
                stands[node] = self._unpacked(node, stands)
            elif node.op == "call_function" and not any(is_op(node, op) for op in (*_WITHOUT_VALUE, *_PACKED)):
                raise _error(node, "is neither a segment call nor an op of ours")
        if waiting:
            raise _error(outer.graph.output_node(), f"returns before segment {waiting[0].name} was called")
        self._outputs(outer, stands)
        return outer

    def _check_cuts(self, outer: fx.GraphModule) -> None:
        cut = [n for s in self.segmentation.segments for n in s.nodes]
        if cut != [n for n in self.gm.graph.nodes if n.op == "call_function"]:
            raise _error(
                outer.graph.output_node(), "stands behind segments that are not the inner graph's ops in order"
            )

    def _heads(self, outer: fx.GraphModule, stands: dict[fx.Node, object]) -> None:
        ours, theirs = (g.graph.find_nodes(op="placeholder") for g in (outer, self.gm))
        if [n.name for n in ours] != [n.name for n in theirs]:
            raise _error(outer.graph.output_node(), "belongs to a graph with other inputs than the inner graph's")
        stands.update(zip(ours, map(_value, theirs), strict=True))
        for node in outer.graph.find_nodes(op="get_attr"):
            fetch = operator.attrgetter(str(node.target))
            if fetch(outer) is not fetch(self.gm):
                raise _error(node, "is another object than in the inner graph")
            stands[node] = _value(node)

    def _segment(self, node: fx.Node, segment: Segment, stands: dict[fx.Node, object]) -> None:
        found = [stands.get(a) if isinstance(a, fx.Node) else a for a in node.args]
        expected = [_value(v) for v in segment.inputs]
        if len(found) != len(expected) or node.kwargs:
            raise _error(node, f"has {len(found)} inputs, expected {len(expected)}")
        for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            if mine != theirs:
                raise _error(node, f"reads {node.args[place]} (for {mine}) as input {place}, which is {theirs}")

    def _unpacked(self, node: fx.Node, stands: dict[fx.Node, object]) -> object:
        packed, index = node.args
        assert isinstance(packed, fx.Node) and isinstance(index, int)
        if packed.op == "call_module":
            outputs = {s.name: s.outputs for s in self.segmentation.segments}[str(packed.target)]
            if not 0 <= index < len(outputs):
                raise _error(node, f"takes output {index} of {len(outputs)}")
            return _value(outputs[index])
        sources = packed.args[0] if packed.args else None
        if is_op(packed, ops.wait_reload) and isinstance(sources, fx.Node):
            sources = sources.args[0]
        if not any(is_op(packed, op) for op in _PACKED) or not isinstance(sources, (list, tuple)):
            raise _error(node, f"unpacks {packed}, which packs nothing")
        if not 0 <= index < len(sources):
            raise _error(node, f"takes value {index} of {len(sources)}")
        return stands.get(sources[index])  # type: ignore[arg-type]

    def _outputs(self, outer: fx.GraphModule, stands: dict[fx.Node, object]) -> None:
        end = outer.graph.output_node()
        returned = output_values(outer.graph)
        found = [stands.get(v) if isinstance(v, fx.Node) else v for v in returned]
        expected = [_value(v) if isinstance(v, fx.Node) else v for v in output_values(self.gm.graph)]
        if len(found) != len(expected):
            raise _error(end, f"returns {len(found)} values, expected {len(expected)}")
        for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            if mine is not theirs and mine != theirs:
                raise _error(end, f"returns {returned[place]} (for {mine}) as value {place}, which is {theirs}")


def _value(node: fx.Node) -> str:
    """A name for an inner value; two get_attrs of one constant are one value."""
    return f"attribute {node.target}" if node.op == "get_attr" else f"%{node.name}"


def _error(node: fx.Node, what: str) -> VerificationError:
    return VerificationError(f"miswired: {node} ({node.target}) {what}", VerifyWiring.name)
