"""What a compiled graph's forward hands to its caller, for ``fxoffload.explain()``."""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from fxoffload.analysis.value_names import ValueNames
from fxoffload.analysis.values import extent_bytes, output_values, tensor_of
from fxoffload.compiled_graph import Returned
from fxoffload.compiler.pipeline import ForwardState
from fxoffload.compiler.tangents import losses_of
from fxoffload.planner.plan import Loss


def loss_of(states: Iterable[ForwardState]) -> Loss:
    """``Plan.loss`` of a step of these graphs, before it ran."""
    return "inside" if any(r.is_loss for state in states for r in returned_by(state)) else "outside"


def returned_by(state: ForwardState) -> tuple[Returned, ...]:
    """The tensors among the outputs that the caller sees, in order, without numbers that are no loss."""
    names = ValueNames(state.gm.graph)
    values = output_values(state.gm.graph)[: state.num_user_outputs]
    losses = losses_of(values)
    return tuple(
        Returned(names.of(v), extent_bytes(tensor) or 0, v in losses)
        for v in values
        if isinstance(v, fx.Node) and (tensor := tensor_of(v)) is not None and (tensor.dim() or v in losses)
    )
