"""Are all experts there, alike, and as the config says? Before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fxoffload.checkpoints.errors import BrokenCheckpointError, ranges, some
from fxoffload.checkpoints.families import PROJECTIONS, Tower
from fxoffload.checkpoints.find_family import section_of
from fxoffload.checkpoints.header import StoredTensor
from fxoffload.checkpoints.layouts import Block, Experts
from fxoffload.checkpoints.slices import expert_shape, stored_projections


def check_experts(experts: Experts) -> None:
    """Raise BrokenCheckpointError for missing experts or layers, differing shapes or dtypes, a config that is wrong."""
    for block in experts.blocks.values():
        config = _config_of(experts, block.tower)
        _check_complete(experts, block, config.get(experts.family.num_experts))
        for (projection, parameter), tensors in block.tensors.items():
            _check_alike(f"{block.name}: {projection} {parameter}", list(tensors.values()))
        _check_projections(experts, block, config)
    for tower in experts.family.towers:
        _check_layers(experts, tower)


def expected_layers(layers: str, config: Mapping[str, Any]) -> set[int] | None:
    """The layers that have experts according to ``config``, or None where it does not say.

    ``mlp_layer_types`` is a list of "dense" and "sparse" and goes first; else ``layers`` is a family's rule.
    """
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or layers == "unchecked":
        return None
    numbers = range(num_layers)
    types = config.get("mlp_layer_types")
    if isinstance(types, list):
        return {n for n in numbers if n < len(types) and types[n] == "sparse"}
    if layers == "sparse_step":
        dense = set(config.get("mlp_only_layers") or ())
        step = config.get("decoder_sparse_step") or 1
        return {n for n in numbers if n not in dense and (n + 1) % step == 0}
    if layers == "first_dense":
        first = config.get("first_k_dense_replace") or 0
        frequency = config.get("moe_layer_freq") or 1
        return {n for n in numbers if n >= first and n % frequency == 0}
    return set(numbers)


def _config_of(experts: Experts, tower: Tower) -> Mapping[str, Any]:
    section = experts.section if tower.section is None else tower.section
    return section_of(experts.checkpoint.config or {}, section)


def _check_layers(experts: Experts, tower: Tower) -> None:
    """Layers from ``num_hidden_layers`` on are those of multi-token prediction; a checkpoint may leave them out."""
    config = _config_of(experts, tower)
    expected = None if tower.optional else expected_layers(experts.family.layers, config)
    found = {block.layer for block in experts.blocks.values() if block.tower == tower}
    if expected is None or (not found and tower.prefix):
        return
    where = f"layers of {tower.prefix or 'the model'}"
    if expected - found:
        raise BrokenCheckpointError(
            f"{where}: expected experts in {ranges(expected)} (config.json), none in {ranges(expected - found)}; "
            "fetch the missing shards, or mend the config"
        )
    surplus = {layer for layer in found - expected if layer < config["num_hidden_layers"]}
    if surplus:
        raise BrokenCheckpointError(
            f"{where}: expected experts in {ranges(expected)} only (config.json), found some in {ranges(surplus)}; "
            "mend the config"
        )


def _check_complete(experts: Experts, block: Block, said: object) -> None:
    num_experts = said if isinstance(said, int) else block.num_experts
    source = "config.json" if isinstance(said, int) else "the highest number found"
    present = {projection for projection, _ in block.tensors}
    missing = [name for name in stored_projections(experts.layout) if name not in present]
    if missing:
        raise BrokenCheckpointError(
            f"{block.name}: expected {', '.join(missing)} too, found {', '.join(sorted(present))}"
        )
    if experts.layout == "experts":
        for (projection, parameter), tensors in block.tensors.items():
            _check_numbers(f"{block.name}: {projection} {parameter}", tensors, num_experts, source)
        return
    for tensor in block.all_tensors():
        if not tensor.shape or tensor.shape[0] != num_experts:
            raise BrokenCheckpointError(
                f"{tensor.name}: expected {num_experts} experts ({source}), found shape {list(tensor.shape)}"
            )


def _check_numbers(what: str, tensors: Iterable[int | None], num_experts: int, source: str) -> None:
    found = {number for number in tensors if number is not None}
    expected = set(range(num_experts))
    if expected - found:
        raise BrokenCheckpointError(
            f"{what}: expected experts 0-{num_experts - 1} ({source}), missing {ranges(expected - found)}; "
            "fetch the shards that hold them"
        )
    if found - expected:
        raise BrokenCheckpointError(
            f"{what}: expected experts 0-{num_experts - 1} ({source}), found {ranges(found - expected)} too; "
            "mend the config"
        )


def _check_alike(what: str, tensors: list[StoredTensor]) -> None:
    for kind, read in (("dtype", lambda t: t.dtype), ("shape", lambda t: list(t.shape))):
        first = read(tensors[0])
        other = [f"{read(t)} in {t.name}" for t in tensors if read(t) != first]
        if other:
            raise BrokenCheckpointError(
                f"{what}: expected one {kind} for all experts, found {first} in {tensors[0].name} and {some(other)}"
            )


def _check_projections(experts: Experts, block: Block, config: Mapping[str, Any]) -> None:
    """gate and up are alike, down is their transpose, and every parameter is there for all three."""
    parameters = {parameter for _, parameter in block.tensors}
    for parameter in parameters:
        shapes = {p: expert_shape(experts, block, p, parameter) for p in PROJECTIONS}
        absent = [p for p, shape in shapes.items() if shape is None]
        if absent:
            raise BrokenCheckpointError(
                f"{block.name}: expected {parameter} for gate, up and down, found none for {', '.join(absent)}"
            )
        gate, up, down = (shapes[p] or () for p in PROJECTIONS)
        if gate != up:
            raise BrokenCheckpointError(
                f"{block.name}: expected gate and up {parameter} of one shape, found {list(gate)} and {list(up)}"
            )
        if parameter == "weight" and (len(gate) != 2 or down != gate[::-1]):
            raise BrokenCheckpointError(
                f"{block.name}: expected gate [I, H] and down [H, I], found {list(gate)} and {list(down)} per expert"
            )
    if "weight" not in parameters:
        raise BrokenCheckpointError(f"{block.name}: expected weights, found only {', '.join(sorted(parameters))}")
    weight = expert_shape(experts, block, "gate", "weight") or (0, 0)
    hidden = config.get("hidden_size")
    if isinstance(hidden, int) and weight[1] != hidden:
        raise BrokenCheckpointError(
            f"{block.name}: expected gate [I, {hidden}] (hidden_size of config.json), found {list(weight)}"
        )
    _check_blocks(experts, block, weight)


def _check_blocks(experts: Experts, block: Block, weight: tuple[int, ...]) -> None:
    """Block scales have one row for each begun block of rows: ceil(I / 128) for gate."""
    quantization = (experts.checkpoint.config or {}).get("quantization_config") or {}
    size = quantization.get("weight_block_size")
    scale = expert_shape(experts, block, "gate", "weight_scale_inv")
    if not isinstance(size, list) or len(size) != 2 or scale is None or len(scale) != 2:
        return
    expected = tuple(-(-n // b) for n, b in zip(weight, size, strict=True))
    if scale != expected:
        raise BrokenCheckpointError(
            f"{block.name}: expected scales {list(expected)} for a weight {list(weight)} in blocks of {size}, "
            f"found {list(scale)}"
        )
