"""Threads of ours work on the device of who made them: see [Note: Threads and devices]."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxoffload.phases.moving.worker import Worker
from fxoffload.runtime import background, own_threads
from fxoffload.runtime.host_memory.chunk_threads import ChunkThreads
from fxoffload.runtime.transactions import Changes
from tests.runtime.arenas import until


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By thread: the device that it made current. The test's thread is on device 3, others begin on 0."""
    made: dict[str, int] = {}
    mine = threading.current_thread()

    def device_of_caller() -> int:
        now = threading.current_thread()
        return 3 if now is mine else made.get(now.name, 0)

    monkeypatch.setattr(own_threads, "device_of_caller", device_of_caller)
    monkeypatch.setattr("fxoffload.phases.moving.worker.device_of_caller", device_of_caller)
    monkeypatch.setattr("fxoffload.runtime.host_memory.chunk_threads.device_of_caller", device_of_caller)
    monkeypatch.setattr("fxoffload.runtime.background.device_of_caller", device_of_caller)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.update({threading.current_thread().name: device}))
    return made


def test_a_worker(devices: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("a-worker")
    seen: list[int | None] = []
    worker.submit(lambda: seen.append(devices.get("a-worker")))
    worker.drain()
    monkeypatch.setattr("fxoffload.phases.moving.worker.device_of_caller", lambda: 1)
    worker.submit(lambda: seen.append(devices.get("a-worker")))
    worker.drain()
    worker.stop()
    assert seen == [3, 1]


class Owner:
    def __init__(self) -> None:
        self._lock = threading.RLock()

    def transact(self, work: Callable[[], Any]) -> Any:
        with self._lock:
            return work()

    def back(self, start: int, end: int) -> None:
        """There is nothing to do."""

    def undo(self, start: int, end: int, *, is_backed: bool) -> None:
        raise AssertionError

    def publish(self, start: int, end: int) -> None:
        """Never asked."""

    def settle(self, error: BaseException | None) -> None:
        assert error is None


def pin() -> None:
    owner = Owner()
    chunks = ChunkThreads(Changes())
    owner.transact(lambda: chunks.grow_to(4096, owner, 4096, 4096))
    until(lambda: not chunks.is_running)
    assert chunks.ready == 4096


def test_threads_that_pin(devices: dict[str, int]) -> None:
    pin()
    assert devices == {"fxoffload-pin": 3}


def test_a_thread_that_plans_and_those_that_pin_for_it(devices: dict[str, int]) -> None:
    background.start_planning(pin, name="a-plan").join()
    assert devices == {"a-plan": 3, "fxoffload-pin": 3}


def test_before_cuda_is_used_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("a context would be made"))
    if not torch.cuda.is_initialized():
        assert own_threads.device_of_caller() is None
    own_threads.use_device(None)
