"""Pinners, which make a chunk of host memory fit for copies."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Protocol

import torch

from fxoffload.runtime.capture_mode import outside_captures
from fxoffload.runtime.switches import on_gpu
from fxoffload.torch_private.cuda import gpus_in_use


class Pinner(Protocol):
    """Makes host memory fit for asynchronous copies, or leaves it alone (the CPU rehearsal).

    Called by several threads at once, each with a chunk of its own. ``register`` of pinned memory is called with pages
    that have been touched: the driver would fault them in with one thread, however many register. Both raise where the
    driver refuses, and may be called once more where an exception came in between.
    """

    pinned: bool

    def register(self, address: int, nbytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...


class HeapMemory:
    """The CPU rehearsal's pinner: ordinary memory. ``touch``: fault it in, so that no copy has to."""

    pinned = False

    def __init__(self, *, touch: bool = False) -> None:
        self._touch = touch

    def register(self, address: int, nbytes: int) -> None:
        """Nothing to do, or the faults."""
        if self._touch:
            touch(address, nbytes)

    def unregister(self, address: int) -> None:
        """Nothing to do."""


class CudaPinner:
    """Registers memory with CUDA, so that copies to and from it run asynchronously at the speed of the link.

    Also while a CUDA graph is captured: memory is given back by whichever thread drops the last reference to it.
    """

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @outside_captures
    def register(self, address: int, nbytes: int) -> None:
        self.unregister(address)
        result = on_gpu(self.device, lambda: torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[attr-defined]
        self._check(result, f"cudaHostRegister of {nbytes} bytes")

    @outside_captures
    def unregister(self, address: int) -> None:
        if on_gpu(self.device, lambda: _is_registered(address)):
            result = on_gpu(self.device, lambda: torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[attr-defined]
            self._check(result, "cudaHostUnregister")

    def _check(self, result: object, what: str) -> None:
        if int(result) != 0:  # type: ignore[call-overload]
            # CUDA remembers the error for this thread, and the next kernel's launch would be blamed for it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            raise RuntimeError(f"{what} failed: {result}")


def _is_registered(address: int) -> bool:
    byte = ctypes.c_uint8.from_address(address)  # not read
    return torch.frombuffer(byte, dtype=torch.uint8).is_pinned()


@outside_captures
def wait_for_devices() -> None:
    """Waits for all that is queued on the GPUs of this process: copies by users, on streams that are not known."""
    for index in gpus_in_use():
        on_gpu(torch.device("cuda", index), torch.cuda.synchronize)


def touch(address: int, nbytes: int) -> None:
    """Fault fresh pages in. ctypes drops the GIL, so several threads do it at once."""
    ctypes.memset(address, 0, nbytes)
