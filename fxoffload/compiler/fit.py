"""Whether one partition of a joint graph can stand in for another at run time, and where its values go then.

AOTAutograd compiled one of them. It calls the forward with its inputs, takes its outputs, saves a fixed number of
tensors, and calls the backward with them and its tangents. The other partition fits if it can live with that.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.fx as fx

from fxoffload.analysis.values import TRACED_KEY, output_values, tensor_of
from fxoffload.runtime.variant import VariantLayout
from fxoffload.torch_private.symbolic_sizes import form_of


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a forward and its backward.

    Attributes:
        inputs: names of the forward's inputs.
        outputs: shape and type, as far as known, of each output that the caller sees.
        saved: names of the saved values; None for one that is neither a tensor nor a size.
        sizes: those of them that are sizes: whole numbers, where sizes vary from call to call.
        given: names of the backward's inputs.
        gradients: shape and type, as far as known, of each gradient.
    """

    inputs: tuple[str, ...]
    outputs: tuple[Hashable, ...]
    saved: tuple[str | None, ...]
    sizes: frozenset[str]
    given: tuple[str, ...]
    gradients: tuple[Hashable, ...]

    @staticmethod
    def of(forward: fx.GraphModule, backward: fx.GraphModule, num_user_outputs: int) -> Signature:
        """Of two partitioned graphs."""
        results = output_values(forward.graph)
        saved = results[num_user_outputs:]
        return Signature(
            _names(forward),
            tuple(_form(v, strides=True) for v in results[:num_user_outputs]),
            tuple(_saved_name(v) for v in saved),
            frozenset(v.name for v in saved if isinstance(v, fx.Node) and _is_size(v)),
            _names(backward),
            tuple(_form(v, strides=False) for v in output_values(backward.graph)),
        )


def _names(gm: fx.GraphModule) -> tuple[str, ...]:
    return tuple(n.name for n in gm.graph.find_nodes(op="placeholder"))


def _saved_name(value: object) -> str | None:
    is_known = isinstance(value, fx.Node) and (tensor_of(value) is not None or _is_size(value))
    return value.name if is_known else None  # type: ignore[union-attr]


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _form(value: object, *, strides: bool) -> Hashable:
    if not isinstance(value, fx.Node):
        return repr(value)
    # Variants come from the graph as it was traced.
    tensor = value.meta.get(TRACED_KEY, tensor_of(value))
    if tensor is None:
        return "no tensor", repr(value.meta.get("val"))
    shape, stride = form_of(tensor)
    return shape, stride if strides else None, tensor.dtype, tensor.device


def fit(first: Signature, other: Signature) -> VariantLayout | None:
    """How ``other`` lies in the slots of ``first``; None where it does not fit."""
    if (first.outputs, first.gradients) != (other.outputs, other.gradients):
        return None
    if None in first.saved or None in other.saved or not set(other.inputs) <= set(first.inputs):
        return None
    count = len(first.outputs)
    given = {name: i for i, name in enumerate(first.given)}
    slots = {name: count + i for i, name in enumerate(first.saved) if name in given}
    stays = {name for name in other.saved if name in slots and (name in other.inputs or name in first.sizes)}
    free = [name for name in slots if name not in stays and name not in first.sizes]
    if not free:
        return None
    places = {name: count + i for i, name in enumerate(other.saved) if name is not None}
    bundled = [name for name in places if name not in stays]
    where = {name: -1 - k for k, name in enumerate(bundled)}
    where |= {name: given[name] for name in given if name in stays or name not in first.saved}
    if not set(other.given) <= where.keys():
        return None
    input_place = {name: i for i, name in enumerate(first.inputs)}
    carrier = free[0]
    return VariantLayout(
        inputs=tuple(input_place[name] for name in other.inputs),
        num_user_outputs=count,
        num_results=count + len(first.saved),
        direct=tuple((places[name], slots[name]) for name in places if name in stays),
        bundled=tuple(places[name] for name in bundled),
        names=tuple(bundled),
        carrier=slots[carrier],  # type: ignore[index]
        carried_to=given[carrier],  # type: ignore[index]
        carrier_name=str(carrier),
        arguments=tuple(where[name] for name in other.given),
        numbers=tuple(slot for name, slot in slots.items() if name in first.sizes and name not in stays),
    )
