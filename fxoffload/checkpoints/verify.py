"""Does the output hold what the source holds, bit for bit?"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from fxoffload.checkpoints.check_experts import check_experts
from fxoffload.checkpoints.checksums import checksums
from fxoffload.checkpoints.errors import MismatchError, some
from fxoffload.checkpoints.layouts import Experts
from fxoffload.checkpoints.plan_shards import with_format
from fxoffload.checkpoints.side_files import compare_side_files


@dataclass(frozen=True)
class Verification:
    """What was proved. ``fingerprint`` is a hash over all checksums: the same for the same weights in any layout."""

    num_tensors: int
    num_bytes: int
    fingerprint: str


def verify_experts(
    source: Experts, output: Experts, workers: int, progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Compare a checksum of every tensor, and every other file. ``progress(done, total)`` in bytes read of both.

    Raises MismatchError, which lists the tensors that differ by their name in the layout of one tensor per expert.
    """
    check_experts(source)
    check_experts(output)
    done, lock = 0, threading.Lock()
    total = source.checkpoint.num_bytes + output.checkpoint.num_bytes

    def report(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            if progress is not None:
                progress(done, total)

    expected = checksums(source, workers, report)
    found = checksums(output, workers, report)
    _compare(source, output, expected, found)
    _compare_metadata(source, output)
    compare_side_files(source.checkpoint, output.checkpoint)
    lines = "\n".join(f"{name} {text}" for name, text in sorted(expected.items()))
    fingerprint = hashlib.sha256(lines.encode()).hexdigest()
    return Verification(len(expected), source.checkpoint.num_bytes, fingerprint)


def _compare(source: Experts, output: Experts, expected: dict[str, str], found: dict[str, str]) -> None:
    where = f"{output.checkpoint.folder} against {source.checkpoint.folder}"
    for what, names in (
        ("missing", expected.keys() - found.keys()),
        ("not in the source", found.keys() - expected.keys()),
        ("different", {name for name in expected.keys() & found.keys() if expected[name] != found[name]}),
    ):
        if names:
            first = min(names)
            raise MismatchError(
                f"{where}: {len(names)} of {len(expected)} tensors are {what}: {some(sorted(names))}. {first}: "
                f"expected {expected.get(first, 'nothing')}, found {found.get(first, 'nothing')}. "
                "Do not use the output; convert again"
            )


def _compare_metadata(source: Experts, output: Experts) -> None:
    """What the source's shards say in their headers, where they agree with each other."""
    expected, found = (with_format(experts.checkpoint.metadata) for experts in (source, output))
    names = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
    if names:
        first = names[0]
        raise MismatchError(
            f"{output.checkpoint.folder} against {source.checkpoint.folder}: the metadata of the shards differ in "
            f"{some(names)}. {first}: expected {expected.get(first)!r}, found {found.get(first)!r}; convert again"
        )
