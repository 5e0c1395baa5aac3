"""Reads the JSON of a checkpoint, which may come from anywhere: it refuses JSON that would harm or hold up a reader."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from fxoffload.checkpoints.errors import BrokenCheckpointError, shortened

# The safetensors library's own limit for a header: a longer text is an attack or a torn file.
MOST_BYTES = 100_000_000
# Brackets and commas, of which a tensor's entry has about eight: a quarter of a million tensors in one file. A hundred
# megabytes of "[]," took 15 s to read; two million marks take at most 2.2 s (one core of a Xeon, 2026-11).
MOST_MARKS = 2_000_000
# Far above any config's. Python's own limit differs between reading, writing and printing.
MOST_LEVELS = 64
# Far above any model's names, which messages repeat.
MOST_NAME_CHARACTERS = 1000
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_json(path: Path, *, finite: bool) -> dict[str, Any]:
    """The object in a file. ``finite``: NaN and Infinity, which are no JSON, are errors.

    Raises BrokenCheckpointError as ``parse_json`` does.
    """
    with path.open("rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise BrokenCheckpointError(f"{path}: expected at most {MOST_BYTES} bytes of JSON, found more; fetch it again")
    return parse_json(path, text, finite=finite)


def parse_json(path: Path, text: bytes, *, finite: bool = True) -> dict[str, Any]:
    """The object that ``text`` of the file at ``path`` is.

    Raises BrokenCheckpointError for anything but one object in UTF-8. So it does for a name that an object has twice,
    and for text that is not valid Unicode. So it does for more than MOST_LEVELS lists and objects in each other, and
    for more than MOST_MARKS brackets and commas.
    """
    num_marks = sum(text.count(mark) for mark in (b"[", b"{", b",")) if len(text) > MOST_MARKS else 0
    if num_marks > MOST_MARKS:
        raise BrokenCheckpointError(
            f"{path}: expected at most {MOST_MARKS} brackets and commas, found {num_marks}; fetch it again, or look "
            "what wrote it"
        )
    refuse = _refuse_constant if finite else None
    parse_float = _parse_finite if finite else None
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=refuse, parse_float=parse_float
        )
        _check(value, escaped=b"\\u" in text)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(
            f"{path}: expected JSON, found something else ({error}); fetch it again, or mend it"
        ) from error
    if not isinstance(value, dict):
        raise BrokenCheckpointError(
            f"{path}: expected a JSON object, found {type(value).__name__}; fetch it again, or mend it"
        )
    return value


def check_name(path: Path, name: str) -> None:
    """Raise BrokenCheckpointError for the name of a tensor or file that no message can show."""
    if not name.isprintable() or len(name) > MOST_NAME_CHARACTERS:
        raise BrokenCheckpointError(
            f"{path}: expected names that can be printed, of at most {MOST_NAME_CHARACTERS} characters, found "
            f"{shortened(name)} of {len(name)}; fetch it again, or rename what it names"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{shortened(twice)} is there twice")
    return found


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shortened(text)} is no finite number")
    return number


def _check(value: Any, *, escaped: bool) -> None:
    """Level by level, as a value may be deeper than Python can recurse. ``escaped``: there may be surrogates."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
                if escaped:
                    inner += item.keys()
            elif isinstance(item, list):
                inner += item
            elif escaped and isinstance(item, str) and _SURROGATE.search(item):
                raise ValueError(f"{shortened(item)} is no valid Unicode")
        if not inner:
            return
        level = inner
    raise ValueError(f"more than {MOST_LEVELS} lists and objects in each other")
