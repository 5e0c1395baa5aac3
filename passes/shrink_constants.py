"""Pass on the joint graph, before it is partitioned: hold a constant as one element.

Attention that is written out in operators puts zeros where a row is masked whole, from a constant of the scores' size.
Before and after::

    %zeros = full([4, 16, 2048, 2048], 0)              %zeros_one = full([1, 1, 1, 1], 0)
    %out   = where(%masked, %zeros, %probs)      ->    %zeros     = expand(%zeros_one, [4, 16, 2048, 2048])
                                                       %out       = where(%masked, %zeros, %probs)

Within one kernel such a constant takes no memory. AOTAutograd makes one value of the equal constants of all layers, and
cuts and the backward separate it from its readers: in T5 at 4 x 2,048 tokens that is 1 GiB in float32, written, saved,
and read in every layer. One element is there at no cost.

Left alone: constants that are returned, that are smaller than 1 MiB or of symbolic sizes, or that an op reads which is
not computed element by element, or whose result would lie otherwise in memory.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import fused_form
from fxoffload.analysis.values import extent_bytes, tensor_of
from fxoffload.torch_private.fake_tensors import new_fake_like, run_on_fakes
from fxoffload.torch_private.op_schemas import mutated_args

_LEAST_BYTES = 1 << 20


class ShrinkConstants:
    """See the module docstring."""

    name = "shrink_constants"

    def __call__(self, gm: fx.GraphModule) -> int:
        """Returns how many constants were shrunk."""
        constants = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
        count = sum(_shrink(gm.graph, node) for node in constants if _is_large(node))
        if count:
            gm.recompile()
        return count


def _is_large(node: fx.Node) -> bool:
    value = tensor_of(node)
    if value is None or not all(type(size) is int for size in value.shape):
        return False
    large = (extent_bytes(value) or 0) >= _LEAST_BYTES
    return large and all(u.op == "call_function" and fused_form(u) == "pointwise" for u in node.users)


def _shrink(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether ``node`` is one element now."""
    readers = list(node.users)
    if any(mutated_args(u) for u in readers):
        return False
    value = tensor_of(node)
    assert value is not None
    sizes, ones = list(value.shape), [1] * value.dim()
    with graph.inserting_before(node):
        one = graph.call_function(torch.ops.aten.full.default, (ones, *node.args[1:]), dict(node.kwargs))
        shown = graph.call_function(torch.ops.aten.expand.default, (one, sizes))
    one.meta, shown.meta = dict(node.meta), dict(node.meta)
    one.meta["val"] = new_fake_like(value.as_strided(ones, ones))
    shown.meta["val"] = run_on_fakes(shown)
    node.replace_all_uses_with(shown)
    if any(_lies_otherwise(reader) for reader in readers):
        shown.replace_all_uses_with(node)
        graph.erase_node(shown)
        graph.erase_node(one)
        return False
    graph.erase_node(node)
    return True


def _lies_otherwise(node: fx.Node) -> bool:
    before, after = tensor_of(node), run_on_fakes(node)
    return before is None or not isinstance(after, torch.Tensor) or after.stride() != before.stride()
