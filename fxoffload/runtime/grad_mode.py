"""Autograd's recording, switched off for a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def without_grad(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """``torch.no_grad`` around a function. That one is entered in Python, and the exception of a signal in the middle
    would leave the caller's thread without gradients for good."""

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
