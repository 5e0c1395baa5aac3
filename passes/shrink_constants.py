"""Pass on the joint graph, before it is partitioned: hold a constant as one element.

Attention that is written out in operators puts zeros where a row is masked whole, from a constant of the scores' size.
Before and after::

    %zeros = full([4, 16, 2048, 2048], 0)              %zeros_one = full([1, 1, 1, 1], 0)
    %out   = where(%masked, %zeros, %probs)      ->    %zeros     = expand(%zeros_one, [4, 16, 2048, 2048])
                                                       %out       = where(%masked, %zeros, %probs)

Within one kernel such a constant takes no memory. But AOTAutograd makes one value of the equal constants of all layers.
Cuts and the backward separate it from its readers. In T5 at 4 x 2,048 tokens it is 1 GiB, which is written, saved, and
read in every layer. One element is there at no cost.

A constant stays as it is where it is returned, smaller than 1 MiB, or of symbolic sizes. It also stays where an op
reads it that is no arithmetic (``is_arithmetic``), or whose result would lie otherwise in memory.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from fxoffload.analysis.repeatable import is_arithmetic
from fxoffload.analysis.values import has_fixed_sizes, is_large, lies_otherwise, tensor_of
from fxoffload.torch_private.fake_tensors import new_fake_like, run_on_fakes


class ShrinkConstants:
    """See the module docstring."""

    def __call__(self, gm: fx.GraphModule) -> int:
        """Returns how many constants were shrunk."""
        constants = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
        count = sum(_shrink(gm.graph, node) for node in constants if is_large(node))
        if count:
            gm.recompile()
        return count


def _is_fixed_arithmetic(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and is_arithmetic(node) and has_fixed_sizes(value)


def _shrink(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether ``node`` is one element now."""
    readers = list(node.users)
    if not all(map(_is_fixed_arithmetic, readers)):
        return False
    value = tensor_of(node)
    assert value is not None
    sizes, ones = list(value.shape), [1] * value.dim()
    with graph.inserting_before(node):
        one = graph.call_function(torch.ops.aten.full.default, (ones, *node.args[1:]), dict(node.kwargs))
        shown = graph.call_function(torch.ops.aten.expand.default, (one, sizes))
    for new in (one, shown):
        new.meta = {k: v for k, v in node.meta.items() if k != "tensor_meta"}
    one.meta["val"] = new_fake_like(value.as_strided(ones, ones))
    shown.meta["val"] = run_on_fakes(shown)
    node.replace_all_uses_with(shown)
    if any(lies_otherwise(reader) for reader in readers):
        shown.replace_all_uses_with(node)
        graph.erase_node(shown)
        graph.erase_node(one)
        return False
    graph.erase_node(node)
    return True
