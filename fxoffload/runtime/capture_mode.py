"""Lets background threads work while the caller captures a CUDA graph.

[Note: Captures and threads]
``torch.cuda.graph`` captures in the mode "global". Until it ends, a call in *any* thread that might not be part of the
capture (``cudaHostRegister``, ``cudaFree``, ``cudaEventQuery``) fails, and makes the capture invalid. A thread that has
put itself into the mode "thread local" is bound by its own captures only. Our threads capture nothing, and their calls
belong to no graph.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

log = logging.getLogger(__name__)

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # cudaStreamCaptureMode
_NAME = "cudaThreadExchangeStreamCaptureMode"
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def work_during_captures() -> None:
    """Called once by each thread of ours: the captures of other threads do not bind it. Nothing without CUDA."""
    _exchange(ctypes.c_int(THREAD_LOCAL))


def outside_captures(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """A function whose calls are no part of any capture, not even of this thread's. See [Note: Switches of a thread] in
    ``fxoffload.runtime.switches``."""

    @functools.wraps(function)
    def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        mode = ctypes.c_int(RELAXED)  # exchanged in C: it tells whether that has happened
        try:
            _exchange(mode)
            result = function(*args, **kwargs)
            _exchange_back(mode)
            return result
        except BaseException:
            _exchange_back(mode)
            raise

    return call


def _exchange_back(mode: ctypes.c_int) -> None:
    if mode.value != RELAXED:
        _exchange(mode)


def _exchange(mode: ctypes.c_int) -> None:
    """Sets the mode of this thread, and ``mode`` to the one before; nothing where there is no CUDA."""
    exchange = _function()
    if exchange is not None and (error := exchange(ctypes.byref(mode))) != 0:
        log.debug("%s failed: %s", _NAME, error)


@functools.cache
def _function() -> Callable[..., int] | None:
    if torch.version.cuda is None:
        return None
    # torch opens the CUDA runtime for all; where it is not to be seen, the library that is loaded has a path.
    for path in (None, *_loaded_runtimes()):
        try:
            function = getattr(ctypes.CDLL(path), _NAME)
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int
        return function
    log.debug("%s was not found: capture no CUDA graph while memory is pinned or moved", _NAME)
    return None


def _loaded_runtimes() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/libcudart.so" in line})
