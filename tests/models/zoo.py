"""Tiny models with random weights, from configurations: hidden 32, a few layers, 16 tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCABULARY, HIDDEN, HEADS, BATCH, SEQUENCE = 97, 32, 4, 2, 16

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // HEADS,
    "use_cache": False,
}
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
}
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Built:
    """A model and one batch for it."""

    model: nn.Module
    batch: Mapping[str, Tensor]

    def loss(self, model: Callable[..., Any] | None = None) -> Tensor:
        """The loss of ``model`` (default: the model itself, eagerly) on the batch."""
        return (self.model if model is None else model)(**self.batch).loss


def _tokens(**extra: Tensor) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    return {"input_ids": tokens, "labels": tokens, **extra}


def _causal(config: Any) -> Built:
    return Built(hf.AutoModelForCausalLM.from_config(config), _tokens())


def _masked(config: Any) -> Built:
    return Built(hf.AutoModelForMaskedLM.from_config(config), _tokens())


def _qwen3(layers: int, p: float, **extra: Any) -> Built:
    return _causal(hf.Qwen3Config(**_DECODER, num_hidden_layers=layers, attention_dropout=p, **extra))


def _llama(layers: int, p: float, **extra: Any) -> Built:
    return _causal(hf.LlamaConfig(**_DECODER, num_hidden_layers=layers, attention_dropout=p, **extra))


def _gemma2(layers: int, p: float, **extra: Any) -> Built:
    config = hf.Gemma2Config(
        **_DECODER, num_hidden_layers=layers, attention_dropout=p, sliding_window=8, query_pre_attn_scalar=8, **extra
    )
    return _causal(config)


def _gemma3(layers: int, p: float, **extra: Any) -> Built:
    # Sliding and full attention in turns: the default (every sixth layer is full) needs more layers to repeat.
    kinds = ["sliding_attention" if i % 2 else "full_attention" for i in range(layers)]
    config = hf.Gemma3TextConfig(
        **_DECODER,
        num_hidden_layers=layers,
        attention_dropout=p,
        sliding_window=8,
        query_pre_attn_scalar=8,
        layer_types=kinds,
        **extra,
    )
    return _causal(config)


def _qwen3_moe(layers: int, p: float, **extra: Any) -> Built:
    config = hf.Qwen3MoeConfig(**_DECODER, **_MOE, num_hidden_layers=layers, attention_dropout=p, **extra)
    # Mixtral has the default, grouped_mm.
    return Built(hf.AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm"), _tokens())


def _mixtral(layers: int, p: float, **extra: Any) -> Built:
    return _causal(hf.MixtralConfig(**_DECODER, **_MOE, num_hidden_layers=layers, attention_dropout=p, **extra))


def _gpt2(layers: int, p: float, **extra: Any) -> Built:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=layers,
        n_head=HEADS,
        n_positions=64,
        resid_pdrop=p,
        embd_pdrop=p,
        attn_pdrop=p,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **extra,
    )
    return _causal(config)


def _bert(layers: int, p: float, **extra: Any) -> Built:
    dropout = {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}
    return _masked(hf.BertConfig(**_ENCODER, **dropout, num_hidden_layers=layers, **extra))


def _albert(layers: int, p: float, **extra: Any) -> Built:
    dropout = {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}
    return _masked(hf.AlbertConfig(**_ENCODER, **dropout, embedding_size=16, num_hidden_layers=layers, **extra))


def _t5(layers: int, p: float, **extra: Any) -> Built:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=64,
        num_layers=layers,
        num_heads=HEADS,
        dropout_rate=p,
        use_cache=False,
        decoder_start_token_id=0,
        **extra,
    )
    return Built(hf.AutoModelForSeq2SeqLM.from_config(config), _tokens())


def _vit(layers: int, p: float, **extra: Any) -> Built:
    config = hf.ViTConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=p,
        attention_probs_dropout_prob=p,
        **extra,
    )
    batch = {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return Built(hf.AutoModelForImageClassification.from_config(config), batch)


_BUILDERS: dict[str, Callable[..., Built]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "gpt2": _gpt2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "t5": _t5,
    "vit": _vit,
    "bert": _bert,
    "albert": _albert,
}
MODELS = tuple(_BUILDERS)


def build(name: str, *, layers: int = 3, dropout: float = 0.0, seed: int = 0, **extra: Any) -> Built:
    """A model in training mode with a batch; the same weights and batch for the same arguments."""
    torch.manual_seed(seed)
    built = _BUILDERS[name](layers, dropout, **extra)
    built.model.train()
    return built
