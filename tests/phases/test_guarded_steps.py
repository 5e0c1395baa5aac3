"""What an optimizer keeps outside of ``state``, and loading its state, while that is away or on its way back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases import OffloadedError, Where
from fxoffload.phases.guarding.sentinel import is_away, untouched

from .delayed import DelayedCopies
from .phase_support import nothing_starts_in_the_background, rehearse


class Fused(torch.optim.AdamW):
    """As apex and TransformerEngine have it: a tensor of its own goes to kernels that no class stops."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._dummy_overflow_buf = torch.tensor([7])
        self.found: list[tuple[bool, int]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with untouched():
            buffer = self._dummy_overflow_buf
            self.found.append((is_away(buffer), buffer.item() if buffer.untyped_storage().nbytes() else 0))
        super().step(closure)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)])


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).square().sum().backward()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("started", [True, False])
def test_a_step_waits_for_the_optimizers_own_tensors(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxoffload.phases.moving.mover.AT_ONCE", 1)  # else all of it comes with one copy
    if not started:
        monkeypatch.setattr("fxoffload.phases.moving.arrivals.FIRST_BYTES", 1)
        monkeypatch.setattr("fxoffload.phases.moving.arrivals.FIRST_MAPPED_BYTES", 1)
    model, copies = network(), DelayedCopies()
    optimizer = Fused(model.parameters())
    stepped(model, optimizer)
    manager = rehearse(model, optimizer, copies=copies)
    backward(model)
    with nothing_starts_in_the_background(manager):
        manager.offload("optimizer")
        manager.onload("optimizer", wait=False)
        optimizer.step()
    assert optimizer.found == [(False, 7)] * 2
    copies.run_all()
    manager.close()


def test_a_step_is_refused_before_anything_has_happened() -> None:
    """Adam makes its state, parameter after parameter, before it looks at the learning rate."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)
    manager = rehearse(model, optimizer)
    manager.offload("optimizer")
    backward(model)
    with pytest.raises(OffloadedError, match=r"AdamW.step\(\) needs group0\['lr'\]"):
        optimizer.step()
    assert not optimizer.state
    manager.onload()
    optimizer.step()
    assert [entry["step"].item() for entry in optimizer.state.values()] == [1] * 4
    manager.close()


def test_a_step_is_refused_for_a_master_copy_that_gets_its_gradient_in_it() -> None:
    class Masters:
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": [p.detach().double() for p in parameters]}]
            self.num_steps = 0

        def step(self) -> None:
            self.num_steps += 1

    model = network()
    optimizer = Masters(model.parameters())
    manager = rehearse(model, optimizer)
    manager.offload("optimizer")
    with pytest.raises(OffloadedError, match=r"Masters.step\(\) needs"):
        optimizer.step()
    assert not optimizer.num_steps
    manager.close()
    optimizer.step()


def tensors_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for entry in optimizer.state.values() for value in entry.values()]


@pytest.mark.parametrize("with_model", [True, False])
def test_loading_state_brings_the_old_one_back_first(with_model: bool) -> None:
    model, expected = network(), network()
    optimizer, expected_optimizer = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(expected.parameters())
    for one, its in ((model, optimizer), (expected, expected_optimizer)):
        stepped(one, its)
    saved = copy.deepcopy(optimizer.state_dict())
    manager = rehearse(model if with_model else (), optimizer)
    for _ in range(2):
        manager.offload("optimizer")
        optimizer.load_state_dict(copy.deepcopy(saved))  # it may take the tensors themselves
        assert manager.where("optimizer") is Where.DEVICE
        assert not any(map(is_away, tensors_in(optimizer)))
        expected_optimizer.load_state_dict(copy.deepcopy(saved))
        for one, its in ((model, optimizer), (expected, expected_optimizer)):
            stepped(one, its)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    manager.offload("optimizer")
    assert all(map(is_away, tensors_in(optimizer)))
    manager.close()


def test_loading_state_is_refused_while_the_parameters_are_away_too() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    manager = rehearse(model, optimizer)
    manager.enter("rollout")
    with pytest.raises(OffloadedError, match=r"AdamW.load_state_dict\(\) needs 0.weight"):
        optimizer.load_state_dict(saved)
    assert manager.where("optimizer") is Where.HOST
    manager.close()


def test_loading_brings_master_copies_back_too() -> None:
    """They are the optimizer's, and leave with its state."""
    model = network()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    before = [m.detach().clone() for m in masters]
    manager = rehearse(model, optimizer)
    manager.offload("optimizer")
    optimizer.load_state_dict(saved)
    assert manager.where("optimizer") is Where.DEVICE
    assert all(map(torch.equal, masters, before))
    assert torch.equal(optimizer.state[masters[0]]["exp_avg"], saved["state"][0]["exp_avg"])
    manager.close()
