"""The folders that a caller names: a check that they can be names, and errors that show the name as it was given."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fxoffload.checkpoints.errors import CheckpointError, shortened


def folder_name(folder: object, expected: str, error: type[CheckpointError] = CheckpointError) -> str:
    """The text of ``folder``, which messages call ``expected``.

    Raises TypeError for an object that is neither a str nor a path of one, and ``error`` for a text that names no
    folder.
    """
    text = os.fspath(folder) if isinstance(folder, os.PathLike) else folder
    if not isinstance(text, str):
        raise TypeError(f"expected {expected} as a str or a pathlib.Path, found {shortened(folder)}; give one of these")
    if not text:
        raise error(f"expected {expected}, found an empty name; name the folder")
    try:
        usable = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise error(
            f"expected {expected}, found {shortened(text)}, whose characters no name of a file can have; give a "
            "name without them"
        )
    return text


@contextlib.contextmanager
def about(folder: str | os.PathLike[str]) -> Iterator[None]:
    """CheckpointErrors raised inside name ``folder``, where they name nothing in it.

    Raises as ``folder_name`` does, before anything inside runs.
    """
    text = folder_name(folder, "a checkpoint folder")
    shown = str(Path.cwd()) if Path(text) == Path() else text
    try:
        yield
    except CheckpointError as error:
        # As it was given, or as Path writes it. A path, and not the same letters in a sentence: it may be called "a".
        names = "|".join(re.escape(name) for name in (shown, str(Path(shown))))
        if not re.search(rf"(?:^|(?<=\s))(?:{names})(?=[/:;]|$)", str(error)):
            error.args = (f"{shown}: {error}",)
        raise
