"""A manager without references goes, with its host image, unless something is away."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload.phases import OffloadedError

from .phase_support import rehearse


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_optimizer_does_not_keep_a_manager_that_was_not_closed() -> None:
    model, optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    gone = []
    for _ in range(2):
        manager = rehearse(model, optimizer)
        manager.offload()
        manager.onload()
        gone += [weakref.ref(manager), weakref.ref(manager.image)]
        del manager
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    # Their remains in the optimizer do nothing.
    state = optimizer.state_dict()
    assert torch.equal(state["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    optimizer.load_state_dict(state)
    optimizer.step()


def test_a_manager_of_which_something_is_away_stays() -> None:
    model, optimizer = trained()
    expected: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    manager = rehearse(model, optimizer)
    manager.offload()
    kept = weakref.ref(manager)
    del manager
    gc.collect()
    with pytest.raises(OffloadedError):
        optimizer.step()
    with pytest.raises(OffloadedError):
        optimizer.load_state_dict(expected)
    found = optimizer.state_dict()
    for key, entry in expected["state"].items():
        assert all(torch.equal(value, found["state"][key][name]) for name, value in entry.items())
    manager = kept()
    assert manager is not None
    manager.close()
    del manager
    gc.collect()
    assert kept() is None
