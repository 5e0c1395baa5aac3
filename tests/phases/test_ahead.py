"""Copies made before the leaving tensors are known: see [Note: Ahead] in ``fxoffload.phases.moving.mover``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload.phases import PhaseManager, Where
from fxoffload.phases.moving.mover import Ahead, Mover
from fxoffload.phases.moving.worker import YIELD_S
from fxoffload.runtime.copies.streams import HostCopies

from .phase_support import differences, make, rehearse, snapshot, train


class Watched:
    """A manager after one cycle; ``started`` are the sizes that later offloads copied ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.model, self.optimizer = make()
        train(self.model, self.optimizer, 0)
        self.manager = rehearse(self.model, self.optimizer, **options)
        self.started: list[list[str]] = []
        start = Mover.start_ahead

        def watched(mover: Mover, ahead: Ahead) -> None:
            self.started.append([holding.name for holding in ahead.holdings()])
            start(mover, ahead)

        monkeypatch.setattr(Mover, "start_ahead", watched)
        self.manager.offload()
        self.manager.onload()
        assert self.started == [[]], "nothing is remembered the first time"


def test_the_second_time_everything_is_copied_ahead_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Watched(monkeypatch)
    for i in range(1, 4):
        train(scene.model, scene.optimizer, i)
        before = snapshot(scene.model, scene.optimizer)
        scene.manager.offload()
        assert len(scene.started[-1]) == len(scene.manager._transit.ledger.held()) > 10
        scene.manager.onload()
        assert differences(before, snapshot(scene.model, scene.optimizer)) == []


def test_behind_other_work_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Watched(monkeypatch)
    scene.manager.offload(wait=False).wait()
    assert len(scene.started) == 1


def test_what_is_no_longer_the_models_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Watched(monkeypatch)
    old = next(p for p in scene.model.parameters() if p.dim() == 2)
    value = old.detach().clone()
    for module in scene.model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is old:
                setattr(module, name, nn.Parameter(value * 2))
    del scene.optimizer.state[old]
    scene.optimizer.param_groups[0]["params"] = list(scene.model.parameters())
    scene.manager.offload()
    assert scene.started[-1], "it was copied"
    assert torch.equal(old, value), "and stays where it is"
    scene.manager.onload()
    assert torch.equal(old, value)
    assert any(torch.equal(p, value * 2) for p in scene.model.parameters())


def test_another_size_or_storage_is_not_taken_for_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Watched(monkeypatch)
    first, second, *_ = (p for p in scene.model.parameters() if p.dim() == 2)
    first.data = torch.randn(first.shape[0] + 3, *first.shape[1:])
    storage = second.data.untyped_storage()
    storage.resize_(storage.nbytes() + 4096)  # the same one, larger
    torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).fill_(7)
    expected = first.detach().clone(), second.detach().clone()
    scene.manager.offload()
    scene.manager.onload()
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


def test_an_offload_that_is_refused_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies made for it are out of date by the next one."""
    scene = Watched(monkeypatch)
    late = nn.Linear(2, 2)
    other = PhaseManager(late, device_types=("cpu",))
    other.offload()
    scene.model.add_module("late", late)
    with pytest.raises(RuntimeError, match="no other PhaseManager"):
        scene.manager.offload()
    assert scene.started[-1], "it had begun"
    other.onload()
    assert scene.manager.where("params") is Where.DEVICE
    train(scene.model, scene.optimizer, 1)
    before = snapshot(scene.model, scene.optimizer)
    scene.manager.offload()
    scene.manager.onload()
    assert differences(before, snapshot(scene.model, scene.optimizer)) == []


@pytest.mark.parametrize("wait", [True, False])
def test_behind_other_work_copies_are_started_at_a_pace(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller launches that work, and needs the interpreter."""
    slept: list[float] = []
    monkeypatch.setattr("fxoffload.phases.moving.mover.time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr("fxoffload.phases.moving.mover.PACE_S_PER_BYTE", 1.0)
    model, optimizer = make()
    train(model, optimizer, 0)
    manager = rehearse(model, optimizer)
    manager.offload(wait=wait).wait()
    paced = [seconds for seconds in slept if seconds != YIELD_S]
    assert sum(paced) == (0 if wait else sum(held.nbytes for held in manager._transit.ledger.held()))


def test_a_holding_is_described_without_its_bytes() -> None:
    """torch writes out every byte of a storage: a debugger, or a failed test, would never come back."""
    model, optimizer = make()
    manager = rehearse(model, optimizer)
    manager.offload("params")
    away = manager._transit.ledger.held()
    assert away
    for held in away:
        assert repr(held) == f"Holding({held.name!r}, {held.nbytes} bytes of the params, host)"


class Told(HostCopies):
    """Whether copies were to give way, by direction."""

    def __init__(self) -> None:
        self.found: dict[str, set[bool]] = {"offload": set(), "reload": set()}

    def offload(self, pieces: Any, *, gives_way: bool = True) -> object:
        pieces = list(pieces)
        self.found["offload"].update([gives_way] * len(pieces))
        return super().offload(pieces)

    def reload(self, pieces: Any, *, gives_way: bool = True) -> object:
        pieces = list(pieces)
        self.found["reload"].update([gives_way] * len(pieces))
        return super().reload(pieces)


@pytest.mark.parametrize("wait", [True, False])
def test_copies_behind_other_work_give_way(wait: bool) -> None:
    copies = Told()
    model, optimizer = make()
    train(model, optimizer, 0)
    manager = rehearse(model, optimizer, make_copies=lambda device: copies)
    for _ in range(2):
        manager.offload(wait=wait).wait()
        manager.onload(wait=wait).wait()
    assert copies.found == {"offload": {not wait}, "reload": {not wait}}
    with manager.stream_weights() as weights:
        list(weights)
    assert False in copies.found["reload"], "whoever reads weights waits for them"
