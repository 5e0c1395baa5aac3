"""Lets threads beside the caller's work while the caller captures a CUDA graph.

[Note: Captures and threads]
``torch.cuda.graph`` captures in the mode "global": until it ends, a call that might not be part of the capture
(``cudaHostRegister``, ``cudaFree``, ``cudaEventQuery``) in *any* thread fails, and makes the capture invalid. A thread
that has put itself into the mode "thread local" is bound by its own captures only. Our threads capture nothing, and
what they do belongs to nobody's graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

log = logging.getLogger(__name__)

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # cudaStreamCaptureMode
_NAME = "cudaThreadExchangeStreamCaptureMode"


def work_beside_captures() -> None:
    """Called once by each thread of ours: the captures of other threads do not bind it. Nothing without CUDA."""
    _exchange(THREAD_LOCAL)


@contextlib.contextmanager
def outside_captures() -> Iterator[None]:
    """In this block, calls are made that are no part of any capture, not even of this thread's."""
    before = _exchange(RELAXED)
    try:
        yield
    finally:
        if before is not None:
            _exchange(before)


def _exchange(mode: int) -> int | None:
    """Sets the mode of this thread. Returns the one before, or None where there is no CUDA."""
    function = _function()
    if function is None:
        return None
    value = ctypes.c_int(mode)
    result = function(ctypes.byref(value))
    if result != 0:
        log.debug("%s failed: %s", _NAME, result)
        return None
    return value.value


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
