"""A synthetic MoE checkpoint of Qwen3-30B-A3B's shape, with as many layers as fit the size asked for."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fxoffload.checkpoints.header import build_header, num_bytes_of

HIDDEN, INTERMEDIATE, EXPERTS, VOCABULARY = 2048, 768, 128, 151_936
SHARD_BYTES = 5_000_000_000
Tensor = tuple[str, str, tuple[int, ...]]


def write_checkpoint(folder: Path, num_bytes: int, scale: int = 1) -> int:
    """Write about ``num_bytes`` of random weights, one tensor per expert; ``scale`` divides every side. The bytes."""
    folder.mkdir(parents=True)
    hidden, intermediate, vocabulary = HIDDEN // scale, INTERMEDIATE // scale, VOCABULARY // scale
    head: list[Tensor] = [("model.embed_tokens.weight", "BF16", (vocabulary, hidden))]
    per_layer = sum(num_bytes_of(dtype, shape) for _, dtype, shape in _layer(0, hidden, intermediate))
    room = num_bytes - sum(num_bytes_of(dtype, shape) for _, dtype, shape in head)
    layers = max(1, round(room / per_layer))
    tensors = head + [tensor for layer in range(layers) for tensor in _layer(layer, hidden, intermediate)]
    shards = list(_shards(tensors))
    random = np.random.default_rng(0)
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(build_header(shard, {"format": "pt"}))
            for _, dtype, shape in shard:
                file.write(random.bytes(num_bytes_of(dtype, shape)))
                total += num_bytes_of(dtype, shape)
        weight_map.update({tensor[0]: name for tensor in shard})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": layers, "num_experts": EXPERTS}
    (folder / "config.json").write_text(json.dumps(config))
    return total


def _layer(layer: int, hidden: int, intermediate: int) -> Iterator[Tensor]:
    stem = f"model.layers.{layer}"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield f"{stem}.self_attn.{name}.weight", "BF16", (hidden, hidden)
    yield f"{stem}.mlp.gate.weight", "F32", (EXPERTS, hidden)
    # Experts in the order of their names, as Hugging Face's files have them.
    for expert, name in itertools.product(sorted(range(EXPERTS), key=str), ("down_proj", "gate_proj", "up_proj")):
        shape = (hidden, intermediate) if name == "down_proj" else (intermediate, hidden)
        yield f"{stem}.mlp.experts.{expert}.{name}.weight", "BF16", shape


def _shards(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    shard: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        size = num_bytes_of(tensor[1], tensor[2])
        if shard and filled + size > SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size
    yield shard
