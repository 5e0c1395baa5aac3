"""The stock cases as data: configurations of transformers by class, and the forms in which each is trained.

Everything that is not written here is transformers' default: attention, experts, cache, initial weights. A case has the
published sizes with fewer layers where parameters, gradients and AdamW's state would not fit one GPU of 80 GB.
Sizes of a case may be overridden (``layers=2 hidden=64``). Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.schema import Case

LORA, CHECKPOINTING, PADDED, PACKED, RL, SHARDED = "lora", "checkpointing", "padded", "packed", "rl", "fsdp"
WITHOUT_PACKING = (LORA, CHECKPOINTING, PADDED)
DECODER = (*WITHOUT_PACKING, PACKED)

CAUSAL, IMAGE_TEXT, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM"


@dataclass(frozen=True)
class StockModel:
    """A model of transformers.

    Attributes:
        config: its configuration's class.
        case: its name and sizes.
        settings: what the configuration is called with, besides ``decoder_sizes`` of a causal model.
        auto: transformers' class that makes it.
        forms: in which it is trained, besides the plain one.
    """

    config: str
    case: Case
    settings: Callable[[Case], dict[str, Any]]
    auto: str = CAUSAL
    forms: tuple[str, ...] = DECODER


def decoder_sizes(case: Case) -> dict[str, Any]:
    """The sizes that decoders of transformers call alike."""
    return {
        "vocab_size": case.vocab,
        "hidden_size": case.hidden,
        "intermediate_size": case.ffn,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": case.head_dim,
    }


def _qwen3_moe(case: Case) -> dict[str, Any]:
    return {
        **decoder_sizes(case),
        "moe_intermediate_size": case.ffn,
        "num_experts": case.experts,
        "num_experts_per_tok": case.experts_per_token,
    }


def _gemma3(case: Case) -> dict[str, Any]:
    window = min(1024, case.seq // 4)
    return {**decoder_sizes(case), "query_pre_attn_scalar": case.head_dim, "sliding_window": window}


def _gpt_oss(case: Case) -> dict[str, Any]:
    experts = {"num_local_experts": case.experts, "num_experts_per_tok": case.experts_per_token}
    return {**decoder_sizes(case), **experts, "sliding_window": min(128, case.seq // 4)}


def _gemma3_image(case: Case) -> dict[str, Any]:
    small = case.hidden < 512  # a rehearsal
    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    small_sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = {"image_size": 28 if small else 896, "patch_size": 14}
    return {
        "text_config": _gemma3(case),
        "vision_config": {**(small_sizes if small else sizes), **image},
        "mm_tokens_per_image": 4 if small else 256,
        "image_token_index": case.vocab - 1,
        "boi_token_index": case.vocab - 2,
        "eoi_token_index": case.vocab - 3,
    }


def _t5(case: Case) -> dict[str, Any]:
    return {
        "vocab_size": case.vocab,
        "d_model": case.hidden,
        "d_kv": case.head_dim,
        "d_ff": case.ffn,
        "num_layers": case.layers,
        "num_heads": case.heads,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }


def _gpt2(case: Case) -> dict[str, Any]:
    return {
        "vocab_size": case.vocab,
        "n_embd": case.hidden,
        "n_inner": case.ffn,
        "n_layer": case.layers,
        "n_head": case.heads,
        "n_positions": case.seq,
    }


def _case(name: str, layers: int, seq: int, hidden: int, ffn: int, heads: str, vocab: int, **more: Any) -> Case:
    """``heads``: "queries/keys of width"; ``more``: other fields of ``Case``."""
    counts, width = heads.split(" of ")
    queries, keys = counts.split("/")
    return Case(
        name=name,
        layers=layers,
        seq=seq,
        hidden=hidden,
        ffn=ffn,
        heads=int(queries),
        kv_heads=int(keys),
        head_dim=int(width),
        vocab=vocab,
        **more,
    )


STOCK_MODELS = {
    model.case.name: model
    for model in (
        StockModel(
            "Qwen3Config",
            _case("qwen3", 8, 8192, 4096, 12_288, "32/8 of 128", 151_936),
            decoder_sizes,
            forms=(*DECODER, RL, SHARDED),
        ),
        # Llama 3.2-3B, all of it.
        StockModel(
            "LlamaConfig",
            _case("llama-3b", 28, 8192, 3072, 8192, "24/8 of 128", 128_256),
            lambda case: {**decoder_sizes(case), "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        ),
        # One layer of Qwen3-30B-A3B has 0.63e9 parameters.
        StockModel(
            "Qwen3MoeConfig",
            _case("qwen3-moe", 6, 8192, 2048, 768, "32/4 of 128", 151_936, experts=128, experts_per_token=8),
            _qwen3_moe,
        ),
        # The language model of Gemma-3-12B: windows of 1,024 tokens in five of six layers.
        StockModel("Gemma3TextConfig", _case("gemma-3", 12, 8192, 3840, 15_360, "16/8 of 256", 262_208), _gemma3),
        # Its eager attention (sinks) has 64 x S x S scores, several times over in each layer: 0.5 GiB a tensor here.
        StockModel(
            "GptOssConfig",
            _case("gpt-oss", 4, 2048, 2880, 2880, "64/8 of 64", 201_088, experts=32, experts_per_token=4),
            _gpt_oss,
        ),
        # A window of 4,096 tokens, as MistralConfig has it.
        StockModel(
            "MistralConfig",
            _case("mistral", 12, 8192, 4096, 14_336, "32/8 of 128", 32_000),
            lambda case: {**decoder_sizes(case), "sliding_window": min(4096, case.seq // 2)},
        ),
        # Gemma-3-4B with its vision tower of 27 layers, one image of 256 tokens in each row.
        StockModel(
            "Gemma3Config",
            _case("gemma-3-image", 12, 8192, 2560, 10_240, "8/4 of 256", 262_208),
            _gemma3_image,
            IMAGE_TEXT,
            WITHOUT_PACKING,
        ),
        # GPT-2, all of it: the smallest model that newcomers try, with dropout and 50,257 words, no multiple of 8.
        StockModel("GPT2Config", _case("gpt2", 12, 1024, 768, 3072, "12/12 of 64", 50_257, batch=16), _gpt2),
        # T5 v1.1 large: encoder and decoder of 24 layers each; labels are a quarter as long as the input.
        StockModel(
            "T5Config",
            _case("t5", 24, 2048, 1024, 2816, "16/16 of 64", 32_128, batch=4),
            _t5,
            SEQ2SEQ,
            WITHOUT_PACKING,
        ),
    )
}


def case_of(model: StockModel, form: str) -> Case:
    """A model's case in one form. Padded batches have two rows of half the length."""
    case = dataclasses.replace(model.case, form=form)
    if form == PADDED and case.batch == 1:
        case = dataclasses.replace(case, batch=2, seq=case.seq // 2)
    return dataclasses.replace(case, layers=16) if form == SHARDED else case


# By the names that `--set case=` takes: "qwen3", "qwen3-lora", ...
STOCK_CASES = {
    f"{name}-{form}" if form else name: case_of(model, form)
    for name, model in STOCK_MODELS.items()
    for form in ("", *model.forms)
}
SHARDED_CASES = [name for name, case in STOCK_CASES.items() if case.form == SHARDED]
WHOLE_CASES = [name for name in STOCK_CASES if name not in SHARDED_CASES]


def is_stock(case: Case) -> bool:
    """Whether the case is a model of transformers with its defaults."""
    return case.name in STOCK_MODELS
