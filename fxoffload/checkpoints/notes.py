"""Notes to the user about a checkpoint that are no errors: checks that could not be made, data that is not kept."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fxoffload.checkpoints.check_experts import expected_layers
from fxoffload.checkpoints.config_values import block_size, counts_experts, num_experts
from fxoffload.checkpoints.errors import ranges, shortened, some
from fxoffload.checkpoints.find_family import quantization_of
from fxoffload.checkpoints.layouts import Experts, LayoutBlock
from fxoffload.checkpoints.plan_conversion import Targets
from fxoffload.checkpoints.slices import expert_shape

MOST_NAMED = 20
_LIKE_EXPERTS = re.compile(r"(?:^|\.)experts\.")


def source_notes(experts: Experts) -> tuple[str, ...]:
    """Of a checkpoint as it is, in sentences."""
    return (*_outside_the_index(experts), *_unread(experts), *_unchecked(experts), *_metadata(experts))


def output_notes(experts: Experts, targets: Targets, num_shards: int) -> tuple[str, ...]:
    """About the output, in sentences."""
    lost = sorted(experts.checkpoint.kept_metadata) if num_shards == 1 else []
    index = [f"not kept: the index's metadata ({some(lost)}), as a single file has no index"] if lost else []
    return (*index, *_fused_scales(experts, targets))


def verification_notes(source: Experts, output: Experts) -> tuple[str, ...]:
    """About parts that were not compared tensor by tensor, or not at all, in sentences."""
    notes = []
    if source.checkpoint.foreign:
        notes.append(
            f"compared byte by byte, and not as tensors of the model: {some(source.checkpoint.foreign, MOST_NAMED)}"
        )
    for experts in (source, output):
        if conflicts := experts.checkpoint.conflicts:
            notes.append(
                f"not compared: metadata on which the shards of {experts.checkpoint.folder} differ ({some(conflicts)})"
            )
    with_index = [experts.checkpoint.has_index for experts in (source, output)]
    if with_index != [True, True] and any(experts.checkpoint.kept_metadata for experts in (source, output)):
        notes.append("not compared: the index's metadata, as a single file has no index")
    return tuple(notes)


def _outside_the_index(experts: Experts) -> Iterator[str]:
    checkpoint = experts.checkpoint
    for path in checkpoint.extras:
        count = sum(tensor.path == path for tensor in checkpoint.tensors.values())
        yield (
            f"the index does not name {path.name}, whose {count} tensors are the model's: they are converted, into a "
            "file of that name"
        )
    by_reason: dict[str, list[str]] = {}
    for name, reason in checkpoint.foreign.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        yield f"not converted, but copied as it is: {some(names, MOST_NAMED)}, as {reason}"


def _unread(experts: Experts) -> Iterator[str]:
    unread = [name for name in experts.others if _LIKE_EXPERTS.search(name)]
    if unread:
        yield (
            f"not converted, but copied as they are: {len(unread)} tensors under 'experts' whose names are not those "
            f"of {experts.family.name} ({some(unread)})"
        )


def _unchecked(experts: Experts) -> Iterator[str]:
    stems: dict[str, list[LayoutBlock]] = {}
    for block in experts.blocks.values():
        stems.setdefault(block.stem, []).append(block)
    for stem, blocks in stems.items():
        tower = blocks[0].tower
        config = experts.config_of(tower)
        if not tower.optional and expected_layers(experts.family.layers, config) is None:
            reason = "a pattern" if experts.family.layers == "unchecked" else "config.json"
            found = ranges([block.layer for block in blocks])
            yield f"not checked: which layers of {stem} have experts, as {reason} does not say it; found {found}"
        if not counts_experts(config):
            yield (
                f"not checked: how many experts a layer of {stem} has, as config.json does not say it; found "
                f"{blocks[0].num_experts} in each"
            )
    present = {block.tower for block in experts.blocks.values()}
    for tower in experts.family.towers:
        config = experts.config_of(tower)
        described = not tower.optional and expected_layers(experts.family.layers, config) is not None
        if tower not in present and described and num_experts(config) is None:
            yield f"not checked: whether {tower.prefix or 'the decoder'} lost experts, as config.json counts none of it"


def _metadata(experts: Experts) -> Iterator[str]:
    checkpoint = experts.checkpoint
    if checkpoint.conflicts:
        yield f"not kept: metadata on which the shards differ ({some(checkpoint.conflicts)})"
    num_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values() if tensor.path not in checkpoint.extras)
    said = checkpoint.index_metadata.get("total_size", num_bytes)
    if said != num_bytes:
        yield f"the index says total_size {shortened(said)}; the tensors have {num_bytes} bytes"


def _fused_scales(experts: Experts, targets: Targets) -> Iterator[str]:
    """transformers' FP8Experts allocates ceil(2I / b) rows of scales, and reads up's from the block they share."""
    for block in experts.blocks.values():
        size = block_size(quantization_of(experts.checkpoint.config, experts.config_of(block.tower)))
        weight = expert_shape(block, "gate", "weight")
        if (
            targets[block.name].layout != "fused"
            or size is None
            or weight is None
            or ("down", "weight_scale_inv") not in block.tensors
        ):
            continue
        rows, fitting = 2 * -(-weight[0] // size[0]), max(-(-2 * weight[0] // size[0]), 2)
        if rows != fitting:
            yield (
                f"gate has {weight[0]} rows, no multiple of the block of {size[0]}: gate_up_proj_scale_inv has {rows} "
                f"rows of scales, transformers expects {fitting} and cannot load it; give it the layout experts"
            )
            return
