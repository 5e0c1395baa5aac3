"""Optimizers whose steps are on the device: capturable ones, whose step counts leave and return with the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxoffload.phases import OffloadedError, PhaseManager

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{"capturable": True}, {"capturable": True, "foreach": False}, {"fused": True}])
def test_capturable(options: dict[str, Any]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, device="cuda")
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device="cuda"), **options)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(4, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    (model, optimizer), (expected, expected_optimizer) = build(), build()
    train(model, optimizer)
    train(expected, expected_optimizer)
    steps = [entry["step"] for entry in optimizer.state.values()]
    assert {step.device.type for step in steps} == {"cuda"}
    manager = PhaseManager(model, optimizer)
    for _ in range(3):
        manager.enter("rollout")
        with pytest.raises(OffloadedError):
            optimizer.step()
        manager.enter("train")
        train(model, optimizer)
        train(expected, expected_optimizer)
    manager.onload()
    assert [step.item() for step in steps] == [4.0] * len(steps)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    manager.close()
