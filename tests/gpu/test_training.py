"""Real models trained for real steps, with the default windows: same losses, gradients and weights as keeping all."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fxoffload
from tests.gpu.gpu_support import build, deterministic, differing, disturbed, engine, fresh_input, gradients, sleep

pytestmark = pytest.mark.gpu

VOCABULARY, TOKENS, NUM_STEPS = 8192, 2048, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "use_cache": False,
}


def _causal_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register("gpu_tests_causal", _causal_attention)
    torch.manual_seed(0)
    config = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[name](**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="gpu_tests_causal", dtype=torch.bfloat16
    )
    return model.to("cuda").train()


def _train(model: nn.Module, step: Callable[..., Any], initial: dict[str, Any]) -> list[Tensor]:
    """Loss and gradients of every step, and the weights at the end."""
    model.load_state_dict(initial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen: list[Tensor] = []
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0)).cuda()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = step(input_ids=tokens, labels=tokens).loss
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return seen + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_training_is_bit_equal_to_keeping(name: str) -> None:
    model = _model(name)
    initial = copy.deepcopy(model.state_dict())
    step = torch.compile(model, backend="fxoffload", options={"policy": "offload_all", "min_bytes": 1})
    with deterministic():
        _train(model, step, initial)
        with fxoffload.override_policy("keep_all"):
            kept = _train(model, step, initial)
        fxoffload.reset_stats()
        with disturbed(1):
            offloaded = _train(model, step, initial)
    assert differing(kept, offloaded) == 0
    losses = [float(x) for x in offloaded if x.dim() == 0]
    assert losses[-1] < losses[0], "nothing was learned"
    stats = fxoffload.stats()
    assert stats.num_segments_compiled == 0
    assert stats.bytes_offloaded == stats.bytes_reloaded + stats.bytes_reclaimed > NUM_STEPS * 2 * TOKENS * 512 * 6 * 10
    assert (stats.num_groups_on_tape, stats.host_bytes_in_use) == (0, 0)


def test_default_windows_over_10_delay_schedules() -> None:
    """Reclaimed and reloaded values, donated buffers and microbatches, with every copy delayed."""
    model = build()
    step = torch.compile(model, backend="fxoffload", options={"policy": "offload_all", "min_bytes": 1})

    def microbatches(seed: int) -> Tensor:
        first, second = step(fresh_input(seed)), step(fresh_input(seed + 1))
        second.backward()
        return first

    with deterministic():
        gradients(model, lambda: microbatches(0))
        for seed in range(10):
            with fxoffload.override_policy("keep_all"):
                expected = gradients(model, lambda s=seed: microbatches(s))
            with disturbed(seed):
                sleep(5.0)
                found = gradients(model, lambda s=seed: microbatches(s))
            assert differing(expected, found) == 0, f"schedule {seed}"
    stats = fxoffload.stats()
    assert min(stats.bytes_reclaimed, stats.bytes_reloaded) > 0
    assert stats.bytes_reclaimed + stats.bytes_reloaded == stats.bytes_offloaded


def test_under_save_on_cpu_with_pinned_memory_the_call_keeps_everything() -> None:
    model = build(2)
    step = torch.compile(model, backend="fxoffload", options={"policy": "offload_all", "min_bytes": 1})
    with deterministic():
        gradients(model, lambda: step(fresh_input(1)))
        x = fresh_input(2)
        with fxoffload.override_policy("keep_all"):
            expected = gradients(model, lambda: step(x))
        fxoffload.reset_stats()

        def saved_on_cpu() -> Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return step(x)

        found = gradients(model, saved_on_cpu)
    assert differing(expected, found) == 0
    assert fxoffload.stats().calls_kept == {"saved-tensor hooks": 1}
    assert fxoffload.stats().bytes_offloaded == 0
    assert engine().save_order.live() == []


class Tokens(Dataset[Tensor]):
    """Made in the workers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        gc.collect()  # as any worker does at some time
        return torch.full((TOKENS,), index)


def test_data_loaders_fork_workers_behind_steps_that_offload() -> None:
    """As every epoch and every evaluation does: offloaded values have left events in the host memory's free ranges, and
    a forked child that destroys a CUDA event is aborted."""
    model = _model("qwen3")
    initial = copy.deepcopy(model.state_dict())
    step = torch.compile(model, backend="fxoffload", options={"policy": "offload_all", "min_bytes": 1})
    with deterministic():
        first = _train(model, step, initial)
        loader = DataLoader(Tokens(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        for _ in range(2):
            assert [int(row[0]) for batch in loader for row in batch] == list(range(8))
            assert differing(first, _train(model, step, initial)) == 0
