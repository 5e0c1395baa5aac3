"""A stock model with its batch, its loss and AdamW, as Hugging Face's Trainer runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.job import Job
from benchmarks.schema import Case
from benchmarks.stock.models import CAUSAL, LORA, PACKED, PADDED, RL, SEQ2SEQ, SHARDED, STOCK_MODELS

NUM_PACKED = 4
IGNORED = -100  # a label that the loss leaves out
LORA_RANK = 16
ENTROPY_COEFFICIENT = 0.01


class StockModule(nn.Module):
    """A model of transformers, called with a batch by name. Returns the loss.

    Attributes:
        decoder: the model.
        call: what a step calls: the model, or the model compiled.
        names: of the batch's tensors, in the order of the positional arguments.
        settings: arguments that are no tensors.
    """

    def __init__(self, decoder: nn.Module, names: tuple[str, ...], settings: dict[str, Any]) -> None:
        super().__init__()
        self.decoder = decoder
        self.call: Callable[..., Any] = decoder.__call__
        self.names = names
        self.settings = settings

    def forward(self, *tensors: Tensor) -> Tensor:
        # As in the Trainer, the logits that the model returns are not held during the backward.
        return self.call(**dict(zip(self.names, tensors, strict=True)), **self.settings).loss


class PolicyModule(StockModule):
    """The loss of RL in eager code: log-probs and entropy of each token, from the logits that the model returns."""

    def forward(self, *tensors: Tensor) -> Tensor:
        ids, advantages = tensors
        logits = self.call(input_ids=ids, **self.settings).logits[:, :-1]
        log_probs, entropies = [], []
        for row, targets in zip(logits, ids[:, 1:], strict=True):  # by row, as TRL does: less memory at once
            of_row = F.log_softmax(row, dim=-1)
            log_probs.append(of_row.gather(-1, targets[:, None])[:, 0])
            entropies.append(-(of_row.exp() * of_row).sum(-1))
        policy = torch.stack(log_probs).float()
        ratio = torch.exp(policy - policy.detach())
        return -(ratio * advantages).mean() - ENTROPY_COEFFICIENT * torch.stack(entropies).float().mean()


class StockJob(Job):
    """Gradients are dropped before each step and AdamW steps after each backward, as ``Trainer`` has them.

    The learning rate is 0, so that all variants of a process have the same weights, and all of AdamW's work is done.
    """

    _optimizer: torch.optim.Optimizer | None = None

    def allocate_gradients(self) -> None:
        """AdamW's state exists before the first step. Gradients do not: the backward makes them."""
        if self._optimizer is not None:
            return
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)  # as the Trainer's default
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self.drop_gradients()

    def zero_gradients(self) -> None:
        self.drop_gradients()

    def finish_step(self) -> None:
        if self._optimizer is None:
            raise AssertionError("expected allocate_gradients() before the first step")
        self._optimizer.step()


def build_stock_job(case: Case, device: torch.device, rank: int = 0) -> StockJob:
    """The case on ``device``: transformers' own initial weights from the case's seed, other inputs on every rank."""
    model = STOCK_MODELS[case.name]
    config = getattr(transformers, model.config)(**model.settings(case))
    torch.manual_seed(case.seed)
    with device:
        decoder = getattr(transformers, model.auto).from_config(config, dtype=getattr(torch, case.dtype))
    if case.form == LORA:
        decoder = _with_lora(decoder, seq2seq=model.auto == SEQ2SEQ)
    generator = torch.Generator(device=device).manual_seed(case.seed + 1 + rank)
    batch = _batch(case, config, device, generator)
    # With a cache, the default, transformers does not look for packed sequences. Dynamo then compiles each layer anew,
    # up to its limit of 8, since the layer's number is its place in the cache. Transformers' Trainer has none.
    settings = {"use_cache": False} if case.form in (PACKED, SHARDED) else {}
    kind = PolicyModule if case.form == RL else StockModule
    module = kind(decoder, tuple(batch), settings).train()
    return StockJob(module, tuple(batch.values()))  # type: ignore[arg-type]


def _with_lora(decoder: nn.Module, *, seq2seq: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    task = "SEQ_2_SEQ_LM" if seq2seq else "CAUSAL_LM"
    return get_peft_model(decoder, LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type=task))  # type: ignore[arg-type]


# -- batches -----------------------------------------------------------------------------------------------------------


def _batch(case: Case, config: Any, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """The model's arguments by name."""
    auto = STOCK_MODELS[case.name].auto
    # The last words of the vocabulary are a vision model's own, the first is for padding.
    ids = torch.randint(1, case.vocab - 3, (case.batch, case.seq), device=device, generator=generator)
    if case.form == RL:
        return {"input_ids": ids, "advantages": torch.ones(case.batch, case.seq - 1, device=device)}
    batch = {"input_ids": ids, "labels": ids[:, : case.seq // 4].clone() if auto == SEQ2SEQ else ids.clone()}
    if case.form == PADDED:
        batch |= _padding(batch, case, device)
    if case.form == PACKED:
        batch["position_ids"] = _packed(case, device)
    if auto not in (CAUSAL, SEQ2SEQ):
        batch |= _images(batch["input_ids"], case, config, generator)
    return batch


def _padding(batch: dict[str, Tensor], case: Case, device: torch.device) -> dict[str, Tensor]:
    """Every second row is a quarter shorter, padded on the right; its labels there are left out."""
    mask = torch.ones(case.batch, case.seq, dtype=torch.long, device=device)
    mask[1::2, case.seq * 3 // 4 :] = 0
    labels = batch["labels"]
    kept = mask if labels.shape == mask.shape else mask[:, :: case.seq // labels.shape[1]][:, : labels.shape[1]]
    return {
        "input_ids": batch["input_ids"].masked_fill(mask == 0, 0),
        "labels": labels.masked_fill(kept == 0, IGNORED),
        "attention_mask": mask,
    }


def _packed(case: Case, device: torch.device) -> Tensor:
    """Positions of four sequences, one after another, the last of them longer."""
    length = case.seq // (NUM_PACKED + 1)
    lengths = [length] * (NUM_PACKED - 1)
    parts = [torch.arange(n, device=device) for n in [*lengths, case.seq - sum(lengths)]]
    return torch.cat(parts).expand(case.batch, -1).contiguous()


def _images(ids: Tensor, case: Case, config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """One image at the beginning of each row."""
    vision, count = config.vision_config, config.mm_tokens_per_image
    ids = ids.clone()
    ids[:, 1 : 1 + count] = config.image_token_index
    shape = (case.batch, 3, vision.image_size, vision.image_size)
    pixels = torch.randn(shape, device=ids.device, generator=generator).to(getattr(torch, case.dtype))
    is_image = ids == config.image_token_index
    labels = ids.masked_fill(is_image, IGNORED)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels, "token_type_ids": is_image.long()}
