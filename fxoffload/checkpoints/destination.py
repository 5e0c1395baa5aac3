"""May this folder be written, or replaced? Looks only; changes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fxoffload.checkpoints.errors import CheckpointError, DestinationError, some
from fxoffload.checkpoints.folder_name import folder_name
from fxoffload.checkpoints.index import DEEPEST, INDEX_NAME, SHARD_NAME, SINGLE_NAME, Checkpoint
from fxoffload.checkpoints.read_json import read_json

# More links on the way to a file than the kernel follows.
MAX_LINKS = 64


@dataclass(frozen=True)
class Destination:
    """The folder ``final`` that the result goes to, and the paths next to it that are used meanwhile (publish.py)."""

    source: Checkpoint
    final: Path
    overwrite: bool

    @property
    def partial(self) -> Path:
        return self._beside("partial")

    @property
    def old(self) -> Path:
        return self._beside("old")

    @property
    def trash(self) -> Path:
        return self._beside("trash")

    @property
    def lock(self) -> Path:
        return self._beside("lock")

    def _beside(self, what: str) -> Path:
        return self.final.with_name(f".{self.final.name}.fxoffload-{what}")


def choose_destination(source: Checkpoint, target: str | os.PathLike[str], *, overwrite: bool) -> Destination:
    """Check that ``target`` may be written, as far as that can be said without its lock. Raises DestinationError."""
    path = Path(folder_name(target, "a folder to write into", DestinationError))
    # The parent as the kernel finds it: "link/../name" is next to the folder that the link leads to.
    final = Path(os.path.realpath(path) if path.name in ("", "..") else Path(os.path.realpath(path.parent), path.name))
    if final.is_symlink():
        raise DestinationError(f"{target} is a symbolic link; name the folder that it leads to")
    real_source = Path(os.path.realpath(source.folder))
    if final == real_source or final.is_relative_to(real_source) or real_source.is_relative_to(final):
        relation = "the source" if final == real_source else "inside the source, or around it"
        raise DestinationError(f"{target} is {relation} ({source.folder}); write into a folder apart from it")
    if not final.parent.is_dir():
        raise DestinationError(f"expected a folder to write into, found no {final.parent}; make it first")
    destination = Destination(source, final, overwrite)
    _check_apart(destination)
    check_replaceable(destination)
    return destination


def check_replaceable(destination: Destination) -> None:
    """Raise DestinationError unless the destination is absent, empty, or a checkpoint that may be replaced."""
    final = destination.final
    if not os.path.lexists(final):
        return
    if not destination.overwrite:
        raise DestinationError(f"{final} exists; write elsewhere, or replace it with --overwrite (overwrite=True)")
    if final.is_symlink() or not final.is_dir():
        raise DestinationError(f"{final} is no folder; name a checkpoint's folder to replace, or write elsewhere")
    if Path.cwd().is_relative_to(final):
        raise DestinationError(f"{final} is the current folder, or around it; go elsewhere to replace it")
    if _is_mount_point(final):
        raise DestinationError(f"{final} is a mount point, which cannot be replaced; write into a folder in it")
    entries = list(_entries(final))
    if entries and not any((final / name).is_file() for name in (INDEX_NAME, SINGLE_NAME)):
        raise DestinationError(
            f"{final} holds files but none of {INDEX_NAME}, {SINGLE_NAME}: it is no checkpoint, and is not replaced; "
            "remove it yourself"
        )
    source = destination.source
    known = _weights(final) | {path.as_posix() for path in source.other_files} | {path.name for path in source.extras}
    strays = [name for name in entries if name not in known and not SHARD_NAME.fullmatch(name)]
    if strays:
        raise DestinationError(
            f"{final} holds {len(strays)} files that the new checkpoint would not have: {some(strays)}; move or "
            "remove them yourself, or write elsewhere"
        )


def _check_apart(destination: Destination) -> None:
    """The source needs nothing that is, or that a killed run left, where the output goes."""
    source = destination.source
    ours = (destination.final, destination.partial, destination.old, destination.trash)
    names = (*(path.name for path in source.files), INDEX_NAME, *source.other_files)
    for name in names:
        for place in _places(source.folder / name):
            inside = [folder for folder in ours if place.is_relative_to(folder)]
            if inside:
                raise DestinationError(
                    f"{inside[0]} holds the files that the source links to ({name}: {place}); write elsewhere"
                )


def _places(path: Path) -> Iterator[Path]:
    """Where a file lies, after each link on the way there."""
    here, left, links = "/", os.path.join(os.getcwd(), path).split("/")[::-1], 0
    while left:
        part = left.pop()
        place = os.path.dirname(here) if part == ".." else os.path.join(here, part)
        if part not in ("", ".", "..") and os.path.islink(place) and links < MAX_LINKS:
            links += 1
            yield Path(place)
            target = os.readlink(place)
            here = "/" if target.startswith("/") else here
            left += target.split("/")[::-1]
        elif part not in ("", "."):
            here = place
    yield Path(here)


def _is_mount_point(folder: Path) -> bool:
    if os.path.ismount(folder):
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    # A folder bound to a place of its own filesystem. Blanks are written as \040, in octal.
    places = (re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), line.split(b" ")[4]) for line in lines)
    return os.fsencode(folder) in places


def _entries(folder: Path) -> Iterator[str]:
    """Files and links below, relative to it; a folder that cannot be read is an error."""

    def unreadable(error: OSError) -> None:
        raise DestinationError(
            f"{folder}: expected to see all that would be replaced, found {error.filename} unreadable "
            f"({error.strerror}); remove it yourself"
        ) from error

    for here, subfolders, files in os.walk(folder, onerror=unreadable):
        if len(Path(here).relative_to(folder).parts) > DEEPEST:
            raise DestinationError(
                f"{here}: expected at most {DEEPEST} folders in each other where a checkpoint is replaced, found more; "
                f"remove {folder} yourself, or write elsewhere"
            )
        links = [name for name in subfolders if os.path.islink(os.path.join(here, name))]
        for name in sorted(files + links):
            yield os.path.relpath(os.path.join(here, name), folder)


def _weights(folder: Path) -> set[str]:
    """The names of weight files that the checkpoint in ``folder`` lists, or may have."""
    try:
        names = read_json(folder / INDEX_NAME, finite=False)["weight_map"].values()
        listed = {name for name in names if isinstance(name, str) and name.endswith(".safetensors")}
    except (OSError, CheckpointError, LookupError, TypeError, AttributeError):
        listed = set()
    return {INDEX_NAME, SINGLE_NAME} | listed
