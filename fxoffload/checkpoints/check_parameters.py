"""Do the weights, biases and scales of one layer's experts fit each other and the config?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxoffload.checkpoints.config_values import block_size, whole_number
from fxoffload.checkpoints.errors import BrokenCheckpointError, UnsupportedCheckpointError
from fxoffload.checkpoints.families import PROJECTIONS, Projection
from fxoffload.checkpoints.find_family import quantization_of
from fxoffload.checkpoints.layouts import Experts, LayoutBlock
from fxoffload.checkpoints.slices import expert_shape

Shapes = Mapping[Projection, tuple[int, ...]]
# What a weight that is packed below 8 bits is stored as.
WORDS = ("U8", "I8", "U16", "I16", "U32", "I32")


def check_parameters(experts: Experts, block: LayoutBlock, config: Mapping[str, Any]) -> None:
    """gate and up are alike, down is their transpose, and every parameter is there for all three."""
    parameters = {parameter for _, parameter in block.tensors}
    shapes = {parameter: _shapes(block, parameter) for parameter in sorted(parameters)}
    if "weight" not in shapes:
        raise BrokenCheckpointError(
            f"{block.name}: expected weights, found only {', '.join(sorted(parameters))}; "
            "fetch the shards that hold them"
        )
    weights = shapes["weight"]
    _check_weights(block, weights, whole_number(config, "hidden_size"))
    for parameter, those in shapes.items():
        if those["gate"] != those["up"]:
            raise BrokenCheckpointError(
                f"{block.name}: expected gate and up {parameter} of one shape, found {list(those['gate'])} and "
                f"{list(those['up'])}; fetch the shards again"
            )
    if "bias" in shapes:
        _check_biases(block, weights, shapes["bias"])
    size = block_size(quantization_of(experts.checkpoint.config, config))
    if size is not None:
        _check_scales(block, weights, shapes, size)


def _shapes(block: LayoutBlock, parameter: str) -> Shapes:
    """Of one expert, in the layout of one tensor per expert."""
    found: Shapes = {p: shape for p in PROJECTIONS if (shape := expert_shape(block, p, parameter)) is not None}
    absent = [projection for projection in PROJECTIONS if projection not in found]
    if absent:
        raise BrokenCheckpointError(
            f"{block.name}: expected {parameter} for gate, up and down, found none for {', '.join(absent)}; "
            "fetch the shards that hold it"
        )
    return found


def _check_weights(block: LayoutBlock, weights: Shapes, hidden: int | None) -> None:
    gate, up, down = (weights[projection] for projection in PROJECTIONS)
    problem = None
    if gate != up:
        problem = f"expected gate and up weight of one shape, found {list(gate)} and {list(up)}"
    elif len(gate) != 2 or down != gate[::-1]:
        problem = f"expected gate [I, H] and down [H, I], found {list(gate)} and {list(down)} per expert"
    elif hidden is not None and gate[1] != hidden:
        problem = f"expected gate [I, {hidden}] (hidden_size of config.json), found {list(gate)}"
    if problem and block.weight_dtype in WORDS:
        raise UnsupportedCheckpointError(
            f"{block.name}: {problem}, in {block.weight_dtype}, as weights packed below 8 bits are; expected 8 bits or "
            "more: convert the checkpoint before quantization"
        )
    if problem:
        raise BrokenCheckpointError(
            f"{block.name}: {problem}; fetch the config or the shard again, whichever is of another checkpoint"
        )


def _check_biases(block: LayoutBlock, weights: Shapes, biases: Shapes) -> None:
    for projection, bias in biases.items():
        if bias != weights[projection][:1]:
            raise BrokenCheckpointError(
                f"{block.name}: expected a bias [{weights[projection][0]}] for {projection}, a weight "
                f"{list(weights[projection])}, found {list(bias)} per expert; fetch the shards again"
            )


def _check_scales(block: LayoutBlock, weights: Shapes, shapes: Mapping[str, Shapes], size: tuple[int, int]) -> None:
    """Block scales have one row for each begun block of rows: ceil(I / 128) for gate."""
    if block.weight_dtype.startswith("F8_") and not {"weight_scale_inv", "weight_scale"}.intersection(shapes):
        raise BrokenCheckpointError(
            f"{block.name}: expected weight_scale_inv beside {block.weight_dtype} weights (weight_block_size "
            f"{list(size)} of config.json), found {', '.join(shapes)}; fetch the shards that hold the scales"
        )
    for projection, scale in shapes.get("weight_scale_inv", {}).items():
        weight = weights[projection]
        expected = [-(-n // b) for n, b in zip(weight, size, strict=True)]
        if list(scale) != expected:
            raise BrokenCheckpointError(
                f"{block.name}: expected scales {expected} for a weight {list(weight)} in blocks of {list(size)}, "
                f"found {list(scale)} for {projection}; fetch the config or the shard again"
            )
