"""Calls of compiled functions that Dynamo runs uncompiled: counted, and told once.

Dynamo stops compiling a function without an error: its recompile limit is used up, a stance says so, an error was
suppressed. Training then goes on, eager, and nothing is offloaded. Two things are seen here (``dynamo_state``): frames
that Dynamo runs uncompiled because a limit is used up, and calls with gradients in which no compiled graph ran. Where
autograd recorded nothing, such a call had nothing to offload, and is neither counted nor told.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from fxoffload.counters import counters
from fxoffload.tell import warn_once
from fxoffload.torch_private.autograd import num_autograd_nodes
from fxoffload.torch_private.dynamo_state import called_function, runs_later, why_off

WITHOUT_GRADIENTS = "without gradients: "
NOT_TRACED = "no graph"


@dataclass
class _Call:
    """A call of a compiled function that has begun. ``error``: the exception that was being handled then."""

    outer: _Call | None
    has_grad: bool
    num_run: int
    num_nodes: int  # of autograd's graph, when it began
    error: BaseException | None
    limits: set[str] = field(default_factory=set)  # that frames of it met


class _Thread(threading.local):
    call: _Call | None = None
    num_run: int = 0  # graphs that ran


_thread = _Thread()


class UncompiledCalls:
    """Counts and warns; a ``CallWatch``. One instance, ``UNCOMPILED``."""

    @staticmethod
    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, a compiled graph, whose calls are seen."""

        @functools.wraps(run)
        def call(*args: Any) -> Any:
            _thread.num_run += 1
            return run(*args)

        return call

    def call_begins(self) -> Callable[[], None]:
        """See ``CallWatch``."""
        error = sys.exc_info()[1]
        call = _Call(_thread.call, torch.is_grad_enabled(), _thread.num_run, num_autograd_nodes(), error)
        _thread.call = call
        return functools.partial(self._end, call)

    def ran_uncompiled(self, code: CodeType, limit: str, most: int, *, has_grad: bool) -> None:
        """See ``CallWatch``."""
        reason = limit if has_grad else WITHOUT_GRADIENTS + limit
        if _thread.call is not None:
            _thread.call.limits.add(reason)
        where = f"{code.co_name} in {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
        kind = "with" if has_grad else "without"
        text = (
            f"torch.compile stops compiling {called_function()} ({where}) for calls {kind} gradients: "
            f"torch._dynamo.config.{limit} ({most}) is used up. Such calls that fit "
            "none of its compiled graphs run uncompiled; fxoffload.stats().calls_uncompiled counts them. "
        )
        if has_grad:
            text += "They offload nothing. TORCH_LOGS=recompiles shows what differs between calls: make that the same, "
        else:
            text += "Training has a limit of its own and goes on. Generate with the uncompiled model, "
        text += "or raise the limit. Raise it before the first call, or call torch.compiler.reset() after raising it"
        warn_once((where, reason), text)

    def _end(self, call: _Call) -> None:
        _thread.call = call.outer
        for limit in call.limits:
            counters.add_reason("calls_uncompiled", limit)
        if call.limits or not call.has_grad or _thread.num_run != call.num_run:
            return
        if sys.exc_info()[1] is not call.error:
            return  # it raised
        if num_autograd_nodes() == call.num_nodes and not runs_later():
            return  # there was nothing to offload
        off = why_off()
        counters.add_reason("calls_uncompiled", off or NOT_TRACED)
        name = called_function()
        why = off or (
            "Dynamo ran none of its frames compiled. TORCH_LOGS=graph_breaks,recompiles says why: a model under "
            "torch.compiler.disable, a generator, a graph break in its outermost frame, an error that "
            "torch._dynamo.config.suppress_errors hides, or a recompile limit that another backend's graphs of the "
            "same code used up"
        )
        warn_once(
            (name, off or NOT_TRACED),
            f"a call of {name} with gradients ran uncompiled and offloaded nothing: {why}. "
            "fxoffload.stats().calls_uncompiled counts such calls",
        )


UNCOMPILED = UncompiledCalls()
