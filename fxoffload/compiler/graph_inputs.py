"""Inputs of a graph: their names, and which of them are parameters or buffers. Those live on the device anyway, and
nothing is gained by moving them.

AOTAutograd says it of the inputs that it was given. That is not enough:
- An input that is a tensor subclass (a DTensor) becomes several inputs of the joint graph, and AOTAutograd's positions
  are those from before. Descriptors of the joint graph's inputs say what each was made of.
- What FSDP1 puts where its parameters were is a plain view of the unsharded flat parameter, which FSDP1 frees. Dynamo
  knows where it found it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch.fx as fx

from fxoffload.analysis.value_names import INPUT_NAME
from fxoffload.torch_private.aot_autograd import InputOrigin, is_static_placeholder, name_of_input, origin_of


class GraphInputs(NamedTuple):
    """Of a graph from Dynamo.

    Attributes:
        parameters: positions of parameters and buffers.
        names: what the user calls each input; "" where that is not known.
    """

    parameters: frozenset[int]
    names: tuple[str, ...]

    @classmethod
    def of(cls, gm: fx.GraphModule) -> GraphInputs:
        """Those of ``gm``."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        parameters = frozenset(i for i, node in enumerate(placeholders) if is_static_placeholder(node))
        return cls(parameters, tuple(map(name_of_input, placeholders)))


def parameters_in_joint(gm: fx.GraphModule, inputs: GraphInputs | None, told: Collection[int]) -> frozenset[int]:
    """Positions, among the inputs of a joint graph, of parameters and buffers. Names the others for ``ValueNames``.

    Args:
        inputs: of the graph that it was made of; None: not known.
        told: positions that AOTAutograd says; they count where the joint graph does not tell the kind of its inputs.
    """
    found = set()
    # By position: a graph that is not from Dynamo may have nested inputs, and the joint graph more of them.
    names = {} if inputs is None else dict(enumerate(inputs.names))
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        origin = origin_of(node)
        if origin is InputOrigin.UNKNOWN or inputs is None:
            return frozenset(told)
        if origin is InputOrigin.PARAMETER or origin in inputs.parameters:
            found.add(i)
        elif isinstance(origin, int) and (name := names.get(origin)):
            node.meta[INPUT_NAME] = name
    return frozenset(found)
