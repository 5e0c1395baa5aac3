"""Pass on one segment of the backward: some of its inputs are zeros, and are left out.

Stock models return logits and caches with their loss, and most loops use the loss alone. The gradients of the others
are zeros then: a segment reads them to add them. Without input 1::

    %grad = mul(%arg_0, %mask)                             %grad = mul(%arg_0, %mask)
    %sum  = add(%arg_1, %grad)                    ->       %out  = mm(%grad, %arg_2)
    %out  = mm(%sum, %arg_2)

Such a sum is a copy of its other operand where that lies otherwise in memory, is part of something larger, comes from
outside, or is returned too. An input that is read by anything but sums stays: zeros would be made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import aten_names, op_name
from fxoffload.analysis.segmentation import Segment
from fxoffload.analysis.values import Storages, extent_bytes, output_values, tensor_of
from fxoffload.errors import PassError
from fxoffload.torch_private.symbolic_sizes import form_of, form_when_contiguous

aten = torch.ops.aten

# Of zeros they make zeros.
_STAY_ZEROS = aten_names(
    "_to_copy _unsafe_view alias clone expand neg permute reshape select slice squeeze t transpose unsqueeze view"
) | {"prims.convert_element_type"}


def can_be_left_out(segment: Segment, zeros: fx.Node, every: Collection[fx.Node]) -> bool:
    """Whether an input of a segment can be left out where it is zeros: it is only added to something there.

    Args:
        every: all inputs of the graph that are zeros.
    """
    inside, outputs = frozenset(segment.nodes), frozenset(segment.outputs)

    def is_sum(zero: fx.Node, reader: fx.Node) -> bool:
        other = _other_operand(reader, zero)
        if other is None or _viewed(other) in every:
            return False
        # Where other segments made it, these may lay it out otherwise when they are compiled.
        return _is_contiguous(reader) or (other in inside and _lie_alike(reader, other))

    return all(
        zero not in outputs and (reader not in inside or is_sum(zero, reader))
        for zero, reader in _readers(zeros, lambda node: node in inside)
    )


class LeaveOutZeros:
    """See the module docstring.

    Args:
        positions: of the inputs, which ``can_be_left_out``.
    """

    def __init__(self, positions: Collection[int]) -> None:
        self.positions = frozenset(positions)

    def __call__(self, gm: fx.GraphModule) -> int:
        """Returns how many sums are gone: neither sums nor copies.

        Raises:
            PassError: an input is read by something else.
        """
        placeholders = gm.graph.find_nodes(op="placeholder")
        count = 0
        for zeros in (placeholders[i] for i in sorted(self.positions)):
            while (found := next(_readers(zeros), None)) is not None:
                zero, reader = found
                other = _other_operand(reader, zero)
                if other is None:
                    raise PassError(f"expected zeros that are added, found {reader.format_node()}", "leave_out_zeros")
                count += _replace(gm.graph, reader, other)
            _erase_views(gm.graph, zeros)
            gm.graph.erase_node(zeros)
        gm.recompile()
        return count


def _readers(
    zeros: fx.Node, follows: Callable[[fx.Node], bool] = lambda node: True
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Zeros, and what reads them and is no view or cast of them. ``follows``: whether a view or cast is one."""
    pending = [zeros]
    while pending:
        zero = pending.pop()
        for reader in zero.users:
            if op_name(reader.target) in _STAY_ZEROS and follows(reader):
                pending.append(reader)
            else:
                yield zero, reader


def _viewed(node: fx.Node) -> fx.Node:
    """The value that ``node`` is a view or cast of."""
    while op_name(node.target) in _STAY_ZEROS:
        node = node.all_input_nodes[0]
    return node


def _other_operand(reader: fx.Node, zero: fx.Node) -> fx.Node | None:
    """Of a sum, the operand of whose form and type the sum is; None for other ops."""
    if reader.target is not aten.add.Tensor or reader.kwargs.get("alpha", 1) != 1:
        return None
    others = [a for a in reader.args[:2] if a is not zero]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    one, other = tensor_of(reader), tensor_of(others[0])
    if one is None or other is None or (one.dtype, form_of(one)[0]) != (other.dtype, form_of(other)[0]):
        return None
    return others[0]


def _is_contiguous(node: fx.Node) -> bool:
    return form_of(node.meta["val"]) == form_when_contiguous(node.meta["val"])


def _lie_alike(one: fx.Node, other: fx.Node) -> bool:
    return form_of(one.meta["val"]) == form_of(other.meta["val"])


def _replace(graph: fx.Graph, reader: fx.Node, other: fx.Node) -> bool:
    """``other`` takes the place of ``reader``, or a copy of it does. Returns which: whether it is itself."""
    lie_alike = _lie_alike(reader, other)
    is_itself = lie_alike and _is_all_of_its_memory(graph, reader, other)
    if not is_itself:
        with graph.inserting_before(reader):
            if lie_alike:  # Inductor may leave out a clone
                other = graph.call_function(aten.add.Scalar, (other, 0))
            else:
                other = graph.call_function(aten.clone.default, (other,), {"memory_format": torch.contiguous_format})
        other.meta = dict(reader.meta)
    reader.replace_all_uses_with(other)
    graph.erase_node(reader)
    return is_itself


def _is_all_of_its_memory(graph: fx.Graph, reader: fx.Node, other: fx.Node) -> bool:
    """Whether ``other`` has memory of its own, which is no input's, is not returned, and is no larger.

    A sum of which there is an ``_unsafe_view`` stays: without the sum, ``Storages`` would not know that it is a view.
    """
    storages = Storages(graph.nodes)
    shown = (*graph.find_nodes(op="placeholder"), *output_values(graph))
    if storages.root(other) in {storages.root(v) for v in shown if isinstance(v, fx.Node)}:
        return False
    extents = [extent_bytes(v) for n in storages.members(other) if (v := tensor_of(n)) is not None]
    is_viewed = any(op_name(u.target) == "aten._unsafe_view" for u in reader.users)
    return None not in extents and extent_bytes(other.meta["val"]) == max(e or 0 for e in extents) and not is_viewed


def _erase_views(graph: fx.Graph, zeros: fx.Node) -> None:
    for view in list(zeros.users):
        _erase_views(graph, view)
        graph.erase_node(view)
