"""The mode in which threads stand to the captures of others, with a driver that is made of Python."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxoffload.phases.moving.worker import Worker
from fxoffload.runtime import capture_mode
from fxoffload.runtime.capture_mode import GLOBAL, RELAXED, THREAD_LOCAL, outside_captures, work_during_captures
from fxoffload.runtime.host_memory import pinners
from fxoffload.runtime.host_memory.arena import HostArena

from ..interrupts import Interrupt, files, places


class Driver:
    """One mode for each thread, "global" at first."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self.result = 0

    @property
    def mode(self) -> int:
        return getattr(self._threads, "mode", GLOBAL)

    def exchange(self, reference: Any) -> int:
        if self.result == 0:
            value = reference._obj
            self._threads.mode, value.value = value.value, self.mode
        return self.result


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(capture_mode, "_function", lambda: driver.exchange)
    yield driver


def test_modes_are_exchanged(driver: Driver) -> None:
    assert outside_captures(lambda: driver.mode)() == RELAXED
    assert driver.mode == GLOBAL
    work_during_captures()
    assert driver.mode == THREAD_LOCAL
    with pytest.raises(KeyError):
        outside_captures({}.__getitem__)(0)
    assert driver.mode == THREAD_LOCAL


@pytest.mark.parametrize("kind", ["line", "opcode"])
def test_an_exception_at_any_time_leaves_the_mode_as_it_was(driver: Driver, kind: str) -> None:
    where = files("runtime/capture_mode.py")
    work = outside_captures(lambda: driver.mode)
    for place in places(where, work, kind):
        Interrupt(place.nth, where, kind=kind).during(work)
        assert driver.mode == GLOBAL, str(place)


def test_a_driver_that_refuses_changes_nothing(driver: Driver) -> None:
    driver.result = 1
    outside_captures(lambda: setattr(driver, "result", 0))()
    assert driver.mode == GLOBAL


def test_workers_are_bound_by_no_capture(driver: Driver) -> None:
    seen: list[int] = []
    worker = Worker("a-test")
    worker.submit(lambda: seen.append(driver.mode))
    worker.stop()
    assert seen == [THREAD_LOCAL] and driver.mode == GLOBAL


def test_threads_that_pin_are_bound_by_no_capture(driver: Driver) -> None:
    seen: list[int] = []

    class Seeing(pinners.HeapMemory):
        def register(self, address: int, nbytes: int) -> None:
            seen.append(driver.mode)

    arena = HostArena(Seeing(), 1 << 24)
    assert arena.allocate(1 << 21, 1 << 24) is not None
    assert set(seen) == {THREAD_LOCAL} and driver.mode == GLOBAL


def test_memory_is_registered_and_given_back_outside_captures(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer may give it back in the very thread that captures."""
    seen: list[int] = []

    class Runtime:
        @staticmethod
        def note(*_: Any) -> int:
            seen.append(driver.mode)
            return 0

        cudaHostRegister = cudaHostUnregister = note

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    monkeypatch.setattr(pinners, "_is_registered", lambda address: bool(seen))
    pinner = pinners.CudaPinner(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    pinner.register(0, 1)
    pinner.unregister(0)
    assert seen == [RELAXED, RELAXED] and driver.mode == GLOBAL


def test_what_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else memory that is still registered would be given back, and could not be registered again."""

    class Runtime:
        cudaHostRegister = cudaHostUnregister = staticmethod(lambda *_: 713)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(pinners, "_is_registered", lambda address: address > 0)
    pinner = pinners.CudaPinner(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="cudaHostRegister of 1 bytes failed: 713"):
        pinner.register(0, 1)
    with pytest.raises(RuntimeError, match="cudaHostUnregister failed: 713"):
        pinner.unregister(1)


def test_without_cuda_there_is_nothing_to_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_mode._function.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert capture_mode._function() is None
    outside_captures(work_during_captures)()
    capture_mode._function.cache_clear()


def test_a_runtime_without_the_function_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture_mode._function.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(capture_mode, "_NAME", "cudaThereIsNoSuchFunction")
    with caplog.at_level("DEBUG", capture_mode.__name__):
        assert capture_mode._function() is None
    assert "capture no CUDA graph" in caplog.text
    capture_mode._function.cache_clear()
