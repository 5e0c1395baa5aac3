"""An offload that is refused, or waits for nothing but an onload, leaves what that onload has promised."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxoffload.phases import PhaseManager, Where

from .delayed import DelayedCopies
from .phase_support import nothing_starts_in_the_background, rehearse


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])


def forward(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.ones(2, 8))


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxoffload.phases.moving.arrivals.SLICE", 1)
    monkeypatch.setattr("fxoffload.phases.moving.arrivals.FIRST_BYTES", 1)
    monkeypatch.setattr("fxoffload.phases.moving.arrivals.FIRST_MAPPED_BYTES", 1)


def by_gradients(model: nn.Module, manager: PhaseManager) -> str:
    """The policy is "error", and there are some."""
    return "expected no gradients"


def by_fsdp(model: nn.Module, manager: PhaseManager) -> str:
    """As if it were in the middle of a step."""

    def refuse(_: tuple[str, ...]) -> None:
        raise RuntimeError("cannot offload while FSDP is in the middle of a step")

    manager._transit._settle_modules = refuse  # type: ignore[method-assign]
    return "in the middle of a step"


def by_another_manager(model: nn.Module, manager: PhaseManager) -> str:
    """Some of it was offloaded by another one."""
    buffers = nn.Module()
    buffers.register_buffer("table", torch.ones(4))
    rehearse(buffers).offload()
    model.add_module("table", buffers)
    return "that no other PhaseManager has offloaded"


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("refused", [by_gradients, by_fsdp, by_another_manager])
def test_a_refused_offload_cancels_nothing(refused: Callable[[nn.Module, PhaseManager], str]) -> None:
    model, copies = network(), DelayedCopies()
    expected = forward(model)
    if refused is by_gradients:
        model(torch.ones(2, 8)).sum().backward()
    manager = rehearse(model, copies=copies, grads="error")
    manager.offload("params")
    with nothing_starts_in_the_background(manager):
        handle = manager.onload("params", wait=False)
        assert manager.where("params") is Where.ARRIVING
        message = refused(model, manager)
        with pytest.raises(RuntimeError, match=message):
            manager.offload()
        assert manager.where("params") is Where.ARRIVING
        assert not manager._transit.ledger.held(Where.HOST)
    threading.Timer(0.1, copies.run_all).start()
    handle.wait()
    assert manager.where("params") is Where.DEVICE
    assert torch.equal(forward(nn.Sequential(*list(model)[:6])), expected)


@pytest.mark.usefixtures("one_by_one")
def test_an_offload_that_is_not_refused_cancels_what_has_not_begun_to_arrive() -> None:
    model, copies = network(), DelayedCopies()
    expected = forward(model)
    manager = rehearse(model, copies=copies)
    manager.offload("params")
    with nothing_starts_in_the_background(manager):
        manager.onload("params", wait=False)
        begun = len(copies._queue)
        manager.offload("params")
        assert len(copies._queue) == begun, "nothing was brought only to be taken back"
    assert manager.where("params") is Where.HOST
    threading.Timer(0.1, copies.run_all).start()
    manager.onload()
    assert torch.equal(forward(model), expected)
    copies.run_all()
    manager.close()


@pytest.mark.usefixtures("one_by_one")
def test_weights_on_device_leave_what_somebody_has_called_for() -> None:
    model, copies = network(), DelayedCopies()
    expected = forward(model)
    manager = rehearse(model, copies=copies)
    manager.offload()
    with nothing_starts_in_the_background(manager):
        manager.enter("train")
        assert manager.where("params") is Where.ARRIVING
    threading.Timer(0.1, copies.run_all).start()
    with manager.weights_on_device() as weights:
        assert manager.where("params") is Where.DEVICE, "it is waited for"
        assert weights.load_seconds > 0
    assert weights.offload_seconds == 0
    assert manager.where("params") is Where.DEVICE
    assert torch.equal(forward(model), expected)
    manager.close()


def test_weights_on_device_send_back_what_was_on_the_host_or_leaving() -> None:
    model = network()
    manager = rehearse(model)
    for wait in (True, False):
        manager.onload()
        manager.offload(wait=wait)
        with manager.weights_on_device():
            assert manager.where("params") is Where.DEVICE
        assert manager.where("params") is Where.HOST
    manager.close()
