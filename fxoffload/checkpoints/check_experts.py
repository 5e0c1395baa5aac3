"""Are all experts there, alike, and as the config says? Before anything is written."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fxoffload.checkpoints.check_parameters import check_parameters
from fxoffload.checkpoints.config_values import num_experts, whole_number, whole_numbers
from fxoffload.checkpoints.errors import BrokenCheckpointError, gaps, ranges, some
from fxoffload.checkpoints.families import Tower
from fxoffload.checkpoints.folder_name import about
from fxoffload.checkpoints.header import StoredTensor
from fxoffload.checkpoints.index import open_checkpoint
from fxoffload.checkpoints.layouts import Experts, LayoutBlock, detect
from fxoffload.checkpoints.slices import STORED

# More than any model has by far: a larger number is a mistake, and not worth a set of that size.
MOST_LAYERS = 100_000
MOST_EXPERTS = 100_000


def open_experts(folder: str | os.PathLike[str], pattern: str | None) -> Experts:
    """The checkpoint in ``folder``, read from headers and JSON. Raises CheckpointError, which names the folder."""
    with about(folder):
        experts = detect(open_checkpoint(folder), pattern)
        check_experts(experts)
        return experts


def check_experts(experts: Experts) -> None:
    """Raise BrokenCheckpointError for missing experts or layers, differing shapes or dtypes, a config that is wrong."""
    for block in experts.blocks.values():
        config = experts.config_of(block.tower)
        _check_complete(block, num_experts(config))
        for (projection, parameter), tensors in block.tensors.items():
            _check_alike(f"{block.name}: {projection} {parameter}", list(tensors.values()))
        check_parameters(experts, block, config)
    for stem in {block.stem for block in experts.blocks.values()}:
        _check_layers_alike([block for block in experts.blocks.values() if block.stem == stem])
    for tower in experts.family.towers:
        _check_layers(experts, tower)


def expected_layers(layers: str, config: Mapping[str, Any]) -> set[int] | None:
    """The layers that have experts according to ``config``, or None where it does not say.

    ``mlp_layer_types`` is a list of "dense" and "sparse" and goes first; else ``layers`` is a family's rule.
    """
    num_layers = whole_number(config, "num_hidden_layers")
    if num_layers is None or layers == "unchecked":
        return None
    if num_layers > MOST_LAYERS:
        raise BrokenCheckpointError(
            f"config.json: expected num_hidden_layers to be at most {MOST_LAYERS}, found {num_layers}; mend the config"
        )
    numbers = range(num_layers)
    types = config.get("mlp_layer_types")
    if isinstance(types, list):
        return {n for n in numbers if n < len(types) and types[n] == "sparse"}
    if layers == "sparse_step":
        dense = set(whole_numbers(config, "mlp_only_layers") or ())
        step = whole_number(config, "decoder_sparse_step") or 1
        return {n for n in numbers if n not in dense and (n + 1) % step == 0}
    if layers == "first_dense":
        first = whole_number(config, "first_k_dense_replace") or 0
        frequency = whole_number(config, "moe_layer_freq") or 1
        return {n for n in numbers if n >= first and n % frequency == 0}
    return set(numbers)


def _check_layers(experts: Experts, tower: Tower) -> None:
    """Layers from ``num_hidden_layers`` on are those of multi-token prediction; a checkpoint may leave them out."""
    config = experts.config_of(tower)
    expected = None if tower.optional else expected_layers(experts.family.layers, config)
    if expected is None or _switched_off(experts, tower) or _is_dense(experts, tower, config):
        return
    stem, found = _decoder(experts, tower, expected)
    where = f"layers of {stem or tower.prefix or 'the model'}"
    if expected - found:
        raise BrokenCheckpointError(
            f"{where}: expected experts in {ranges(expected)} (config.json), none in {ranges(expected - found)}; "
            "fetch the missing shards, or mend the config"
        )
    surplus = {layer for layer in found - expected if layer < config["num_hidden_layers"]}
    if surplus:
        raise BrokenCheckpointError(
            f"{where}: expected experts in {ranges(expected) or 'no layer'} only (config.json), found some in "
            f"{ranges(surplus)}; mend the config"
        )


def _switched_off(experts: Experts, tower: Tower) -> bool:
    """The config describes the tower and says that the checkpoint leaves it out."""
    return tower.switch is not None and (experts.checkpoint.config or {}).get(tower.switch) is False


def _is_dense(experts: Experts, tower: Tower, config: Mapping[str, Any]) -> bool:
    """No layer of the tower has experts, and the config does not count any."""
    return not num_experts(config) and all(block.tower != tower for block in experts.blocks.values())


def _decoder(experts: Experts, tower: Tower, expected: Collection[int]) -> tuple[str, set[int]]:
    """The module whose layers the config counts, of several with the tower's prefix, and its layers with experts.

    It is the one that has most of the expected ones: another module's layer 1 does not stand in for the decoder's.
    """
    layers: dict[str, set[int]] = {}
    for block in experts.blocks.values():
        if block.tower == tower:
            layers.setdefault(block.stem, set()).add(block.layer)
    return max(layers.items(), key=lambda item: len(item[1].intersection(expected)), default=("", set()))


def _check_layers_alike(blocks: list[LayoutBlock]) -> None:
    """The layers of one module have one number of experts, and the same parameters where weights are of one dtype."""
    first = blocks[0]
    for block in blocks:
        if block.num_experts != first.num_experts:
            raise BrokenCheckpointError(
                f"expected one number of experts in all layers of {first.stem}, found {first.num_experts} in "
                f"{first.name} and {block.num_experts} in {block.name}; fetch the shards that hold the others"
            )
    having: dict[str, tuple[LayoutBlock, set[str]]] = {}
    for block in blocks:
        parameters = {parameter for _, parameter in block.tensors}
        other, those = having.setdefault(block.weight_dtype, (block, parameters))
        if parameters != those:
            raise BrokenCheckpointError(
                f"expected the same parameters in all layers of {first.stem}, found {', '.join(sorted(those))} in "
                f"{other.name} and {', '.join(sorted(parameters))} in {block.name}; fetch the shards that hold the rest"
            )


def _check_complete(block: LayoutBlock, said: int | None) -> None:
    expected = block.num_experts if said is None else said
    if block.layout != "experts" and expected > MOST_EXPERTS:
        raise BrokenCheckpointError(
            f"{block.name}: expected at most {MOST_EXPERTS} experts, found {expected}; mend the config, or fetch the "
            "shard again, whichever is wrong"
        )
    source = "the highest number found" if said is None else "config.json"
    present = {projection for projection, _ in block.tensors}
    missing = [name for name in STORED[block.layout] if name not in present]
    if missing:
        raise BrokenCheckpointError(
            f"{block.name}: expected {', '.join(missing)} too, found {', '.join(sorted(present))}; "
            "fetch the shards that hold the rest"
        )
    if block.layout == "experts":
        for (projection, parameter), tensors in block.tensors.items():
            _check_numbers(f"{block.name}: {projection} {parameter}", tensors, expected, source)
        return
    for tensor in block.all_tensors():
        if not tensor.shape or tensor.shape[0] != expected:
            raise BrokenCheckpointError(
                f"{tensor.name}: expected {expected} experts ({source}), found shape "
                f"{list(tensor.shape)}; fetch the config or the shard again, whichever is of another checkpoint"
            )
        if not expected:
            raise BrokenCheckpointError(
                f"{tensor.name}: expected at least one expert, found shape {list(tensor.shape)}; "
                "remove it, as a layer without experts has no such tensor"
            )


def _check_numbers(what: str, tensors: Iterable[int | None], num_experts: int, source: str) -> None:
    found = {number for number in tensors if number is not None}
    above = {number for number in found if number >= num_experts}
    expected = f"expected experts 0-{num_experts - 1}" if num_experts else "expected no experts"
    if len(found) - len(above) < num_experts:
        raise BrokenCheckpointError(
            f"{what}: {expected} ({source}), missing {gaps(found, num_experts)}; fetch the shards that hold them"
        )
    if above:
        raise BrokenCheckpointError(f"{what}: {expected} ({source}), found {ranges(above)} too; mend the config")


def _check_alike(what: str, tensors: list[StoredTensor]) -> None:
    for kind, read in (("dtype", lambda t: t.dtype), ("shape", lambda t: list(t.shape))):
        first = read(tensors[0])
        other = [f"{read(t)} in {t.name}" for t in tensors if read(t) != first]
        if other:
            raise BrokenCheckpointError(
                f"{what}: expected one {kind} for all experts, found {first} in {tensors[0].name} and "
                f"{some(other)}; fetch the shards again that are of another checkpoint"
            )
