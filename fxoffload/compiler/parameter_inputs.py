"""Which inputs of a graph are parameters or buffers: they live on the device anyway, and nothing is gained by moving
them.

AOTAutograd says it of the inputs that it was given. That is not enough:
- An input that is a tensor subclass (a DTensor) becomes several inputs of the joint graph, and AOTAutograd's positions
  are those from before. Descriptors of the joint graph's inputs say what each was made of.
- What FSDP1 puts where its parameters were is a plain view of the unsharded flat parameter, which FSDP1 frees. Dynamo
  knows where it found it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.fx as fx

from fxoffload.torch_private.aot_autograd import InputOrigin, is_static_placeholder, origin_of


def parameters_of(gm: fx.GraphModule) -> frozenset[int]:
    """Positions, among the inputs of a graph from Dynamo, of parameters and buffers."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return frozenset(i for i, node in enumerate(placeholders) if is_static_placeholder(node))


def parameters_in_joint(
    gm: fx.GraphModule, parameters: Collection[int] | None, told: Collection[int]
) -> frozenset[int]:
    """Positions, among the inputs of a joint graph, of parameters and buffers.

    Args:
        gm: the joint graph.
        parameters: as ``parameters_of`` the graph that it was made of; None: not known.
        told: positions that AOTAutograd says; they count where the joint graph does not tell the kind of its inputs.
    """
    found = set()
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        origin = origin_of(node)
        if origin is InputOrigin.UNKNOWN or parameters is None:
            return frozenset(told)
        if origin is InputOrigin.PARAMETER or origin in parameters:
            found.add(i)
    return frozenset(found)
