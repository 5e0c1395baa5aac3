"""Private torch APIs of Dynamo: the call and the compilation that are under way."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch._dynamo import config, eval_frame
from torch._guards import CompileContext
from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals


def frame_id() -> int | None:
    """Which code object Dynamo compiles at the moment; the same for all its recompilations. None outside Dynamo.

    Needed by torch 2.11 to 2.14: ``torch._guards.CompileContext.current_compile_id``.
    """
    found = CompileContext.current_compile_id()
    return None if found is None else found.frame_id


def why_off() -> str:
    """Why Dynamo compiles nothing at the moment; "" where it does.

    Needed by torch 2.11 to 2.14: ``eval_frame._stance`` and ``torch.utils._python_dispatch``.
    """
    stance = eval_frame._stance.stance
    if stance in ("force_eager", "eager_on_recompile"):
        return f"torch.compiler.set_stance({stance!r}) is on"
    if config.disable:
        return "torch._dynamo.config.disable is set"
    if is_in_any_mode_without_ignore_compile_internals():
        return "a TorchDispatchMode is active"
    return ""


def called_function() -> str:
    """The name of the compiled function whose call is under way on this thread.

    Needed by torch 2.11 to 2.14: the frame of ``compile_wrapper``.
    """
    function = _called()
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return getattr(function, "__qualname__", "a compiled function")


def runs_later() -> bool:
    """Whether that function is one whose call only makes a generator or a coroutine.

    Needed by torch 2.11 to 2.14: the frame of ``compile_wrapper``.
    """
    function = _called()
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(is_kind(function) for is_kind in kinds)


def _called() -> Any:
    """The compiled function whose call is under way on this thread; None: there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("fn")
