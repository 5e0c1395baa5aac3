"""Gradients of logits that do not come, and then do: bits, and the memory that is not taken without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, Qwen3Config

import fxoffload
from tests.gpu.gpu_support import deterministic

pytestmark = pytest.mark.gpu

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(n_layer=2),
    "qwen3": lambda: Qwen3Config(
        num_hidden_layers=2,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    ),
}


def step(model: nn.Module, run: Callable[..., object], words: Tensor, *, with_logits: bool) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    found = run(input_ids=words, labels=words)
    loss = found.loss  # type: ignore[attr-defined]
    if with_logits:
        loss = loss + found.logits.float().square().mean()  # type: ignore[attr-defined]
    del found
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_logits(name: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16).to("cuda").train()
    words = torch.randint(0, 50257, (2, 1024), device="cuda")
    with deterministic():
        run = torch.compile(model, backend="fxoffload", options={"policy": "offload_all", "min_bytes": 1 << 16})
        for with_logits in (False, True, False):
            found = step(model, run, words, with_logits=with_logits)
            with fxoffload.override_policy("keep_all"):
                kept = step(model, run, words, with_logits=with_logits)
            assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
            assert fxoffload.stats().bytes_offloaded > 0
            if name == "qwen3":  # has no dropout
                eager = step(model, model, words, with_logits=with_logits)
                for one, other in zip(found, eager, strict=True):
                    assert (one.float() - other.float()).norm() <= 0.05 * other.float().norm()


def test_no_memory_is_taken_for_them() -> None:
    """A step whose gradients come takes at least theirs more."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"](), dtype=torch.bfloat16).to("cuda").train()
    words = torch.randint(0, 50257, (2, 1024), device="cuda")
    run = torch.compile(model, backend="fxoffload", options={"policy": "offload_all", "min_bytes": 1 << 16})
    peaks = []
    for with_logits in (False, True):
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(model, run, words, with_logits=with_logits)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
    assert peaks[1] - peaks[0] >= 2 * 1024 * model.config.vocab_size * 2  # the logits' gradient, in bfloat16
