"""Switches of a thread that are set for one function, and restored however it ends.

[Note: Switches of a thread]
PyTorch has context managers (``torch.no_grad``, ``torch.cuda.device``, modes) that are entered and left in Python.
The exception of a signal in the middle leaves a thread switched for good. So code that may run in the caller's thread
at any time uses a function from here. See [Note: Asynchronous exceptions] in ``fxoffload.runtime.transactions``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def without_grad(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """``torch.no_grad`` around a function."""

    @functools.wraps(function)
    def call(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(False)
            result = function(*args, **kwargs)
            torch.set_grad_enabled(before)
            return result
        except BaseException:
            torch.set_grad_enabled(before)
            raise

    return call


def on_gpu(device: torch.device, work: Callable[[], _Result]) -> _Result:
    """Does ``work`` while this is the current device."""
    before = torch.cuda.current_device()
    try:
        torch.cuda.set_device(device)
        result = work()
        torch.cuda.set_device(before)
        return result
    except BaseException:
        torch.cuda.set_device(before)
        raise


def aside(work: Callable[[], _Result]) -> _Result:
    """Does ``work``, and waits for it, in a thread of its own: no signal raises there, and its modes end with it. Those
    of the caller do not hold in it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
