"""Private torch APIs of Dynamo: its graph breaks."""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import symbolic_convert
from torch._guards import TracingContext


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo stopped a graph, or a frame that it does not compile.

    Attributes:
        file: of the user's line; "" where that is not known.
        line: in it.
        function: that it stands in.
        code: the line.
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

    Needed by torch 2.11 to 2.14.
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
    """Where the user's code stood when ``error`` was raised: the last line outside torch and this package.

    Needed by all versions of torch; no private name.
    """
    inside = tuple(str(Path(found).parent) for found in (torch.__file__, Path(__file__).parent))
    # Dynamo's own errors have the traced code's frames there, not in their traceback.
    frames = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    found = [f for f in frames if not f.filename.startswith((*inside, "<"))] or frames
    frame = found[-1]
    return f"{_short(frame.filename)}:{frame.lineno}, in {frame.name}" + (f" (`{frame.line}`)" if frame.line else "")
