"""GPT-2's vocabulary of 50,257 words: Inductor pads the head's product, so logits are a slice of a wider matrix.

Under deterministic algorithms attention with dropout is the memory-efficient kernel, whose seed is on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from transformers import AutoModelForCausalLM, GPT2Config

import fxoffload
from tests.gpu.gpu_support import deterministic

pytestmark = pytest.mark.gpu


def step(model: nn.Module, run: Callable[..., Any], words: Tensor) -> tuple[list[Tensor], Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    found = run(input_ids=words, labels=words)
    found.loss.backward()
    return [found.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)], found.logits


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_stock_gpt2(dynamic: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=3), dtype=torch.bfloat16).to("cuda").train()
    options: dict[str, Any] = {"policy": "offload_all"} if dynamic else {}
    with deterministic(), inductor_config.patch(force_shape_pad=True):  # else it depends on a race of two kernels
        run = torch.compile(model, backend="fxoffload", dynamic=dynamic, options=options)
        for rows, length in ((4, 512), (3, 384)) if dynamic else ((4, 512),):
            words = torch.randint(0, 50257, (rows, length), device="cuda")
            for _ in range(2):
                step(model, run, words)
            found, logits = step(model, run, words)
            with fxoffload.override_policy("keep_all"):
                kept, _ = step(model, run, words)
            assert logits.stride(1) > 50257, "the case does not show what it is for"
            assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
            assert fxoffload.stats().bytes_offloaded > 0
