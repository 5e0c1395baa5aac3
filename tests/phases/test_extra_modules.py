"""Modules in ``extra`` are guarded as models are: the names they have, and sharded ones on two CPU processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxoffload.phases import OffloadedError
from fxoffload.phases.guarding import sharded
from fxoffload.phases.inventory import Inventory
from tests.phases.phase_support import make, rehearse

from ..sharding.launch import Ended, launch


def test_modules_are_the_models_and_the_modules_of_extra() -> None:
    actor, critic, average, nested = (nn.Linear(2, 2) for _ in range(4))
    extra = {"critic": average, "tree": {"a": nested, "b": torch.ones(1)}, "again": actor}
    inventory = Inventory({"actor": actor, "critic": critic}, None, extra)
    assert inventory.modules == {
        "actor": actor,
        "critic": critic,
        "extra.critic": average,
        "tree.0": nested,
    }
    assert list(inventory.modules)[:2] == ["actor", "critic"]
    names = {name for name, _ in inventory.collect("extra")}
    assert {"critic.weight", "tree.0.bias", "tree.1"} <= names


def test_sharded_modules_of_extra_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, average = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    monkeypatch.setattr(sharded, "is_fsdp2", lambda module: isinstance(module, nn.Linear))
    monkeypatch.setattr(sharded, "kept_on_cpu", lambda module: [module.weight])
    kept = Inventory(model, None, {"ema": average}).walk().kept_by_fsdp
    assert kept == {id(model[0].weight), id(average[1].weight)}


def test_what_would_do_half_of_its_work_raises_before() -> None:
    """``Module.double`` converts one layer after the other; a state dict is read from the host."""
    model, optimizer = make()
    average = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = {name: value.clone() for name, value in average.state_dict().items()}
    manager = rehearse(model, optimizer, extra={"ema": average})
    manager.offload()
    with pytest.raises(OffloadedError, match="conversion of ema"):
        average.double()
    assert all(torch.equal(value, expected[name]) for name, value in average.state_dict().items())
    manager.onload()
    assert all(torch.equal(value, expected[name]) for name, value in average.state_dict().items())
    assert {value.dtype for value in average.state_dict().values()} == {torch.float32}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    return launch(tmp_path_factory.mktemp("extra"), 2, ["away.extra_module"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["fsdp2", "fsdp1"])
def test_sharded_modules(ranks: list[Ended], model: str) -> None:
    for rank in ranks:
        found = rank.found("away.extra_module")[model]
        assert found["bytes"] > 0
        assert found["hidden"] == []
        assert found["forward"][0] == found["to"][0] == "OffloadedError", found
        assert "extra" in found["forward"][1]
        assert found["same"]
        assert found["same afterwards"]
