"""Private torch APIs of Dynamo: calls of loggers that need not break a graph.

[Note: Logging after the graph]
A call of a logger's method, or of ``warnings.warn``, breaks the graph: it has an effect that a graph cannot have.
Dynamo's ``config.reorderable_logging_functions`` takes no methods and drops keyword arguments, and
``config.ignore_logging_functions`` drops the message. ``log_after_graph`` runs such calls after the frame's graph
instead, in every step, as often as in eager. The logger then decides which messages are shown (Hugging Face's
``warning_once`` says each once). Only calls whose arguments are constants qualify. A message that shows a tensor would
show values that later ops wrote into it, and breaks the graph as before.

Plain Inductor breaks the graph at such a call. ``logs_in_frame`` tells it to those who compare with plain Inductor.
Some messages are about activation checkpointing (Hugging Face: "... is incompatible with gradient checkpointing"): a
step without it would not have them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch._dynamo.source import GlobalSource
from torch._dynamo.variables import ConstantVariable, functions, misc
from torch._guards import TracingContext

from fxoffload.torch_private.dynamo_cache import innermost

# A method of this name, or one that begins so and that a library added ("warning_once"), says something.
_LEVELS = frozenset({"debug", "info", "warning", "warn", "error", "critical", "fatal", "log"})
# The values that these ask for are known only at the place of the call.
_OF_THE_PLACE = frozenset({"exc_info", "stack_info"})

_backends: list[tuple[Callable[..., Any], bool]] = []  # whose frames log after their graphs, and whether they do
_logging: WeakSet[TracingContext] = WeakSet()  # of frames in which a call was deferred
_logging_otherwise: WeakSet[TracingContext] = WeakSet()  # a call whose message is not about checkpointing
_CHECKPOINTING = "gradient checkpointing"


def log_after_graph(backend: Callable[..., Any], *, says: bool = True) -> None:
    """See [Note: Logging after the graph]. For good: called once, when ``backend`` is defined.

    ``says``: False drops the messages: the code that ``backend`` compiles is no step of training.

    Needed by torch 2.11 to 2.14: ``LoggingLoggerVariable``, ``SkipFunctionVariable`` and ``debug_locals``.
    """
    if not _backends:
        _defer_calls()
    _backends.append((backend, says))


def logs_in_frame(*, checkpointing: bool = True) -> bool:
    """Whether the frame that is compiled now has a call that runs after its graph: plain Inductor breaks the graph.

    ``checkpointing``: False leaves out messages about activation checkpointing.

    Needed by torch 2.11 to 2.14: ``TracingContext``.
    """
    return TracingContext.try_get() in (_logging if checkpointing else _logging_otherwise)


def _defer_calls() -> None:
    call_logger = misc.LoggingLoggerVariable.call_method
    call_skipped = functions.SkipFunctionVariable.call_function

    @functools.wraps(call_logger)
    def log(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method: Any = getattr(self.value, name, None)
        # ``exception`` reads the exception that is being handled.
        is_said = callable(method) and name.split("_")[0] in _LEVELS and not _OF_THE_PLACE & kwargs.keys()
        if is_said and not _is_ignored(method) and _call_later(tx, partial(partial, method), args, kwargs):
            return ConstantVariable.create(None)
        return call_logger(self, tx, name, args, kwargs)

    @functools.wraps(call_skipped)
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is warnings.warn and _call_later(tx, partial(_warning_at, tx), args, kwargs):
            return ConstantVariable.create(None)
        return call_skipped(self, tx, args, kwargs)

    misc.LoggingLoggerVariable.call_method = log
    functions.SkipFunctionVariable.call_function = call


def _is_ignored(method: Any) -> bool:
    """Whether the user has said that Dynamo drops it."""
    ignored = torch._dynamo.config.ignore_logging_functions
    return method in ignored or getattr(method, "__func__", None) in ignored


def _call_later(tx: Any, make: Callable[..., Callable[[], Any]], args: Any, kwargs: Any) -> bool:
    """Have the frame that is compiled call what ``make`` makes of the arguments, after its graph. False: the call stays
    where it is."""
    backend = innermost(tx.output.compiler_fn)
    says = next((says for known, says in _backends if known is backend), None)
    if says is None or tx.export:
        return False
    try:
        constants = [a.as_python_constant() for a in args]
        named = {name: a.as_python_constant() for name, a in kwargs.items()}
    except NotImplementedError:
        return False
    _logging.add(tx.output.tracing_context)
    if not any(isinstance(value, str) and _CHECKPOINTING in value.lower() for value in (*constants, *named.values())):
        _logging_otherwise.add(tx.output.tracing_context)
    if not says:
        return True
    call = make(*constants, **named)
    name = tx.output.install_global("__fxoffload_log", call)
    # Of the frame that is compiled, not of the one that is inlined: Dynamo forgets those of the latter.
    tx.output.root_tx.debug_locals.append((misc.DebuggingVariable(call, source=GlobalSource(name)), []))
    return True


def _warning_at(tx: Any, message: Any, category: Any = None, stacklevel: int = 1, **others: Any) -> Callable[[], Any]:
    """Warns as the traced line does: filters, and the record of earlier warnings, go by the place."""
    frame = tx
    for _ in range(stacklevel - 1):
        frame = None if frame is None else frame.parent
    if frame is None or others:  # the caller of the compiled code
        return partial(warnings.warn, message, category, stacklevel=stacklevel, **others)
    known = frame.f_globals
    return partial(
        warnings.warn_explicit,
        message,
        category or (type(message) if isinstance(message, Warning) else UserWarning),
        frame.f_code.co_filename,
        frame.lineno,
        known.get("__name__", "<string>"),
        known.setdefault("__warningregistry__", {}),
    )
