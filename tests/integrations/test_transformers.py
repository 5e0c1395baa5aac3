from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import fxoffload
from fxoffload.integrations.transformers import OffloadCallback
from fxoffload.torch_private.transformers import drop_input_hooks

CPU_OPTIONS: dict[str, Any] = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1}
VOCABULARY, SEQUENCE, NUM_STEPS = 97, 16, 3
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 0,
}


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 2 * NUM_STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (SEQUENCE,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(folder: Path, *, model: Qwen3ForCausalLM, policy: str) -> Trainer:
    args = TrainingArguments(output_dir=str(folder), max_steps=NUM_STEPS, **SETTINGS)
    callback = OffloadCallback(policy=policy, **CPU_OPTIONS)
    return Trainer(model, args, train_dataset=RandomTokens(), callbacks=[callback])


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_trainer_computes_the_same_with_offloading(tmp_path: Path) -> None:
    keeping = make_trainer(tmp_path, model=make_model(), policy="keep_all")
    keeping.train()
    assert fxoffload.stats().bytes_offloaded == 0

    torch.compiler.reset()
    fxoffload.reset_stats()
    offloading = make_trainer(tmp_path, model=make_model(), policy="offload_all")
    offloading.train()
    assert fxoffload.stats().bytes_offloaded > 0

    assert len(losses(offloading)) == NUM_STEPS
    assert all(math.isfinite(loss) for loss in losses(offloading))
    assert losses(offloading) == losses(keeping)
    kept = dict(keeping.model.named_parameters())
    for name, parameter in offloading.model.named_parameters():
        assert torch.equal(parameter, kept[name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*uncompiled")
def test_generation_leaves_training_its_graphs() -> None:
    """As GRPO does with transformers' generation: each prompt, each first and each later token has its own form."""
    model = make_model()
    model.compile(backend="fxoffload", options={**CPU_OPTIONS, "policy": "offload_all"})
    moved = []
    with torch._dynamo.config.patch(recompile_limit=3):  # type: ignore[attr-defined]
        for step in range(2):
            with torch.no_grad():
                prompt = torch.randint(6, VOCABULARY, (2 + step, 5 + 3 * step))
                found = model.eval().generate(prompt, max_new_tokens=3, do_sample=False, eos_token_id=None)
                model(found)
            before = fxoffload.stats().bytes_offloaded
            model.train()(input_ids=found, labels=found).loss.backward()
            moved.append(fxoffload.stats().bytes_offloaded - before)
    assert all(moved)
    assert set(fxoffload.stats().calls_uncompiled) == {"without gradients: recompile_limit"}


def fake_args(**values: Any) -> Any:
    return SimpleNamespace(**{"torch_compile": False, "n_gpu": 0, **values})


def begin(callback: OffloadCallback, model: torch.nn.Module | None, **args: Any) -> None:
    callback.on_train_begin(fake_args(**args), None, None, model=model)  # type: ignore[arg-type]


def test_the_model_is_compiled_once() -> None:
    model = torch.nn.Linear(2, 2)
    callback = OffloadCallback(**CPU_OPTIONS)
    begin(callback, model)
    compiled = model._compiled_call_impl
    assert compiled is not None
    begin(callback, model)
    begin(OffloadCallback(**CPU_OPTIONS), model)
    assert model._compiled_call_impl is compiled
    begin(OffloadCallback(policy="keep_all", **CPU_OPTIONS), model)
    assert model._compiled_call_impl is not compiled


def test_options_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="did you mean 'policy'"):
        OffloadCallback(polcy="keep_all")
    with pytest.raises(ValueError, match="min_bytes is -1"):
        OffloadCallback(min_bytes=-1)


def test_what_cannot_work_is_refused() -> None:
    callback = OffloadCallback(**CPU_OPTIONS)
    with pytest.raises(ValueError, match="torch_compile=True"):
        begin(callback, torch.nn.Linear(2, 2), torch_compile=True)
    with pytest.raises(NotImplementedError, match="2 GPUs with DataParallel"):
        begin(callback, torch.nn.Linear(2, 2), n_gpu=2)
    with pytest.raises(RuntimeError, match="without a model"):
        begin(callback, None)
    compiled = torch.nn.Linear(2, 2)
    compiled.compile(backend="eager")
    with pytest.raises(ValueError, match="already compiled"):
        begin(callback, compiled)
    with pytest.raises(ValueError, match=r"already compiled with torch.compile\(\); give the Trainer the model itself"):
        begin(callback, torch.compile(torch.nn.Linear(2, 2), backend="eager"))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_hooks_that_frozen_embeddings_do_not_need_are_removed(reentrant: bool, twice: bool) -> None:
    """PEFT and the Trainer each add one. Without them gradients are the same."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model(), config).train()
    tokens = RandomTokens()[0]["input_ids"][None]

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    for _ in range(1 + twice):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    before = gradients()
    assert before
    assert drop_input_hooks(model) == (0 if reentrant else 1 + twice)
    assert drop_input_hooks(model) == 0
    embeddings = model.get_input_embeddings()
    assert embeddings(tokens).requires_grad == reentrant
    after = gradients()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_the_callback_removes_them() -> None:
    """Before each training: the Trainer adds them each time."""
    model = make_model()
    args: Any = SimpleNamespace(torch_compile=False, n_gpu=0)
    for _ in range(2):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        embeddings = model.get_input_embeddings()
        assert embeddings._forward_hooks
        OffloadCallback(**CPU_OPTIONS)._compile(args, model)
        assert not embeddings._forward_hooks


@pytest.mark.slow
def test_a_hook_that_goes_leaves_one_graph() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model(), config).train()
    model.gradient_checkpointing_enable()
    tokens = RandomTokens()[0]["input_ids"][None]
    counts = []
    for _ in range(2):
        torch.compiler.reset()
        counts.append(torch._dynamo.explain(model)(input_ids=tokens, labels=tokens).graph_count)
        drop_input_hooks(model)
    assert counts[0] > counts[1] == 1


def test_without_checkpointing_a_hook_is_the_user_s() -> None:
    model = make_model()
    model.enable_input_require_grads()
    assert drop_input_hooks(model) == 0
    assert model.get_input_embeddings()._forward_hooks
