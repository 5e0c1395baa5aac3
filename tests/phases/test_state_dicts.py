"""State dicts of plain models while everything is on the host, or on its way back."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases.guarding.overrides import is_ours
from fxoffload.phases.guarding.sentinel import OffloadedError, is_away
from fxoffload.phases.manager import PhaseManager

from .delayed import DelayedCopies


class Tied(nn.Module):
    """A tied weight, two views of one storage, a transposed tie, a buffer and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        both = torch.randn(2, 4, 4)
        self.first, self.second = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.turned = nn.Parameter(self.first.detach().t())
        self.low = nn.Parameter(torch.randn(3, dtype=torch.float16))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens) @ self.first @ self.second + self.mean) * self.low.sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(6)).square().mean().backward()
    optimizer.step()


def made(**options: Any) -> tuple[Tied, torch.optim.Optimizer, PhaseManager]:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer, PhaseManager(model, optimizer, device_types=("cpu",), **options)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert (found.shape, found.stride(), found.dtype, found.requires_grad) == (
            expected.shape, expected.stride(), expected.dtype, expected.requires_grad,
        )  # fmt: skip
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def test_state_dicts_are_read_from_the_host() -> None:
    model, optimizer, manager = made()
    expected, of_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    manager.offload()
    found = model.state_dict()
    assert_same(found, expected)
    assert found._metadata == expected._metadata  # type: ignore[attr-defined]
    assert_same(optimizer.state_dict(), of_optimizer)
    assert not any(is_away(t) for t in found.values())
    assert manager.where("params").value == "host"
    manager.onload()
    found["mean"].fill_(7.0)  # it is the image, which is the model no longer
    assert_same(model.state_dict(), expected)
    assert_same(optimizer.state_dict(), of_optimizer)
    manager.close()


def test_ties_and_views_share_memory_in_the_result() -> None:
    model, _, manager = made()
    manager.offload()
    found, again = model.state_dict(), model.state_dict()
    storages = {name: tensor.untyped_storage().data_ptr() for name, tensor in found.items()}
    assert storages["embedding.weight"] == storages["head.weight"]
    assert storages["first"] == storages["second"] == storages["turned"]
    assert found["first"].data_ptr() == found["turned"].data_ptr() != found["second"].data_ptr()
    assert storages["mean"] != storages["low"]
    assert again["mean"].data_ptr() == found["mean"].data_ptr(), "nothing is copied"
    manager.close()


def test_a_saved_state_dict_loads_into_a_fresh_model_and_needs_no_fxoffload() -> None:
    model, optimizer, manager = made()
    expected = copy.deepcopy(model.state_dict())
    manager.offload()
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    assert b"fxoffload" not in stream.getvalue()
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    fresh = Tied()
    fresh.load_state_dict(loaded["model"])
    assert_same(fresh.state_dict(), expected)
    other = torch.optim.AdamW(fresh.parameters())
    other.load_state_dict(loaded["optimizer"])
    manager.onload()
    step(model, optimizer)
    step(fresh, other)
    assert_same(fresh.state_dict(), model.state_dict())
    manager.close()


def test_only_what_is_away_is_replaced() -> None:
    model, optimizer, manager = made()
    manager.offload("optimizer")
    assert model.state_dict()["mean"].data_ptr() == model.mean.data_ptr()
    assert model.state_dict(keep_vars=True)["first"] is model.first
    manager.onload()
    manager.offload("params")
    assert model.state_dict()["mean"].data_ptr() == model.mean.data_ptr()
    exp_avg = optimizer.state[model.first]["exp_avg"]
    assert any(s["exp_avg"] is exp_avg for s in optimizer.state_dict()["state"].values())
    with pytest.raises(OffloadedError, match=r"state_dict\(keep_vars=True\).*params.*onload"):
        model.state_dict(keep_vars=True)
    manager.close()


def test_a_state_dict_of_a_part_and_with_a_plain_destination() -> None:
    model, _, manager = made()
    expected = copy.deepcopy(model.state_dict())
    manager.offload()
    assert_same(dict(model.head.state_dict()), {"weight": expected["head.weight"]})
    destination: dict[str, Any] = {}
    model.state_dict(destination=destination, prefix="own.")
    assert_same(destination, {f"own.{name}": tensor for name, tensor in expected.items()})
    manager.close()


def test_a_state_dict_that_fails_half_way_leaves_nothing_open() -> None:
    model, _, manager = made()
    manager.offload()

    def fail(*_: Any) -> None:
        raise KeyError("a user's hook")

    hook = model.head.register_state_dict_pre_hook(fail)
    with pytest.raises(KeyError):
        model.state_dict()
    hook.remove()
    with pytest.raises(OffloadedError):
        model.first.detach()
    manager.close()


def test_what_is_arriving_is_fenced() -> None:
    copies = DelayedCopies()
    model, optimizer, manager = made(make_copies=lambda device: copies)
    expected, of_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    manager.offload()
    manager.onload(wait=False)
    assert manager.where("params").value == "arriving"
    assert_same(model.state_dict(), expected)
    assert_same(optimizer.state_dict(), of_optimizer)
    assert copies.num_waits > 0
    copies.run_all()
    manager.close()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "step", "to", "load"])
def test_other_uses_of_what_is_arriving_are_fenced(way: str) -> None:
    """The overrides may go while one of them runs."""
    copies = DelayedCopies()
    model, optimizer, manager = made(make_copies=lambda device: copies)
    expected = copy.deepcopy(model.state_dict())
    manager.offload()
    manager.onload(wait=False)
    if way == "deepcopy":
        found: nn.Module = copy.deepcopy(model)
    elif way == "pickle":
        found = pickle.loads(pickle.dumps(model))
    elif way == "to":
        found = model.to(torch.float64).to(torch.float32)
        expected["low"] = expected["low"].float()
    elif way == "load":
        model.load_state_dict(expected)
        found = model
    else:
        other, of_other, _ = made()
        step(other, of_other)
        step(model, optimizer)
        found, expected = model, other.state_dict()
    assert_same({**found.state_dict()}, {**expected})
    copies.run_all()
    manager.close()
    assert not [name for m in found.modules() for name, value in vars(m).items() if is_ours(value)]


def test_a_copy_made_while_another_model_is_away_takes_no_guards_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxoffload.phases.moving.mover.AT_ONCE", 1)  # else both models arrive with one copy
    here, away = Tied(), Tied()
    manager = PhaseManager({"here": here, "away": away}, device_types=("cpu",))
    manager.offload()
    tensors = [*here.parameters(), *here.buffers()]
    copies = DelayedCopies()
    manager.onload()
    manager.close()
    late = PhaseManager({"here": here, "away": away}, device_types=("cpu",), make_copies=lambda device: copies)
    late.offload()
    late.onload(wait=False)
    late.fence(tensors)
    found = copy.deepcopy(here)
    assert any(is_away(p) for p in away.parameters())
    assert any(is_ours(value) for value in vars(here).values())
    assert not any(is_ours(value) for m in found.modules() for value in vars(m).values())
    assert not any(hook for m in found.modules() for hook in m._forward_pre_hooks.values())
    assert not any(is_away(p) for p in found.parameters())
    copies.run_all()
    late.close()


def test_a_scheduler_that_is_made_meanwhile_keeps_working() -> None:
    model, optimizer, manager = made()
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    manager.offload()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(OffloadedError, match=r"AdamW\.step"):
        optimizer.step()
    manager.onload()
    step(model, optimizer)
    scheduler.step()
    before.step()
    manager.close()
    step(model, optimizer)


def test_an_optimizer_that_is_not_of_torch() -> None:
    class Own:
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]
            self.state = {p: {"momentum": torch.zeros_like(p)} for p in self.param_groups[0]["params"]}
            self.num_steps = 0

        def step(self) -> None:
            self.num_steps += 1
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p]["momentum"].add_(p.grad)

    model = Tied()
    optimizer = Own(model.parameters())
    manager = PhaseManager(model, optimizer, device_types=("cpu",))
    model(torch.arange(6)).sum().backward()
    manager.offload("optimizer")
    with pytest.raises(OffloadedError, match=r"Own.step\(\) needs .*optimizer"):
        optimizer.step()
    assert optimizer.num_steps == 0
    manager.onload()
    optimizer.step()
    assert optimizer.num_steps == 1
    assert "step" not in vars(optimizer)
    manager.close()
