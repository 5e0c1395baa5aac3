"""Calls that break at a bad moment: memory, threads and other people's work are as they were."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases import PhaseManager, Where
from fxoffload.phases.ledger import PhaseLedger
from fxoffload.phases.moving.mover import Mover
from fxoffload.runtime.copies.streams import CopyStreams

from .delayed import DelayedCopies, LateStreams


class Scene:
    """Parameters that hold their numbers, on a device with these streams, which have been away once."""

    def __init__(self, copies: CopyStreams, count: int = 8, *, optimizer: bool = False, **options: Any) -> None:
        self.copies = copies
        self.model = nn.ParameterList(nn.Parameter(torch.full((64,), float(i))) for i in range(count))
        self.raw = [p.detach() for p in self.model]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9) if optimizer else None
        if self.optimizer is not None:
            self.gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.manager = PhaseManager(
            self.model, self.optimizer, device_types=("cpu",), make_copies=lambda device: copies, **options
        )

    def gradients(self) -> None:
        for p in self.model:
            p.grad = torch.ones_like(p)

    def once(self) -> None:
        self.manager.offload()
        self.manager.onload()
        self.finish()

    def finish(self) -> None:
        if isinstance(self.copies, (LateStreams, DelayedCopies)):
            self.copies.run_all()

    def allocated(self) -> int:
        return sum(tensor.untyped_storage().nbytes() > 0 for tensor in self.raw)


def breaks(where: Any, name: str, number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ``number``-th call raises."""
    original, left = getattr(where, name), [number]

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return original(*args, **options)

    monkeypatch.setattr(where, name, call)


def test_who_reads_while_copies_run_ahead_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = LateStreams()
    scene = Scene(streams)
    scene.once()
    seen: list[Tensor] = []
    search = PhaseLedger.on_device

    def with_company(ledger: PhaseLedger, groups: tuple[str, ...]) -> Any:
        found = search(ledger, groups)

        def read() -> None:
            streams.kernel(scene.raw[0].untyped_storage(), lambda: seen.append(scene.raw[0].clone()))

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return found

    monkeypatch.setattr(PhaseLedger, "on_device", with_company)
    scene.manager.offload()
    assert streams.num_lost == 0
    scene.manager.onload()
    scene.finish()
    assert [tensor[0].item() for tensor in seen] == [0.0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")])
def test_no_thread_for_an_offload(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(LateStreams())
    scene.once()
    breaks(scene.manager._transit.worker, "submit", 1, error, monkeypatch)
    with pytest.raises(type(error)):
        scene.manager.offload()
    assert scene.manager.where("params") is Where.DEVICE
    assert [(p + 0)[0].item() for p in scene.model] == [float(i) for i in range(8)]
    scene.once()
    assert [p[0].item() for p in scene.model] == [float(i) for i in range(8)]


def test_dropped_gradients_are_there_when_an_offload_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = LateStreams()
    scene = Scene(streams, grads="drop")
    scene.once()
    scene.gradients()
    breaks(scene.manager._transit.mover, "before_leaving", 2, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        scene.manager.offload()
    assert all(p.grad is not None for p in scene.model)
    assert all(work.done for work in streams._streams["offload"])


@pytest.mark.parametrize("at_once", [1, 2])
def test_copies_ahead_are_finished_when_one_cannot_be_made(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxoffload.phases.moving.mover.AT_ONCE", at_once)
    streams = LateStreams()
    scene = Scene(streams)
    scene.once()
    breaks(streams, "offload", 3, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        scene.manager.offload()
    assert all(work.done for work in streams._streams["offload"])
    assert scene.manager.release_host_memory() > 0


@pytest.mark.parametrize("wait", [True, False])
def test_copies_that_cannot_be_started_leave_no_memory_behind(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(DelayedCopies())
    scene.manager.offload()
    breaks(scene.copies, "reload", 1, RuntimeError("broken"), monkeypatch)
    with pytest.raises(RuntimeError, match="broken"):
        scene.manager.onload(wait=wait)
    assert scene.manager.where("params") is Where.HOST
    assert scene.allocated() == 0


def test_no_room_for_one_onload_takes_nothing_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxoffload.phases.moving.arrivals.FIRST_BYTES", 1)
    scene = Scene(DelayedCopies(), count=40, optimizer=True)
    scene.manager.offload()
    allocate, refused = Mover.allocate, []

    def full(mover: Mover, holding: Any) -> None:
        if holding.group == "params" and not refused and holding.name != "0":
            refused.append(holding.name)
            raise torch.OutOfMemoryError("full")
        allocate(mover, holding)

    with scene.manager._transit._lock:  # the background thread comes late
        params = scene.manager.onload("params", wait=False)
        state = scene.manager.onload("optimizer", wait=False)
        monkeypatch.setattr(Mover, "allocate", full)
    assert isinstance(scene.copies, DelayedCopies)
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            scene.finish()
            time.sleep(0.005)

    runner = threading.Thread(target=run)
    runner.start()
    with pytest.raises(torch.OutOfMemoryError):
        params.wait()
    state.wait()
    ended.set()
    runner.join()
    assert refused
    assert scene.manager.where("optimizer") is Where.DEVICE
    assert scene.manager.where("params") is Where.HOST
