"""What the tests of the phase integrations share: a small model, its training step and its log-probs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


def make_model() -> nn.Sequential:
    """Parameters, a tied pair and a buffer that training changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    return model


def batch(step: int) -> Tensor:
    """Another one for each step."""
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))


def log_probs(model: nn.Module, step: int) -> Tensor:
    """Without gradients, in eval mode."""
    model.eval()
    with torch.no_grad():
        return F.log_softmax(model(batch(step)), dim=-1)


def update(model: nn.Module, optimizers: Iterable[Any], step: int) -> float:
    """Forward, backward and one optimizer step, in train mode. Returns the loss."""
    model.train()
    loss = model(batch(step)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def bytes_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors that are at home; those that are emptied later have 0 bytes."""
    return [tensor.untyped_storage() for tensor in tensors]


def total(storages: Iterable[torch.UntypedStorage]) -> int:
    """Bytes in memory now."""
    return sum(storage.nbytes() for storage in storages)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor of an optimizer's state."""
    return [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
