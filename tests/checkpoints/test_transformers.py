"""The result loads: tiny models of each family from their configs, saved, converted, loaded, with equal logits."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxoffload import checkpoints
from fxoffload.checkpoints.families import FAMILIES
from tests.checkpoints.making import FAMILY, State, as_layout, assert_same, load, save

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
}
LATENT = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
AUDIO = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "output_dim": 16,
    "num_mel_bins": 16,
    "downsample_hidden_size": 8,
}


def text_model(config: str, **more: Any) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**SIZES, **more}))


def multimodal(model: str, config: str, **sections: Any) -> torch.nn.Module:
    text = {**SIZES, **ROPE, "num_experts": 4}
    chosen = getattr(transformers, config)(text_config=text, vision_config=VISION, **sections)
    return getattr(transformers, model)(chosen)


# name: (family, how to build it)
MODELS: dict[str, tuple[str, Callable[[], torch.nn.Module]]] = {
    "qwen2_moe": (
        "qwen2_moe",
        lambda: text_model("Qwen2MoeConfig", num_experts=4, shared_expert_intermediate_size=8, mlp_only_layers=[1]),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        lambda: text_model("Qwen3MoeConfig", num_experts=4, decoder_sparse_step=2, num_hidden_layers=4),
    ),
    "deepseek_v2": ("deepseek_v2", lambda: text_model("DeepseekV2Config", **LATENT)),
    "deepseek_v3": ("deepseek_v3", lambda: text_model("DeepseekV3Config", **LATENT)),
    "glm4_moe": (
        "glm4_moe",
        lambda: text_model("Glm4MoeConfig", n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1),
    ),
    "mixtral": ("mixtral", lambda: text_model("MixtralConfig", num_local_experts=4)),
    "olmoe": ("olmoe", lambda: text_model("OlmoeConfig", num_experts=4)),
    "gpt_oss": ("gpt_oss", lambda: text_model("GptOssConfig", num_local_experts=4, sliding_window=8)),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        lambda: multimodal("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig"),
    ),
    "qwen3_omni_moe": (
        "qwen3_omni_moe",
        lambda: multimodal(
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            "Qwen3OmniMoeThinkerConfig",
            audio_config=AUDIO,
            vision_start_token_id=60,
        ),
    ),
}
# transformers has no rule that merges single experts of these two: it writes and reads them fused.
FUSED_ON_DISK = ("gpt_oss", "qwen3_vl_moe")


@pytest.fixture(scope="module", params=sorted(MODELS))
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, torch.nn.Module, Path]:
    """A model's name, the model, and what ``save_pretrained`` writes, in several shards."""
    torch.manual_seed(0)
    model = MODELS[request.param][1]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)  # no two experts alike, and no router undecided
    folder = tmp_path_factory.mktemp(request.param) / "saved"
    model.save_pretrained(folder, max_shard_size="20KB")
    return request.param, model, folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(24).reshape(2, 12) % 50
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def fill_experts(model: torch.nn.Module, name: str, state: State) -> int:
    """Load fused experts into the modules' own parameters by name; how many were filled."""
    module = FAMILY[MODELS[name][0]].module
    filled = 0
    for path, experts in model.named_modules():
        if not path.endswith(".experts") or not hasattr(experts, "gate_up_proj"):
            continue
        on_disk = path.replace("mlp.experts", module)
        own = {parameter: find(state, f"{on_disk}.{parameter}") for parameter in experts.state_dict()}
        experts.load_state_dict(own, strict=True)
        filled += len(own)
    return filled


def find(state: State, name: str) -> torch.Tensor:
    """The tensor of that name from "layers." on: a part of a model is saved with another beginning."""
    tail = name[name.index("layers.") :]
    (found,) = (tensor for key, tensor in state.items() if key.endswith(tail))
    return found


def forget_experts(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose experts are NaN: whoever is not loaded is seen."""
    empty = copy.deepcopy(model)
    for path, parameter in empty.named_parameters():
        if ".experts." in path:
            torch.nn.init.constant_(parameter, float("nan"))
    assert logits(empty).isnan().any()
    return empty


def test_what_transformers_writes_is_read(saved: tuple[str, torch.nn.Module, Path]) -> None:
    name, _, folder = saved
    found = checkpoints.inspect(folder)
    assert found.family == MODELS[name][0]
    assert found.layout == ("fused" if name in FUSED_ON_DISK else "experts")
    assert {tower.num_experts for tower in found.towers} == {4}
    assert found.num_shards > 1
    assert found.notes == ()  # all of it was checked


@pytest.mark.parametrize("part", ["expert", "layer"])
def test_what_is_missing_of_what_transformers_writes(
    saved: tuple[str, torch.nn.Module, Path], tmp_path: Path, part: str
) -> None:
    """The last one: nothing but the config says that there is another."""
    _, _, folder = saved
    state = load(folder)
    layers = {int(number) for key in state for number in re.findall(r"layers\.(\d+)\..*experts\.", key)}
    if part == "layer":
        last = rf"layers\.{max(layers)}\..*experts\."
        kept = {key: tensor for key, tensor in state.items() if not re.search(last, key)}
    else:
        kept = {
            key: tensor[:3] if re.search(r"\.experts\.[a-z]", key) else tensor
            for key, tensor in state.items()
            if ".experts.3." not in key
        }
    assert sum(tensor.numel() for tensor in kept.values()) < sum(tensor.numel() for tensor in state.values())
    source = save(tmp_path / "source", kept, json.loads((folder / "config.json").read_text()))
    with pytest.raises(checkpoints.BrokenCheckpointError, match=r"config\.json"):
        checkpoints.inspect(source)


@pytest.mark.parametrize("between", ["stacked", "fused"])
def test_experts_load_with_from_pretrained(
    saved: tuple[str, torch.nn.Module, Path], tmp_path: Path, between: str
) -> None:
    """There and back; where transformers stores fused experts, so does the way back."""
    name, model, folder = saved
    to = "fused" if name in FUSED_ON_DISK else "experts"
    between = "experts" if to == "fused" and between == "fused" else between
    form = "concatenated" if name == "qwen3_vl_moe" else None
    checkpoints.convert(folder, tmp_path / "between", between, verify=True)
    checkpoints.convert(tmp_path / "between", tmp_path / "back", to, verify=True, form=form)
    loaded = type(model).from_pretrained(tmp_path / "back").eval()
    assert torch.equal(logits(loaded), logits(model))
    assert_same(load(tmp_path / "back"), load(folder))


def test_fused_experts_load_with_from_pretrained_too(saved: tuple[str, torch.nn.Module, Path], tmp_path: Path) -> None:
    """transformers 5 keeps experts fused in memory, by these names; it reads both forms of Qwen3-VL."""
    name, model, folder = saved
    for form in FAMILY[MODELS[name][0]].forms:
        if name in FUSED_ON_DISK:
            checkpoints.convert(folder, tmp_path / f"stacked-{form}", "stacked")
        source = tmp_path / f"stacked-{form}" if name in FUSED_ON_DISK else folder
        checkpoints.convert(source, tmp_path / form, "fused", form=form)
        loaded = type(model).from_pretrained(tmp_path / form).eval()
        assert torch.equal(logits(loaded), logits(model))


def test_stacked_experts_have_the_documented_shapes(saved: tuple[str, torch.nn.Module, Path], tmp_path: Path) -> None:
    """Gate and up side by side are what the modules hold."""
    name, model, folder = saved
    checkpoints.convert(folder, tmp_path / "stacked", "stacked")
    state = load(tmp_path / "stacked")
    forms = {"gpt_oss": "interleaved"}
    fused: State = {}
    for key, tensor in state.items():
        block, _, parameter = key.rpartition(".")
        if parameter in ("gate_proj", "gate_proj_bias") and block.endswith("experts"):
            up = state[f"{block}.up_proj{parameter.removeprefix('gate_proj')}"]
            pairs = torch.stack([tensor, up], 2).flatten(1, 2) if name in forms else torch.cat([tensor, up], 1)
            fused[f"{block}.gate_up_proj{parameter.removeprefix('gate_proj')}"] = turned(pairs, name)
        elif block.endswith("experts") and parameter.startswith("down_proj"):
            fused[key] = turned(tensor, name)
            assert tensor.shape[:2] == (4, 16)
    empty = forget_experts(model)
    assert fill_experts(empty, name, fused) == len(fused)
    assert torch.equal(logits(empty), logits(model))


def turned(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor.transpose(1, 2) if name == "gpt_oss" and tensor.dim() == 3 else tensor


def test_the_families_of_the_qwen_rule_are_those_of_transformers() -> None:
    """Our table against transformers' own: names of single experts, and their fused names."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    own = ("qwen3_vl_moe", "qwen3_5_moe", "gpt_oss")
    checked = 0
    for family in FAMILIES:
        for model_type in family.model_types:
            rules = get_checkpoint_conversion_mapping(model_type)
            if family.name in own or rules is None or model_type in ("kimi_k2",):
                continue
            sources = {pattern for rule in rules for pattern in rule.source_patterns if ".experts.*." in pattern}
            tails = {pattern.split(".experts.*.")[1].removesuffix(".weight") for pattern in sources}
            assert tails == set(family.projections), model_type
            checked += 1
    assert checked > 15


def test_reference_and_transformers_agree(saved: tuple[str, torch.nn.Module, Path]) -> None:
    """The reference of the other tests makes what transformers holds in memory."""
    name, model, folder = saved
    if name in FUSED_ON_DISK:
        pytest.skip("transformers writes these as it holds them")
    family = FAMILY[MODELS[name][0]]
    empty = forget_experts(model)
    fill_experts(empty, name, as_layout(family, load(folder), "fused", "concatenated"))
    assert torch.equal(logits(empty), logits(model))


@pytest.mark.parametrize("layout", ["stacked", "fused"])
def test_what_mixtral_holds_in_memory_is_read_and_loads(tmp_path: Path, layout: str) -> None:
    """Saved as state_dict() has it, without the renaming of save_pretrained."""
    torch.manual_seed(0)
    model = MODELS["mixtral"][1]().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save(tmp_path / "memory", state, model.config.to_dict())
    source = tmp_path / "memory"
    if layout == "stacked":
        source = tmp_path / "stacked"
        checkpoints.convert(tmp_path / "memory", source, "stacked", verify=True)
    checkpoints.split(source, tmp_path / "single", verify=True)
    loaded = type(model).from_pretrained(tmp_path / "single").eval()
    assert torch.equal(logits(loaded), logits(model))
