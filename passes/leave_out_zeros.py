"""Pass on one segment of the backward: some of its inputs are zeros, and are left out.

Stock models return logits and caches with their loss, and most loops use the loss alone. The gradients of the others
are zeros then: a segment reads them to add them. With input 1 left out, before and after::

    %grad = mul(%arg_0, %mask)                             %grad = mul(%arg_0, %mask)
    %sum  = add(%arg_1, %grad)                    ->       %out  = mm(%grad, %arg_2)
    %out  = mm(%sum, %arg_2)

An add stays where its other operand lies otherwise in memory, comes from outside, or is returned too: then it reads a
constant, which takes no memory within a kernel.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.fx as fx
from torch import Tensor

from fxoffload.analysis.op_costs import aten_names, op_name
from fxoffload.analysis.values import Storages, has_fixed_sizes, output_values, tensor_of
from fxoffload.torch_private.fake_tensors import new_fake_like, run_on_fakes

# Of zeros they make zeros.
_STAY_ZEROS = aten_names(
    "_to_copy _unsafe_view alias clone expand neg permute reshape select slice squeeze t transpose unsqueeze view"
) | {"prims.convert_element_type"}


def can_be_left_out(value: Tensor) -> bool:
    """Whether zeros of this form can be a constant: of fixed sizes, dense in some order of its dimensions."""
    return has_fixed_sizes(value) and torch.ops.aten.is_non_overlapping_and_dense.default(value)


class LeaveOutZeros:
    """See the module docstring.

    Args:
        positions: of the inputs.
    """

    name = "leave_out_zeros"

    def __init__(self, positions: Collection[int]) -> None:
        self.positions = frozenset(positions)

    def __call__(self, gm: fx.GraphModule) -> int:
        """Returns how many adds are gone."""
        storages = Storages(gm.graph.nodes)
        before = set(gm.graph.nodes)
        placeholders = gm.graph.find_nodes(op="placeholder")
        outside = {storages.root(p) for p in placeholders}
        zeros = {_as_constant(gm.graph, placeholders[i], placeholders[-1]) for i in sorted(self.positions)}
        gone: list[fx.Node] = []
        for node in gm.graph.nodes:
            if node in zeros or zeros.isdisjoint(node.all_input_nodes):
                continue
            if op_name(node.target) in _STAY_ZEROS:
                zeros.add(node)
                continue
            other = _other_summand(node, zeros)
            returned = {storages.root(v) for v in output_values(gm.graph) if isinstance(v, fx.Node) and v in before}
            if other is not None and _lie_alike(node, other) and storages.root(other) not in outside | returned:
                node.replace_all_uses_with(other)
                gone.append(node)
        for node in reversed(gm.graph.nodes):
            if not node.users and (node in zeros or node in gone):
                gm.graph.erase_node(node)
        gm.recompile()
        return len(gone)


def _as_constant(graph: fx.Graph, placeholder: fx.Node, last: fx.Node) -> fx.Node:
    """Zeros in the place of a placeholder, which is gone."""
    value = tensor_of(placeholder)
    assert value is not None
    order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
    sizes = [value.shape[d] for d in order]
    form = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
    with graph.inserting_after(last):
        found = graph.call_function(torch.ops.aten.full.default, (sizes, 0), form)
    found.meta["val"] = new_fake_like(value.permute(order))
    if order != list(range(value.dim())):
        back = sorted(range(value.dim()), key=order.__getitem__)
        with graph.inserting_after(found):
            shown = graph.call_function(torch.ops.aten.permute.default, (found, back))
        shown.meta["val"] = run_on_fakes(shown)
        found = shown
    placeholder.replace_all_uses_with(found)
    graph.erase_node(placeholder)
    return found


def _other_summand(node: fx.Node, zeros: Collection[fx.Node]) -> fx.Node | None:
    """Of a sum of zeros and something else; None for other ops."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return None
    others = [a for a in node.args[:2] if a not in zeros]
    return others[0] if len(others) == 1 and isinstance(others[0], fx.Node) else None


def _lie_alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = tensor_of(one), tensor_of(other)
    return a is not None and b is not None and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
