"""Why a checkpoint cannot be converted. No error leaves a half checkpoint behind."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise


class CheckpointError(ValueError):
    """Base of this package's errors. Each says the expectation, the finding, and what to do."""


class BrokenCheckpointError(CheckpointError):
    """The files contradict each other or the config: shards missing or cut short, experts missing, wrong shapes."""


class LayoutError(CheckpointError):
    """The layout is mixed, unknown, or not the one that was asked for."""


class UnknownFamilyError(CheckpointError):
    """No known family describes this model; a pattern can."""


class UnsupportedCheckpointError(CheckpointError, NotImplementedError):
    """An honest limit: a valid checkpoint that is not converted (pickled files, 4-bit experts)."""


class DestinationError(CheckpointError):
    """The folder to write to exists, is the source, or is in use."""


class DiskFullError(CheckpointError):
    """There is not enough room for the output."""


class MismatchError(CheckpointError):
    """The output differs from the source."""


def some(keys: Iterable[str], limit: int = 5) -> str:
    """The first ``limit`` keys, and how many more there are."""
    listed = list(keys)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    shown = (key if key.isprintable() and len(key) <= 1000 else shortened(key) for key in listed[:limit])
    return ", ".join(shown) + more


def shortened(value: object, limit: int = 200) -> str:
    """``value`` as Python writes it, and no more of it than a message can take."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def ranges(numbers: Collection[int]) -> str:
    """``{0, 1, 2, 5}`` as ``0-2, 5``."""
    present = set(numbers)
    starts = sorted(n for n in present if n - 1 not in present)
    ends = sorted(n for n in present if n + 1 not in present)
    return ", ".join(_span(a, b) for a, b in zip(starts, ends, strict=True))


def gaps(numbers: Iterable[int], count: int) -> str:
    """The numbers from 0 to ``count`` - 1 that ``numbers`` lack, written as by ``ranges``; ``count`` may be huge."""
    found = [-1, *sorted({n for n in numbers if 0 <= n < count}), count]
    return ", ".join(_span(a + 1, b - 1) for a, b in pairwise(found) if b - a > 1)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
