"""The models under test: Hugging Face's with seeded weights, reduced to ``module(*inputs) -> scalar loss``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeModel,
)

from benchmarks.hf_models import HF_MODELS, HFModel, has_head
from benchmarks.job import CausalLM, Job, Stack, Workload
from benchmarks.schema import Case
from benchmarks.stock.models import decoder_sizes, is_stock
from fxoffload.integrations.causal_attention import CAUSAL_ATTENTION

# Of "grouped_mm", "batched_mm" and "eager": the last breaks the graph at every layer, the second gathers a weight
# matrix per token and expert. Under torch.compile grouped_mm is a kernel in bfloat16; in float32 a loop inside an op.
EXPERTS = "grouped_mm"


def decoder_layers(module: Workload) -> nn.ModuleList:
    """The decoder layers, wherever the model keeps them."""
    for path in ("layers", "model.layers"):
        try:
            found = module.decoder.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(found, nn.ModuleList):
            return found
    raise AssertionError(f"expected decoder layers in {type(module.decoder).__name__}, found none")


def build_job(case: Case, device: torch.device, rank: int = 0) -> Job:
    """The case on ``device``: same weights on every rank, different inputs."""
    if is_stock(case):
        from benchmarks.stock.workload import build_stock_job

        return build_stock_job(case, device, rank)
    dtype = getattr(torch, case.dtype)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            module = _module(case)
    finally:
        torch.set_default_dtype(default)
    if isinstance(module, Stack):
        module.decoder.set_input_embeddings(nn.Identity())
    generator = torch.Generator(device=device).manual_seed(case.seed)
    _fill_weights(module, generator)
    module.train()
    generator.manual_seed(case.seed + 1 + rank)
    return Job(module, _inputs(case, device, dtype, generator))


def with_length(job: Job, case: Case, device: torch.device) -> Job:
    """The same module with inputs of the case's length."""
    generator = torch.Generator(device=device).manual_seed(case.seed + 1)
    return Job(job.module, _inputs(case, device, getattr(torch, case.dtype), generator))


def _module(case: Case) -> Workload:
    if case.name in HF_MODELS:
        return CausalLM(_language_model(HF_MODELS[case.name], case))
    if case.experts:
        return Stack(Qwen3MoeModel(_moe_config(case)))
    config = Qwen3Config(**_sizes(case))
    config._attn_implementation = CAUSAL_ATTENTION
    return CausalLM(Qwen3ForCausalLM(config)) if case.name == "causal_lm" else Stack(Qwen3Model(config))


def _language_model(model: HFModel, case: Case) -> PreTrainedModel:
    settings = _sizes(case) | (_expert_sizes(case) if case.experts else {}) | model.settings
    config = getattr(transformers, model.config_class)(**settings)
    config._attn_implementation = CAUSAL_ATTENTION
    if case.experts:
        config._experts_implementation = EXPERTS
    return getattr(transformers, model.model_class)(config)


def _expert_sizes(case: Case) -> dict[str, Any]:
    return {
        "moe_intermediate_size": case.ffn,
        "num_experts": case.experts,
        "num_experts_per_tok": case.experts_per_token,
        "norm_topk_prob": True,
    }


def _moe_config(case: Case) -> Qwen3MoeConfig:
    config = Qwen3MoeConfig(**_sizes(case), **_expert_sizes(case))
    config._attn_implementation = CAUSAL_ATTENTION
    config._experts_implementation = EXPERTS
    return config


def _sizes(case: Case) -> dict[str, Any]:
    return {
        **decoder_sizes(case),
        "max_position_embeddings": max(case.seq, 32768),
        "use_cache": False,
        "tie_word_embeddings": False,
    }


@torch.no_grad()
def _fill_weights(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)
    if isinstance(module, Stack):
        module.probe.normal_(0.0, 1.0, generator=generator)


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    if not has_head(case):
        shape = (case.batch, case.seq, case.hidden)
        return (torch.randn(shape, dtype=dtype, device=device, generator=generator).requires_grad_(),)
    ids = torch.randint(case.vocab, (case.batch, case.seq), device=device, generator=generator)
    return ids, ids.clone()
