"""Verifies that the output holds the same weights as the source, bit for bit."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fxoffload.checkpoints.checksums import checksums
from fxoffload.checkpoints.errors import MismatchError, shortened, some
from fxoffload.checkpoints.layouts import Experts
from fxoffload.checkpoints.notes import verification_notes
from fxoffload.checkpoints.plan_shards import with_format
from fxoffload.checkpoints.side_files import compare_side_files


@dataclass(frozen=True)
class Verification:
    """A proof that weights agree. ``fingerprint`` is a hash of all checksums: equal for equal weights in any layout.

    ``notes`` are sentences about parts that were compared otherwise, or not at all.
    """

    num_tensors: int
    num_bytes: int
    fingerprint: str
    notes: tuple[str, ...] = ()


def verify_experts(
    source: Experts, output: Experts, workers: int, progress: Callable[[int, int], None]
) -> Verification:
    """Compare a checksum of every tensor, and every other file. ``progress(done, total)`` in bytes read of both.

    Raises MismatchError, which lists the tensors that differ by their name in the layout of one tensor per expert.
    """
    done, lock = 0, threading.Lock()
    total = source.checkpoint.num_bytes + output.checkpoint.num_bytes

    def report(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            progress(done, total)

    expected = checksums(source, workers, report)
    found = checksums(output, workers, report)
    _compare(source, output, expected, found)
    _compare_places(source, output)
    _compare_metadata(source, output)
    compare_side_files(source.checkpoint, output.checkpoint)
    lines = "\n".join(f"{name} {text}" for name, text in sorted(expected.items()))
    fingerprint = hashlib.sha256(lines.encode()).hexdigest()
    return Verification(len(expected), source.checkpoint.num_bytes, fingerprint, verification_notes(source, output))


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


def _compare_places(source: Experts, output: Experts) -> None:
    """Loaders read the files that the index names: a tensor outside of it would be lost to them."""
    outside = [_outside_the_index(experts) for experts in (source, output)]
    if outside[0] != outside[1]:
        raise MismatchError(
            f"{output.checkpoint.folder} against {source.checkpoint.folder}: expected the same tensors in the index, "
            f"found {some(sorted(outside[0] ^ outside[1]))} outside it in one of them only; convert again, or mend the "
            "index"
        )


def _outside_the_index(experts: Experts) -> set[str]:
    """Modules of experts, under their names as single tensors, and other tensors."""
    extras = experts.checkpoint.extras
    blocks = (block for block in experts.blocks.values() if any(t.path in extras for t in block.all_tensors()))
    others = {name for name, tensor in experts.others.items() if tensor.path in extras}
    return others | {block.single_module(experts.family) for block in blocks}


def _compare_metadata(source: Experts, output: Experts) -> None:
    """The metadata in the headers of the source's shards, where they agree with each other."""
    ours, theirs = source.checkpoint, output.checkpoint
    where = f"{theirs.folder} against {ours.folder}"
    _raise_for_difference(
        f"{where}: the metadata of the shards", with_format(ours.metadata), with_format(theirs.metadata)
    )
    extras = {path.name: with_format(metadata) for path, metadata in ours.extras.items()}
    for path, metadata in theirs.extras.items():
        if path.name in extras:
            _raise_for_difference(f"{where}: the metadata of {path.name}", extras[path.name], with_format(metadata))
    if ours.has_index and theirs.has_index:
        _raise_for_difference(f"{where}: the metadata of the index", ours.kept_metadata, theirs.kept_metadata)


def _raise_for_difference(what: str, expected: Mapping[str, object], found: Mapping[str, object]) -> None:
    names = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
    if names:
        first = names[0]
        raise MismatchError(
            f"{what} differ in {some(names)}. {first}: expected {shortened(expected.get(first))}, found "
            f"{shortened(found.get(first))}; convert again"
        )
