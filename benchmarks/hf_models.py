"""Published Hugging Face configurations by name, as data: nothing is downloaded, weights are random.

A case of such a name is the whole language model with its own cross-entropy (as ``causal_lm``). Sizes that are fields
of ``Case`` may be overridden (``layers=8 seq=4096``); the rest is as published. Nothing here imports torch.
"""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.schema import Case


@dataclass(frozen=True)
class HFModel:
    """Classes of transformers, the published sizes, and the configuration's values that are no field of ``Case``."""

    config_class: str
    model_class: str
    case: Case
    settings: dict[str, Any] = field(default_factory=dict)


HF_MODELS = {
    model.case.name: model
    for model in (
        HFModel(
            "Qwen3Config",
            "Qwen3ForCausalLM",
            Case(
                name="Qwen3-8B",
                layers=36,
                seq=8192,
                hidden=4096,
                ffn=12_288,
                heads=32,
                kv_heads=8,
                head_dim=128,
                vocab=151_936,
            ),
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        ),
        HFModel(
            "LlamaConfig",
            "LlamaForCausalLM",
            Case(
                name="Llama-3.1-8B",
                layers=32,
                seq=8192,
                hidden=4096,
                ffn=14_336,
                heads=32,
                kv_heads=8,
                head_dim=128,
                vocab=128_256,
            ),
            {
                "rms_norm_eps": 1e-5,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
        ),
        # `ffn` is one expert's.
        HFModel(
            "Qwen3MoeConfig",
            "Qwen3MoeForCausalLM",
            Case(
                name="Qwen3-30B-A3B",
                layers=48,
                seq=8192,
                hidden=2048,
                ffn=768,
                heads=32,
                kv_heads=4,
                head_dim=128,
                vocab=151_936,
                experts=128,
                experts_per_token=8,
            ),
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        ),
        HFModel(
            "Gemma3TextConfig",
            "Gemma3ForCausalLM",
            Case(
                name="Gemma-3-12B",
                layers=48,
                seq=8192,
                hidden=3840,
                ffn=15_360,
                heads=16,
                kv_heads=8,
                head_dim=256,
                vocab=262_208,
            ),
            {
                "tie_word_embeddings": True,
                "query_pre_attn_scalar": 256,
                "sliding_window": 1024,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                },
            },
        ),
    )
}


def has_head(case: Case) -> bool:
    """Whether the case is a language model with its loss, from token ids; else decoder layers from embeddings."""
    return case.name == "causal_lm" or case.name in HF_MODELS
