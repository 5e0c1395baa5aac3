"""Pass on one segment of the backward: some of its inputs are zeros, and are left out.

Stock models return logits and caches with their loss, and most loops use the loss alone. The gradients of the others
are zeros then: a segment reads them to add them. With input 1 left out, before and after::

    %grad = mul(%arg_0, %mask)                             %grad = mul(%arg_0, %mask)
    %sum  = add(%arg_1, %grad)                    ->       %out  = mm(%grad, %arg_2)
    %out  = mm(%sum, %arg_2)

A sum is a copy of its other operand where that lies otherwise in memory, comes from outside, or is returned too. Other
ops read a constant, which takes no memory within a kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import aten_names, op_name
from fxoffload.analysis.values import Storages, has_fixed_sizes, output_values, tensor_of
from fxoffload.torch_private.fake_tensors import new_fake_like, run_on_fakes
from fxoffload.torch_private.symbolic_sizes import form_of, form_when_contiguous

aten = torch.ops.aten

# Of zeros they make zeros.
_STAY_ZEROS = aten_names(
    "_to_copy _unsafe_view alias clone expand neg permute reshape select slice squeeze t transpose unsqueeze view"
) | {"prims.convert_element_type"}


def can_be_left_out(node: fx.Node) -> bool:
    """Whether an input of a graph can be left out where it is zeros: it is only added to something, or can be a
    constant."""
    value = tensor_of(node)
    if value is None:
        return False
    if has_fixed_sizes(value) and aten.is_non_overlapping_and_dense.default(value):
        return True
    return all(_instead(reader, zero) is not None and _is_contiguous(reader) for zero, reader in _readers(node))


class LeaveOutZeros:
    """See the module docstring.

    Args:
        positions: of the inputs, which ``can_be_left_out``.
    """

    name = "leave_out_zeros"

    def __init__(self, positions: Collection[int]) -> None:
        self.positions = frozenset(positions)

    def __call__(self, gm: fx.GraphModule) -> int:
        """Returns how many sums are gone: neither sums nor copies."""
        storages = Storages(gm.graph.nodes)
        before = set(gm.graph.nodes)
        placeholders = gm.graph.find_nodes(op="placeholder")
        outside = {storages.root(p) for p in placeholders}
        count = 0
        for zeros in (placeholders[i] for i in sorted(self.positions)):
            for zero, reader in list(_readers(zeros)):
                if zero not in reader.all_input_nodes or (other := _instead(reader, zero)) is None:
                    continue  # read no more, or no sum
                returned = {storages.root(v) for v in output_values(gm.graph) if isinstance(v, fx.Node) and v in before}
                is_other = _lie_alike(reader, other) and other in before
                if is_other and storages.root(other) not in outside | returned:
                    reader.replace_all_uses_with(other)
                    count += 1
                else:
                    _copy(gm.graph, reader, other)
                gm.graph.erase_node(reader)
            _erase_unread(gm.graph, zeros)
            if zeros.users:
                _make_constant(gm.graph, zeros, placeholders[-1])
            gm.graph.erase_node(zeros)
        gm.recompile()
        return count


def _readers(zeros: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Zeros, and an op that reads them and makes something else; in no order."""
    pending = [zeros]
    while pending:
        zero = pending.pop()
        for reader in zero.users:
            if op_name(reader.target) in _STAY_ZEROS:
                pending.append(reader)
            else:
                yield zero, reader


def _instead(reader: fx.Node, zero: fx.Node) -> fx.Node | None:
    """The other operand of a sum, if it or a copy of it can take the sum's place."""
    if reader.target is not aten.add.Tensor or reader.kwargs.get("alpha", 1) != 1:
        return None
    others = [a for a in reader.args[:2] if a is not zero]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    other = others[0]
    one, two = tensor_of(reader), tensor_of(other)
    if one is None or two is None or (one.dtype, form_of(one)[0]) != (two.dtype, form_of(two)[0]):
        return None
    return other if _lie_alike(reader, other) or _is_contiguous(reader) else None


def _is_contiguous(node: fx.Node) -> bool:
    return form_of(node.meta["val"]) == form_when_contiguous(node.meta["val"])


def _lie_alike(one: fx.Node, other: fx.Node) -> bool:
    return form_of(one.meta["val"]) == form_of(other.meta["val"])


def _copy(graph: fx.Graph, reader: fx.Node, other: fx.Node) -> None:
    """A copy of ``other`` in the place of ``reader``, which lies as that does."""
    kind = torch.contiguous_format if _is_contiguous(reader) else torch.preserve_format
    with graph.inserting_before(reader):
        copy = graph.call_function(aten.clone.default, (other,), {"memory_format": kind})
    copy.meta = dict(reader.meta)
    reader.replace_all_uses_with(copy)


def _erase_unread(graph: fx.Graph, zeros: fx.Node) -> None:
    """Views and casts of zeros that nothing reads any more."""
    for reader in list(zeros.users):
        if op_name(reader.target) in _STAY_ZEROS:
            _erase_unread(graph, reader)
            if not reader.users:
                graph.erase_node(reader)


def _make_constant(graph: fx.Graph, placeholder: fx.Node, last: fx.Node) -> None:
    """Zeros in the place of a placeholder of a fixed size."""
    value = tensor_of(placeholder)
    assert value is not None
    order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
    sizes = [value.shape[d] for d in order]
    form = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
    with graph.inserting_after(last):
        found = graph.call_function(aten.full.default, (sizes, 0), form)
    found.meta["val"] = new_fake_like(value.permute(order))
    if order != list(range(value.dim())):
        back = sorted(range(value.dim()), key=order.__getitem__)
        with graph.inserting_after(found):
            shown = graph.call_function(aten.permute.default, (found, back))
        shown.meta["val"] = run_on_fakes(shown)
        found = shown
    placeholder.replace_all_uses_with(found)
