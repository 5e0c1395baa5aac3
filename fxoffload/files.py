"""Replaces files through temporary names that cannot be guessed, so that no link lies there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file in one step: a reader sees all or nothing of it. A link at ``path`` is replaced, not followed.

    Devices and pipes, such as /dev/stdout, are written to.

    Raises:
        FileNotFoundError: its folder does not exist.
        OSError: it cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"expected the folder of {str(path)!r} to exist; create {str(path.parent)!r} first")
    if _is_stream(path):
        path.write_bytes(content)
        return
    # Not named after the file, whose name may be as long as names can be. Not a file of mkstemp, which only its owner
    # can read.
    temporary = path.with_name(f".fxoffload-{secrets.token_hex(16)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_stream(path: Path) -> bool:
    # In /dev, also where the shell leads /dev/stdout to a file: root could replace the link.
    in_dev = os.path.realpath(path.parent) == "/dev"
    return in_dev or (path.exists() and not path.is_file() and not path.is_dir())
