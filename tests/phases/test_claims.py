"""Nothing has two managers, and a manager that moves nothing says why."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload.phases import PhaseManager
from fxoffload.phases.guarding.sentinel import is_away

from .phase_support import make, rehearse, train


def same(model: nn.Module, optimizer: Any) -> PhaseManager:
    return rehearse(model)


def compiled(model: nn.Module, optimizer: Any) -> PhaseManager:
    return rehearse(torch.compile(model))


def part(model: nn.Module, optimizer: Any) -> PhaseManager:
    return rehearse(model.norm)


def around(model: nn.Module, optimizer: Any) -> PhaseManager:
    return rehearse({"inner": nn.Sequential(model), "other": nn.Linear(2, 2)})


def tied(model: nn.Module, optimizer: Any) -> PhaseManager:
    other = nn.Linear(2, 2)
    other.weight = model.first.weight  # type: ignore[union-attr, assignment]
    return rehearse(other)


def viewed(model: nn.Module, optimizer: Any) -> PhaseManager:
    other = nn.Module()
    if is_away(model.right):  # type: ignore[arg-type]
        pytest.skip("a view of what is away is refused")
    other.register_buffer("part", model.right.detach()[:2])  # type: ignore[operator, union-attr]
    return rehearse(other)


def the_optimizer(model: nn.Module, optimizer: Any) -> PhaseManager:
    return rehearse((), optimizer)


def with_another_model(model: nn.Module, optimizer: Any) -> PhaseManager:
    return rehearse(nn.Linear(2, 2), [optimizer])


def as_extra(model: nn.Module, optimizer: Any) -> PhaseManager:
    return rehearse(nn.Linear(2, 2), extra={"ema": [model.first.weight]})  # type: ignore[union-attr]


@pytest.mark.parametrize("state", ["new", "trained", "away"])
@pytest.mark.parametrize(
    "second", [same, compiled, part, around, tied, viewed, the_optimizer, with_another_model, as_extra]
)
def test_a_second_manager_is_refused(second: Callable[..., PhaseManager], state: str) -> None:
    model, optimizer = make()
    if state != "new":
        train(model, optimizer, 0)
    manager = rehearse(model, optimizer)
    if state == "away":
        manager.offload()
    with pytest.raises(RuntimeError, match=r"no other PhaseManager has, found .* close\(\) it first"):
        second(model, optimizer)
    manager.close()
    other = second(model, optimizer)
    with pytest.raises(RuntimeError, match="no other PhaseManager has"):
        manager.offload()  # it may be used again, but not together with another one
    other.close()
    manager.offload()
    manager.close()


def test_one_that_nobody_has_any_more_is_in_nobodys_way() -> None:
    model, optimizer = make()
    for _ in range(3):
        manager: Any = rehearse(model, optimizer)
        manager.offload()
        manager.onload()
        manager.myself = manager
        del manager
    rehearse(model, optimizer).close()


def test_one_that_could_not_be_made_is_in_nobodys_way() -> None:
    model, _ = make()
    with pytest.raises(ValueError):
        rehearse(model, host_limit="much")
    rehearse(model).close()


def test_copies_and_halves_have_their_own() -> None:
    model, optimizer = make()
    managers = [rehearse(model), rehearse((), optimizer)]
    managers += [rehearse(copy.deepcopy(model)), rehearse(nn.Linear(2, 2))]
    train(model, optimizer, 0)
    for manager in managers:
        manager.offload()
    for manager in managers:
        manager.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_may_have_its_own() -> None:
    model, _ = make()
    manager = rehearse(model)
    child = os.fork()
    if child == 0:
        try:
            own = rehearse(model)
            own.offload()
            own.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    manager.close()


# -- nothing is done, and it is said -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_is_elsewhere_is_said_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4, device=device)
    manager = PhaseManager(model, device_types=("cuda",))
    for _ in range(2):
        manager.offload()
        manager.enter("rollout")
        manager.onload()
    assert len(caplog.messages) == 1
    expected = f"params: nothing of it moves. Expected tensors on cuda, found 2 on {device}. Move the model there"
    assert caplog.messages[0].startswith(expected)
    assert "device_types=('cpu',)" in caplog.messages[0]
    manager.close()


def test_state_that_came_to_another_device_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make()
    manager = PhaseManager((), optimizer, device_types=("cuda",))
    assert caplog.messages == []
    train(model, optimizer, 0)
    manager.offload("optimizer")
    manager.offload()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("optimizer: nothing of it moves. Expected tensors on cuda, found ")


def test_what_stays_elsewhere_beside_a_model_that_moves_is_as_it_should_be(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make()
    model.register_buffer("elsewhere", torch.ones(2, device="meta"))
    train(model, optimizer, 0)
    manager = rehearse(model, optimizer)
    manager.offload()
    manager.close()
    assert caplog.messages == []


def test_a_model_of_which_the_larger_part_is_elsewhere_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(64, 64, device="meta"))
    manager = rehearse(model)
    for _ in range(2):
        manager.offload()
        manager.onload()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("params: 80 B of them move, and 16.2 KiB stay on other devices")
    manager.close()


def test_groups_that_a_manager_cannot_have_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make()
    manager = rehearse(model)
    for _ in range(2):
        manager.offload("optimizer")
        manager.offload("grads", "optimizer")
        manager.offload()
        manager.onload()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("nothing moves for optimizer: expected a PhaseManager that has some,")
    manager.close()
    with pytest.raises(ValueError, match="expected a model, an optimizer or something extra"):
        PhaseManager((), [])
    manager = rehearse((), optimizer)
    manager.offload("params", "grads", "buffers", "extra")
    assert len(caplog.messages) == 2 and "for params and grads and buffers and extra" in caplog.messages[1]
    manager.close()
