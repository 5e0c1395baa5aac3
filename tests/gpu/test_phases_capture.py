"""CUDA graphs that are captured while our threads pin, move and give back memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases import PhaseManager
from fxoffload.phases.moving.host_image import HostImage
from fxoffload.runtime import capture_mode
from fxoffload.runtime.host_memory.arena import CudaPinner

from .gpu_support import MIB

pytestmark = pytest.mark.gpu

CHUNKS = 12
LONG_S = 60.0


def captured(meanwhile: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """x -> 2 x + 1, captured in the mode "global" with something else going on in the middle."""
    x = torch.zeros(1024, device="cuda")
    y = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        doubled = x * 2
        meanwhile()
        torch.add(doubled, 1, out=y)
    return graph, x, y


def replays(graph: torch.cuda.CUDAGraph, x: Tensor, y: Tensor) -> bool:
    x.fill_(3.0)
    graph.replay()
    return bool((y == 7.0).all())


class _Pinner(CudaPinner):
    """Registers chunks when it is let, so that it happens within the capture."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.go, self.all_done = threading.Event(), threading.Event()
        self.errors: list[BaseException] = []
        self._left, self._lock = CHUNKS, threading.Lock()

    def register(self, address: int, nbytes: int) -> None:
        assert self.go.wait(LONG_S)
        try:
            super().register(address, nbytes)
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            with self._lock:
                self._left -= 1
                if not self._left or self.errors:
                    self.all_done.set()


def pin_while_capturing() -> tuple[_Pinner, bool]:
    """Whether the graph was captured and replays."""
    torch.zeros(1, device="cuda")
    pinner = _Pinner()
    image = HostImage(pinner, lambda: 1 << 40)
    image.reserve(CHUNKS * 128 * MIB)

    def meanwhile() -> None:
        pinner.go.set()
        assert pinner.all_done.wait(LONG_S)

    try:
        good = replays(*captured(meanwhile))
    except RuntimeError:
        good = False
    finally:
        pinner.go.set()
    return pinner, good


def test_an_image_is_pinned_meanwhile() -> None:
    pinner, good = pin_while_capturing()
    assert pinner.errors == [] and good
    torch.cuda.synchronize()


_WITHOUT = """
from fxoffload.runtime import capture_mode
from tests.gpu.test_phases_capture import offload_while_capturing, pin_while_capturing
capture_mode._function = lambda: None
pinner, good = pin_while_capturing()
print("pinning:", "fine" if good and not pinner.errors else "broken", flush=True)
print("offload:", "fine" if offload_while_capturing(False) else "broken", flush=True)
"""


def test_without_the_mode_one_of_them_fails() -> None:
    """Else the mode is not needed, or these tests cannot see it. In a process that a broken capture may spoil."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, cwd=root, timeout=300)
    assert "broken" in done.stdout, done.stdout + done.stderr


def mode_now() -> int:
    """Of this thread."""
    mode = ctypes.c_int(capture_mode.RELAXED)
    capture_mode._exchange(mode)
    found = mode.value
    capture_mode._exchange(mode)
    return found


def test_the_function_is_found() -> None:
    assert capture_mode._function() is not None
    assert capture_mode.outside_captures(mode_now)() == capture_mode.RELAXED
    assert mode_now() == capture_mode.GLOBAL


def test_memory_is_given_back_by_the_thread_that_captures() -> None:
    image = HostImage(CudaPinner(torch.device("cuda", torch.cuda.current_device())), lambda: 1 << 40)
    image.free(image.take(256 * MIB))
    assert replays(*captured(lambda: assert_released(image)))


def assert_released(image: HostImage) -> None:
    assert image.release() == 256 * MIB


def offload_while_capturing(empty_cache: bool) -> bool:
    """Its copies begin and end, and the storages are emptied, in the middle of the capture. Whether all is well."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, device="cuda") for _ in range(8)))
    values = [p.detach().cpu() for p in model.parameters()]
    manager = PhaseManager(model, empty_cache=empty_cache)
    manager.offload()
    manager.onload()
    torch.cuda.synchronize()
    held, go = threading.Event(), threading.Event()
    mover: Any = manager._transit.mover
    leave = mover.leave

    def late(*arguments: Any, **options: Any) -> None:
        held.set()
        assert go.wait(LONG_S)
        leave(*arguments, **options)

    mover.leave = late
    handle = manager.offload(wait=False)
    assert held.wait(LONG_S)

    def meanwhile() -> None:
        go.set()
        manager.drain()

    try:
        good = replays(*captured(meanwhile))
        handle.wait()
    except RuntimeError:
        return False
    assert not manager.transitions[-1].failed
    manager.onload()
    same = all(torch.equal(p.detach().cpu(), value) for p, value in zip(model.parameters(), values, strict=True))
    manager.close()
    return good and same


@pytest.mark.parametrize("empty_cache", [False, True])
def test_an_offload_runs_meanwhile(empty_cache: bool) -> None:
    assert offload_while_capturing(empty_cache)
