"""What a user should know of a checkpoint that is no error: what could not be checked, and what is not kept."""

from __future__ import annotations

from collections.abc import Iterator

from fxoffload.checkpoints.check_experts import config_of, expected_layers
from fxoffload.checkpoints.config_values import block_size, counts_experts
from fxoffload.checkpoints.errors import ranges, some
from fxoffload.checkpoints.find_family import quantization_of
from fxoffload.checkpoints.layouts import Block, Experts, Layout
from fxoffload.checkpoints.slices import expert_shape


def source_notes(experts: Experts) -> tuple[str, ...]:
    """Of a checkpoint as it is, in sentences."""
    return (*_unchecked(experts), *_metadata(experts))


def output_notes(experts: Experts, layout: Layout, num_shards: int) -> tuple[str, ...]:
    """Of what becomes of it in ``layout``, in sentences."""
    return (*_index(experts, num_shards), *(_fused_scales(experts) if layout == "fused" else ()))


def _unchecked(experts: Experts) -> Iterator[str]:
    stems: dict[str, list[Block]] = {}
    for block in experts.blocks.values():
        stems.setdefault(block.stem, []).append(block)
    for stem, blocks in stems.items():
        tower = blocks[0].tower
        config = config_of(experts, tower)
        if not tower.optional and expected_layers(experts.family.layers, config) is None:
            reason = "a pattern" if experts.family.layers == "unchecked" else "config.json"
            found = ranges([block.layer for block in blocks])
            yield f"not checked: which layers of {stem} have experts, as {reason} does not say it; found {found}"
        if not counts_experts(config):
            yield (
                f"not checked: how many experts a layer of {stem} has, as config.json does not say it; found "
                f"{blocks[0].num_experts} in each"
            )


def _metadata(experts: Experts) -> Iterator[str]:
    checkpoint = experts.checkpoint
    if checkpoint.conflicts:
        yield f"not kept: metadata on which the shards differ ({some(checkpoint.conflicts)})"
    said = checkpoint.index_metadata.get("total_size", checkpoint.num_bytes)
    if said != checkpoint.num_bytes:
        yield f"the index says total_size {said!r}; the tensors have {checkpoint.num_bytes} bytes"


def _index(experts: Experts, num_shards: int) -> Iterator[str]:
    lost = sorted(key for key in experts.checkpoint.index_metadata if key not in ("total_size", "total_parameters"))
    if lost and num_shards == 1:
        yield f"not kept: the index's metadata ({some(lost)}), as a single file has no index"


def _fused_scales(experts: Experts) -> Iterator[str]:
    """transformers' FP8Experts allocates ceil(2I / b) rows of scales, and reads up's from the block they share."""
    for block in experts.blocks.values():
        size = block_size(quantization_of(experts.checkpoint.config, config_of(experts, block.tower)))
        weight = expert_shape(experts, block, "gate", "weight")
        if size is None or weight is None or ("down", "weight_scale_inv") not in block.tensors:
            continue
        rows, fitting = 2 * -(-weight[0] // size[0]), max(-(-2 * weight[0] // size[0]), 2)
        if rows != fitting:
            yield (
                f"gate has {weight[0]} rows, no multiple of the block of {size[0]}: gate_up_proj_scale_inv has {rows} "
                f"rows of scales, transformers expects {fitting} and cannot load it; give it the layout experts"
            )
            return
