"""Private torch APIs of Dynamo: its graph breaks, calls that need not break a graph, and its compiled forms.

[Note: Logging after the graph]
A call of a logger's method, or of ``warnings.warn``, breaks the graph: it has an effect that a graph cannot have.
Dynamo's ``config.reorderable_logging_functions`` takes no methods and drops keyword arguments, and
``config.ignore_logging_functions`` drops the message. ``log_after_graph`` runs such calls after the frame's graph
instead, in every step, as often as in eager. The logger then decides which messages are shown (Hugging Face's
``warning_once`` says each once). Only calls whose arguments are constants qualify. A message that shows a tensor would
show values that later ops wrote into it, and breaks the graph as before.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import convert_frame, eval_frame, symbolic_convert
from torch._dynamo.source import GlobalSource
from torch._dynamo.variables import ConstantVariable, functions, misc
from torch._guards import TracingContext

from fxoffload._torch_dynamo import innermost

# A method of this name, or one that begins so and that a library added ("warning_once"), says something.
_LEVELS = frozenset({"debug", "info", "warning", "warn", "error", "critical", "fatal", "log"})
# The values that these ask for are known only at the place of the call.
_OF_THE_PLACE = frozenset({"exc_info", "stack_info"})

_backends: list[tuple[Callable[..., Any], bool]] = []  # whose frames log after their graphs, and whether they do


def log_after_graph(backend: Callable[..., Any], *, says: bool = True) -> None:
    """See [Note: Logging after the graph]. For good: called once, when ``backend`` is defined.

    ``says``: False drops the messages: the code that ``backend`` compiles is no step of training.
    """
    if not _backends:
        _defer_calls()
    _backends.append((backend, says))


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


# -- breaks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo stopped a graph, or a frame that it does not compile.

    Attributes:
        file: of the user's line; "" where that is not known.
        line: in it.
        function: that it stands in.
        code: the line.
        reason: in Dynamo's words.
    """

    file: str
    line: int
    function: str
    code: str
    reason: str

    def __str__(self) -> str:
        where = f"{_short(self.file)}:{self.line}, in {self.function}" if self.file else "an unknown place"
        return f"{where}: {self.reason}" + (f" (`{self.code}`)" if self.code else "")


def _short(file: str) -> str:
    """The file, and the two folders around it."""
    return str(Path(*Path(file).parts[-3:]))


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[GraphBreak]]:
    """The graph breaks on this thread meanwhile, in order, each place once.

    Stands for ``InstructionTranslatorBase.log_graph_break``, which Dynamo calls at each of them.
    """
    kind = symbolic_convert.InstructionTranslatorBase
    tell, thread = kind.log_graph_break, threading.get_ident()
    found: dict[tuple[str, int, str], GraphBreak] = {}

    @functools.wraps(tell)
    def listen(self: Any, code_options: Any, reason: str, exc: Any) -> None:
        if threading.get_ident() == thread:
            stack = getattr(exc, "real_stack", None) or TracingContext.extract_stack()
            one = _break_at(stack, reason)
            found[one.file, one.line, one.function] = one
        tell(self, code_options, reason, exc)

    kind.log_graph_break = listen
    said: list[GraphBreak] = []
    try:
        yield said
    finally:
        kind.log_graph_break = tell
        said.extend(found.values())


def _break_at(stack: Any, reason: str) -> GraphBreak:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    is_skipped = "Skipping the function" in lines[0]  # in a loop, say
    if lines[0].endswith(":") and len(lines) > 1:  # what Dynamo was about to do
        del lines[0]
    if is_skipped:
        lines[0] = f"{lines[0].rstrip('.')}, in a function that then runs uncompiled"
    # Dynamo's own kind of reason ("Failed to trace builtin operator"), and its explanation of this one.
    shown = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    text = lines[0] + (f". {shown}" if shown and shown.rstrip(".") != lines[0].rstrip(".") else "")
    if not stack:
        return GraphBreak("", 0, "", "", text)
    frame = stack[-1]
    return GraphBreak(frame.filename, frame.lineno or 0, frame.name, (frame.line or "").strip(), text)


def user_line(error: BaseException) -> str:
    """Where the user's code stood when ``error`` was raised: the last line outside torch and this package."""
    inside = tuple(str(Path(found).parent) for found in (torch.__file__, __file__))
    # Dynamo's own errors have the traced code's frames there, not in their traceback.
    frames = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    found = [f for f in frames if not f.filename.startswith((*inside, "<"))] or frames
    frame = found[-1]
    return f"{_short(frame.filename)}:{frame.lineno}, in {frame.name}" + (f" (`{frame.line}`)" if frame.line else "")


# -- compiled code -----------------------------------------------------------------------------------------------------


class _Never:
    """Stands for an object that no frame has: an entry that names it does not count for ``config.recompile_limit``."""

    def __call__(self) -> object:
        return self


@contextlib.contextmanager
def forgotten(backend: Callable[..., Any]) -> Iterator[None]:
    """At the end, Dynamo forgets the code that it compiled with ``backend`` meanwhile.

    It also forgets its decisions about code that it had not seen before. Code compiled with other backends stays.

    Stands for Dynamo's lists of compiled forms: code that has none but these is reset. Where others are there too,
    Dynamo can only mark a form as invalid.
    """
    before = {id(code) for code in _codes()}
    try:
        yield
    finally:
        for code in _codes():
            entries = eval_frame._debug_get_cache_entry_list(code)
            mine = [e for e in entries if innermost(e.backend) is backend]
            if len(mine) == len(entries) and (mine or id(code) not in before):
                eval_frame.reset_code(code)  # pyright: ignore[reportPrivateImportUsage]
            else:
                for entry in mine:
                    _invalidate(entry)


def _codes() -> list[Any]:
    """The code that Dynamo has looked at."""
    return [code for ref in convert_frame.input_codes.seen if (code := ref()) is not None]


def _invalidate(entry: Any) -> None:
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    guards = entry.guard_manager
    if getattr(guards, "cache_entry", None) is None:
        return
    deleted = DeletedGuardManagerWrapper("it was compiled for a plan ahead")
    deleted.id_matched_objs = {"": _Never()}  # type: ignore[dict-item]
    guards.extra_state.invalidate(guards.cache_entry, deleted)
