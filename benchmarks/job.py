"""Stacks of decoder layers, and a workload with its inputs, ready to run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    PreTrainedModel,
    Qwen3Model,
    Qwen3MoeModel,
)


class Stack(nn.Module):
    """The decoder layers alone, from embeddings, with a linear loss inside the compiled region.

    The loss projects the final, normalised states on a fixed direction. The mean of their squares would be useless: an
    RMSNorm makes it constant, so its gradient is rounding noise.
    """

    probe: torch.Tensor

    def __init__(self, decoder: Qwen3Model | Qwen3MoeModel) -> None:
        super().__init__()
        self.decoder = decoder
        weight = decoder.norm.weight
        self.register_buffer("probe", torch.ones_like(weight, requires_grad=False))

    def forward(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        states = self.decoder(inputs_embeds=inputs_embeds, use_cache=False).last_hidden_state
        return torch.mv(states.reshape(-1, states.shape[-1]), self.probe).float().mean()


class CausalLM(nn.Module):
    """The whole language model with its built-in cross-entropy; the logits are not returned."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.decoder(input_ids=input_ids, labels=labels, use_cache=False).loss


Workload = Stack | CausalLM


@dataclass
class Job:
    """A workload with its fixed inputs and every leaf that collects a gradient in place."""

    module: Workload
    inputs: tuple[torch.Tensor, ...]

    def leaves(self) -> dict[str, torch.Tensor]:
        """Trainable parameters, and inputs that want a gradient (as an embedding's output would)."""
        parameters = ((clean_name(name), p) for name, p in self.module.named_parameters())
        inputs = ((f"input{index}", tensor) for index, tensor in enumerate(self.inputs))
        named: dict[str, torch.Tensor] = dict(parameters) | dict(inputs)
        return {name: leaf for name, leaf in named.items() if leaf.requires_grad}

    def allocate_gradients(self) -> None:
        """Gradients accumulate in place from the first step on, as in gradient accumulation. What exists stays."""
        for leaf in self.leaves().values():
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)

    def drop_gradients(self) -> None:
        """As ``zero_grad(set_to_none=True)``: the backward's own tensors become the gradients."""
        for leaf in self.leaves().values():
            leaf.grad = None

    def finish_step(self) -> None:
        """After the backward; an optimizer where the case has one."""

    def zero_gradients(self) -> None:
        for name, leaf in self.leaves().items():
            if leaf.grad is None:
                raise AssertionError(f"expected a gradient buffer for {name}, found none")
            leaf.grad.zero_()


def clean_name(name: str) -> str:
    """The parameter's name without what wrappers add, so that variants can be compared."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
