"""Small checkpoints in any layout, made with torch's stack, cat and transpose: the reference for the conversions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fxoffload.checkpoints.families import FAMILIES, PARAMETERS, Family

State = dict[str, torch.Tensor]
FAMILY = {family.name: family for family in FAMILIES}


@dataclass(frozen=True)
class Shape:
    """Sizes of a made checkpoint; ``block`` is the side of fp8's scaled blocks, 0 for no scales."""

    experts: int = 4
    hidden: int = 6
    intermediate: int = 5
    layers: tuple[int, ...] = (0, 1)
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    block: int = 0


TINY = Shape()
FP8 = replace(TINY, hidden=9, dtype=torch.float8_e4m3fn, block=4)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bits, NaNs and denormals too: a conversion must not look at them."""
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def expert_state(family: Family, shape: Shape, seed: int = 0, prefix: str = "model.layers.") -> State:
    """Experts in the layout of one tensor per expert, by Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer in shape.layers:
        for expert in range(shape.experts):
            for place, name in enumerate(family.projections):
                rows, columns = (shape.hidden, shape.intermediate)[:: 1 if place == 2 else -1]
                stem = f"{prefix}{layer}.{family.module}.{expert}.{name}"
                state[f"{stem}.weight"] = random_tensor((rows, columns), shape.dtype, generator)
                if shape.bias:
                    state[f"{stem}.bias"] = random_tensor((rows,), torch.float32, generator)
                if shape.block:
                    blocks = (-(-rows // shape.block), -(-columns // shape.block))
                    state[f"{stem}.weight_scale_inv"] = random_tensor(blocks, torch.float32, generator)
    return state


def other_state(shape: Shape, seed: int = 1) -> State:
    """What no conversion may touch: attention, a router and its float32 bias, shared experts, a dense layer."""
    generator = torch.Generator().manual_seed(seed)
    hidden = shape.hidden
    names: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "model.embed_tokens.weight": ((11, hidden), torch.bfloat16),
        "model.layers.0.mlp.gate.weight": ((shape.experts, hidden), torch.bfloat16),
        "model.layers.0.mlp.gate.e_score_correction_bias": ((shape.experts,), torch.float32),
        "model.layers.0.mlp.shared_experts.gate_proj.weight": ((3, hidden), torch.float16),
        "model.layers.7.mlp.gate_proj.weight": ((3, hidden), torch.bfloat16),
        "model.layers.0.self_attn.q_proj.weight": ((hidden, hidden), torch.bfloat16),
        "model.counter": ((), torch.int64),
        "model.empty": ((0, 3), torch.bfloat16),
    }
    return {name: random_tensor(size, dtype, generator) for name, (size, dtype) in names.items()}


def as_layout(family: Family, state: State, layout: str, form: str | None = None) -> State:
    """``state`` (one tensor per expert, and others) in another layout, by torch."""
    if layout == "experts":
        return dict(state)
    grouped: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    out = {}
    for name, tensor in state.items():
        head, found, tail = name.partition(f".{family.module}.")
        words = tail.split(".", 2)
        if not found or len(words) < 3 or words[1] not in family.projections:
            out[name] = tensor
            continue
        projection = ("gate", "up", "down")[family.projections.index(words[1])]
        grouped.setdefault((f"{head}.{family.module}", projection, words[2]), {})[int(words[0])] = tensor
    for (block, projection, parameter), tensors in grouped.items():
        stack = [tensors[expert] for expert in range(len(tensors))]
        suffix = PARAMETERS[parameter]
        if layout == "stacked":
            out[f"{block}.{projection}_proj{suffix}"] = stacked(stack)
        elif projection == "down":
            out[f"{block}.down_proj{suffix}"] = stacked([turned(t, form) for t in stack])
        elif projection == "gate":
            ups = grouped[block, "up", parameter]
            pairs = [joined(gate, ups[expert], form) for expert, gate in enumerate(stack)]
            out[f"{block}.gate_up_proj{suffix}"] = stacked(pairs)
    return out


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    dtype = tensors[0].dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.stack([t.contiguous().view(bits) for t in tensors]).view(dtype)


def turned(tensor: torch.Tensor, form: str | None) -> torch.Tensor:
    return tensor.t().contiguous() if form in ("transposed", "interleaved") and tensor.dim() == 2 else tensor


def joined(gate: torch.Tensor, up: torch.Tensor, form: str | None) -> torch.Tensor:
    """Gate above up, or their columns in turn."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[gate.dtype.itemsize]
    pair = [gate.view(bits), up.view(bits)]
    both = torch.stack(pair, dim=1).flatten(0, 1) if form == "interleaved" else torch.cat(pair)
    return turned(both, form).contiguous().view(gate.dtype)


def config_for(family: Family, shape: Shape, **more: Any) -> dict[str, Any]:
    quantization = {"quantization_config": {"weight_block_size": [shape.block] * 2}} if shape.block else {}
    return {
        "model_type": family.model_types[0],
        "hidden_size": shape.hidden,
        "num_hidden_layers": len(shape.layers),
        "num_experts": shape.experts,
        **quantization,
        **more,
    }


def save(
    folder: Path, state: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None, num_shards: int = 3
) -> Path:
    """A checkpoint folder as Hugging Face writes it, with files of every kind next to the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(state)
    if num_shards == 1:
        save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map = {}
        for number in range(num_shards):
            part = names[number::num_shards]
            shard = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
            save_file({n: state[n].contiguous() for n in part}, folder / shard, metadata={"format": "pt"})
            weight_map.update({name: shard for name in part})
        index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=3) + "\n \n")
    (folder / "tokenizer.json").write_bytes(bytes(range(256)))
    (folder / "modeling_own.py").write_text("raise SystemExit('remote code runs')\n")
    (folder / "assets").mkdir(exist_ok=True)
    (folder / "assets" / "LICENSE").write_bytes(b"\r\nyours\xff")
    return folder


def make(
    folder: Path, layout: str = "experts", family: str = "qwen3_moe", shape: Shape = TINY, form: str | None = None
) -> Path:
    """A checkpoint of a family in a layout."""
    chosen = FAMILY[family]
    form = form or chosen.forms[0]
    state = as_layout(chosen, expert_state(chosen, shape), layout, form) | other_state(shape)
    return save(folder, state, config_for(chosen, shape))


def load(folder: Path) -> State:
    """All tensors by the safetensors library, through the index where there is one; every file named is read."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    weight_map = None
    if index.exists():
        content = json.loads(index.read_text())
        weight_map = content["weight_map"]
        names = set(weight_map.values())
    state = {}
    for name in sorted(names):
        with safe_open(folder / name, "pt") as file:
            assert file.metadata()["format"] == "pt"
            for key in list(file.keys()):
                assert weight_map is None or weight_map[key] == name
                state[key] = file.get_tensor(key)
    if index.exists():
        assert content["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
        assert set(weight_map) == set(state)
    assert {p.name for p in folder.glob("*.safetensors")} == names
    return state


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*bits), name


def listing(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and its content."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
