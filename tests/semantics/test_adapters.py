"""LoRA by peft: a frozen base and small adapters that train, with and without Hugging Face's gradient checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

import fxoffload
from tests.support import Observed, assert_close, assert_equal, assert_nothing_held

peft = pytest.importorskip("peft")

# transformers 5.17 checkpoints the call of a layer, which hides it from the compiler, later ones its forward.
HIDES_LAYERS = "__call__" in vars(GradientCheckpointingLayer)
LAYERS = 2
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def adapted(*, checkpointing: bool) -> Any:
    """Adapters in the attention and in the MLP, none of them zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(LlamaForCausalLM(config), lora).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def compile_in(model: Any, kind: str, **changes: Any) -> Any:
    options = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, **changes}
    layers: list[nn.Module] = [model] if kind == "whole" else list(model.base_model.model.model.layers)
    for layer in layers:
        layer.compile(backend="fxoffload", options=options)
    return model


def step(model: Any) -> Observed:
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradients = {n.replace("_orig_mod.", ""): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == LAYERS * 3 * 2
    return {"loss": loss.detach().clone(), **gradients}


@pytest.mark.slow_except("layers-True")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["whole", "layers"])
def test_gradients_of_adapters_do_not_depend_on_offloading(kind: str, checkpointing: bool) -> None:
    eager = step(adapted(checkpointing=checkpointing))
    model = compile_in(adapted(checkpointing=checkpointing), kind, policy="offload_all", in_flight_budget=1)
    found = [step(model)]
    fxoffload.reset_stats()
    found.append(step(model))
    assert_nothing_held()
    stats = fxoffload.stats()
    assert not stats.num_wrong_predictions
    if checkpointing and kind == "layers" and HIDES_LAYERS:
        assert stats.calls_kept and not stats.bytes_offloaded
    else:
        assert stats.bytes_offloaded == stats.bytes_reloaded > 0 and not stats.calls_kept
    with fxoffload.override_policy("keep_all"):
        kept = step(model)
    for observed in found:
        assert_equal(observed, kept)
    assert_close(kept, eager)


@pytest.mark.slow
def test_layers_with_adapters_are_planned_together() -> None:
    model = compile_in(adapted(checkpointing=False), "layers", activation_budget="1GiB")
    before = {p.graph for p in fxoffload.plans()}
    moved, found = [], []
    for _ in range(4):
        fxoffload.reset_stats()
        found.append(step(model))
        moved.append(fxoffload.stats().bytes_offloaded)
    assert [bool(n) for n in moved] == [True, True, False, False]
    (plan,) = [p for p in fxoffload.plans() if p.graph not in before]
    assert f"over {LAYERS} calls" in plan.summary
    for other in found[1:]:
        assert_equal(other, found[0])
