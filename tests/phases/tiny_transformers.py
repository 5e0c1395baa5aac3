"""Small models of all families that transformers has, with random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

MAPPINGS: tuple[Any, ...] = (
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    auto.MODEL_FOR_MASKED_LM_MAPPING,
    auto.MODEL_MAPPING,
)
_SIZES = {
    64: "hidden_size d_model n_embd embed_dim dim model_dim embed_size",
    32: "intermediate_size moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp ffn_dim d_ff "
    "encoder_ffn_dim decoder_ffn_dim n_inner",
    16: "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim q_lora_rank kv_lora_rank",
    8: "patch_size",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts num_attention_heads encoder_attention_heads "
    "decoder_attention_heads n_head num_heads",
    2: "num_hidden_layers encoder_layers decoder_layers n_layer depth num_layers num_decoder_layers "
    "num_key_value_heads num_experts_per_tok top_k moe_topk moe_k",
    1: "n_group topk_group first_k_dense_replace",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
# Settings of the families besides small sizes.
_ALSO: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling2_loop_text": {"unpadded_vocab_size": 250},
    "inkling2_text": {"unpadded_vocab_size": 250},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_model(model_type: str, **also: Any) -> PreTrainedModel:
    """A model whose config has small sizes instead of its defaults.

    Raises:
        Exception: whatever a model raises that cannot be made as small as that.
    """
    model_class, config = _class_and_config(model_type, also)
    torch.manual_seed(0)
    return model_class(config)


def tiny_families(most_parameters: int) -> Iterator[tuple[str, PreTrainedModel]]:
    """All that can be made small, and saved, by the type of their model."""
    for model_type in CONFIG_MAPPING:
        try:
            model_class, config = _class_and_config(model_type, {})
            with torch.device("meta"):
                model = model_class(config)
            config.validate()
        except Exception:
            continue
        if sum(parameter.numel() for parameter in model.parameters()) <= most_parameters:
            yield model_type, tiny_model(model_type)


def _class_and_config(model_type: str, also: dict[str, Any]) -> tuple[Any, PreTrainedConfig]:
    kind = CONFIG_MAPPING[model_type]
    model_class = next(mapping[kind] for mapping in MAPPINGS if kind in mapping)
    config = kind()
    _shrink(config)
    for name, value in (_ALSO.get(model_type, {}) | also).items():
        setattr(config, name, value)
    return model_class[0] if isinstance(model_class, tuple) else model_class, config


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """What ``save_pretrained`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


def _shrink(config: PreTrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _shrink(value)
        elif isinstance(value, list) and name in ("layer_types", "mlp_layer_types", "layers_block_type"):
            setattr(config, name, value[:2])
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, _size(name, value))


def _size(name: str, value: int) -> int:
    if name in _SIZE_OF:
        return min(value, _SIZE_OF[name])
    if name.endswith(("token_id", "token_index")):
        return min(value, 7)
    if name == "vocab_size":
        return 256
    return 32 if "image_size" in name else min(value, 4096)
