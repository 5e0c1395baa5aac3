"""Architectures that ``zoo`` does not have, small, as their configurations make them by default.

Each has something that the others have not: another mixer of tokens, residuals in parallel, attention in chunks, a
router of its own, towers, convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf

from tests.models.zoo import BATCH, HEADS, HIDDEN, SEQUENCE, VOCABULARY, Built

LAYERS = 3

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": HIDDEN // HEADS}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
_TOWERS = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_OF_T5 = {
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
_IMAGES = {"image_size": 32, "num_channels": 3, "num_labels": 2}

# model_type -> its configuration; by what the model is made for.
CAUSAL: Mapping[str, Mapping[str, Any]] = {
    "bloom": {"n_layer": LAYERS, "n_head": HEADS},
    "cohere2": _GROUPED,
    "deepseek_v3": {**_LATENT, **_EXPERTS},
    "diffllama": _GROUPED,
    "falcon": {},
    "falcon_mamba": {"state_size": 8},
    "gemma4_text": {**_GROUPED, "vocab_size_per_layer_input": VOCABULARY},
    "glm4_moe": {**_GROUPED, **_EXPERTS},
    "gpt_neox": {},
    "gpt_oss": {**_GROUPED, **_EXPERTS},
    "gptj": {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "rotary_dim": 8, "n_positions": 64},
    "granitemoehybrid": {
        **_GROUPED,
        **_EXPERTS,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "jamba": {**_GROUPED, **_EXPERTS, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "lfm2": _GROUPED,
    "llama4_text": {**_GROUPED, **_EXPERTS, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    "minimax": {**_GROUPED, **_EXPERTS, "block_size": 8},
    "mpt": {"d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": 64},
    "nemotron_h": {**_GROUPED, **_EXPERTS},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": HIDDEN},
    "phimoe": {**_GROUPED, **_EXPERTS},
    "recurrent_gemma": {"lru_width": HIDDEN, "attention_window_size": 8, "num_key_value_heads": 1},
}
MASKED: Mapping[str, Mapping[str, Any]] = {
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "fnet": {},
    "longformer": {"attention_window": [8] * LAYERS},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8},
}
SEQ2SEQ: Mapping[str, Mapping[str, Any]] = {
    "bart": _TOWERS,
    "longt5": {**_OF_T5, "local_radius": 4},
    "switch_transformers": {**_OF_T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}
IMAGES: Mapping[str, Mapping[str, Any]] = {
    "convnext": {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 2]},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"},
    "siglip": {},
    "swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 2},
}
ARCHITECTURES = (*CAUSAL, *MASKED, *SEQ2SEQ, *IMAGES)


def build_architecture(name: str) -> Built:
    """A model in training mode, without dropout, and a batch for it; the same ones for the same name."""
    torch.manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE))
    batch = {"input_ids": tokens, "labels": tokens}
    if name in CAUSAL:
        model = hf.AutoModelForCausalLM.from_config(_config(name, CAUSAL))
    elif name in MASKED:
        model = hf.AutoModelForMaskedLM.from_config(_config(name, MASKED))
    elif name in SEQ2SEQ:
        model = hf.AutoModelForSeq2SeqLM.from_config(_config(name, SEQ2SEQ))
    else:
        model = hf.AutoModelForImageClassification.from_config(_image_config(name))
        batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.tensor([0, 1])}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return Built(model.train(), batch)


def _config(name: str, of: Mapping[str, Mapping[str, Any]]) -> Any:
    return hf.AutoConfig.for_model(name, **{**_COMMON, **of[name]})


def _image_config(name: str) -> Any:
    if name == "siglip":
        vision = {
            k: _COMMON[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        }
        return hf.SiglipConfig(vision_config={**vision, "image_size": 32, "patch_size": 8}, num_labels=2)
    return hf.AutoConfig.for_model(name, **_IMAGES, **IMAGES[name])
