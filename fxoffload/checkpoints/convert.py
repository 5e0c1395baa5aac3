"""The conversions, from folder to folder."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar

from fxoffload.checkpoints.check_experts import open_experts
from fxoffload.checkpoints.destination import Destination, choose_destination
from fxoffload.checkpoints.errors import CheckpointError, DestinationError, DiskFullError, LayoutError
from fxoffload.checkpoints.families import FORMS, Form
from fxoffload.checkpoints.folder_name import about
from fxoffload.checkpoints.index import INDEX_NAME, check_unchanged, open_checkpoint
from fxoffload.checkpoints.layouts import LAYOUTS, Experts, Layout, Mixed, detect, one_layout
from fxoffload.checkpoints.notes import output_notes, source_notes
from fxoffload.checkpoints.plan_conversion import choose_targets, plan_conversion
from fxoffload.checkpoints.plan_shards import Shard, build_index, plan_extras, plan_shards
from fxoffload.checkpoints.publish import building
from fxoffload.checkpoints.side_files import copy_side_files, side_file_bytes, sync, weights_mode, write_file
from fxoffload.checkpoints.stream import write_shards
from fxoffload.checkpoints.verify import Verification, verify_experts
from fxoffload.sizes import parse_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

Name = TypeVar("Name", bound=str)
Folder = str | os.PathLike[str]
# Called with the stage ("convert", "verify"), bytes done and bytes in all, from any thread.
StageProgress = Callable[[str, int, int], None]

DEFAULT_SHARD_SIZE = "5GB"


class ConvertOptions(TypedDict, total=False):
    """The options of ``convert`` after the folders and the layout; see there."""

    form: str | None
    shard_size: int | str
    workers: int | None
    verify: bool
    overwrite: bool
    pattern: str | None
    fsync: bool
    progress: StageProgress | None


@dataclass(frozen=True)
class Conversion:
    """The result of ``convert``. ``seconds`` is wall time without the verification, the sync to the disk included.

    A layout is "mixed" where towers differ. ``num_shards`` counts files outside the index too. ``notes`` are sentences
    about checks that could not be made, and about data that is not kept or not converted.
    """

    source_layout: Layout | Mixed
    layout: Layout | Mixed
    form: Form | None
    family: str
    num_tensors: int
    num_shards: int
    num_bytes: int
    seconds: float
    verification: Verification | None
    notes: tuple[str, ...] = ()


def convert(
    source: Folder,
    target: Folder,
    to: str,
    *,
    form: str | None = None,
    towers: Mapping[str, str] | None = None,
    shard_size: int | str = DEFAULT_SHARD_SIZE,
    workers: int | None = None,
    verify: bool = False,
    overwrite: bool = False,
    pattern: str | None = None,
    fsync: bool = True,
    progress: StageProgress | None = None,
) -> Conversion:
    """Write the checkpoint in folder ``source`` into the new folder ``target``, its experts in the layout ``to``.

    The layout of the source is detected, for each tower by itself. dtypes, all other tensors and all other files stay
    as they are; config.json is not edited. ``to`` is one of these (E experts, I intermediate and H hidden features):

    - "experts": a tensor for each expert: gate and up [I, H], down [H, I].
    - "stacked": gate_proj and up_proj [E, I, H], down_proj [E, H, I].
    - "fused": gate_up_proj [E, 2I, H], gate first; or another of the family's forms, by default its first (``form``).

    ``towers``: other layouts than ``to``, by how the names of a tower begin: {"mtp.": "experts"}.
    ``shard_size``: most bytes of tensors in a file (a larger tensor has its own), as bytes or as "5GB".
    ``workers``: threads, by default as many as there are CPUs, at most 8, at least 2.
    ``verify``: compare a checksum of every tensor with the source before ``target`` appears.
    ``overwrite``: replace a checkpoint at ``target``, which stays until the new one is whole.
    ``pattern``: for a family that is not known, an expert's key such as
    "model.layers.{layer}.mlp.experts.{expert}.{gate_proj|up_proj|down_proj}.weight".
    ``fsync``: on return the output is on the disk, and not only in the page cache.
    ``progress(stage, done, total)``: bytes of the stage "convert" or "verify"; may be called from any thread.

    ``target`` appears whole or not at all. Raises CheckpointError: UnknownFamilyError, LayoutError (mixed within a
    tower, or already as asked), BrokenCheckpointError (files, shapes or counts that do not agree),
    UnsupportedCheckpointError (pickled or 4-bit weights), DestinationError, DiskFullError, MismatchError (``verify``).
    """
    begun = time.perf_counter()
    experts = open_experts(source, pattern)
    chosen = _one_of(to, LAYOUTS, "layout")
    chosen_towers: dict[str, Layout] = {
        name: _one_of(layout, LAYOUTS, "layout") for name, layout in (towers or {}).items()
    }
    chosen_form = None if form is None else _one_of(form, FORMS, "form")
    checkpoint = experts.checkpoint
    with about(source):
        targets = choose_targets(experts, chosen, chosen_form, chosen_towers)
        outputs = plan_conversion(experts, targets)
    indexed = [output for output in outputs if output.begins.path not in checkpoint.extras]
    shards = plan_shards(indexed, parse_bytes(shard_size, "shard_size"), checkpoint.metadata)
    index = build_index(shards, indexed, checkpoint.index_metadata)
    files = [*shards, *plan_extras(outputs, checkpoint.extras)]
    num_workers = _check_workers(workers)
    destination = choose_destination(checkpoint, target, overwrite=overwrite)
    num_file_bytes = sum(file.num_bytes for file in files) + len(index or b"") + side_file_bytes(checkpoint)
    verification = None
    try:
        with building(destination, num_file_bytes) as folder:
            _write(experts, files, index, folder, num_workers, fsync, progress)
            seconds = time.perf_counter() - begun
            if verify:
                output = open_experts(folder, pattern)
                verification = verify_experts(experts, output, num_workers, _stage(progress, "verify"))
            check_unchanged(checkpoint)
    except OSError as error:
        raise _explained(error, destination, num_file_bytes) from error
    return Conversion(
        experts.layout,
        one_layout(target.layout for target in targets.values()),
        next((target.form for target in targets.values() if target.form), None),
        experts.family.name,
        len(outputs),
        len(files),
        sum(output.num_bytes for output in outputs),
        seconds,
        verification,
        notes=(*source_notes(experts), *output_notes(experts, targets, len(shards))),
    )


def merge(source: Folder, target: Folder, **options: Unpack[ConvertOptions]) -> Conversion:
    """``convert(source, target, to="stacked", ...)`` for a source with one tensor per expert, else LayoutError."""
    _expect(source, options.get("pattern"), ("experts",), "merge stacks one tensor per expert")
    return convert(source, target, "stacked", **options)


def split(source: Folder, target: Folder, **options: Unpack[ConvertOptions]) -> Conversion:
    """``convert(source, target, to="experts", ...)`` for a source with a stacked or fused tower, else LayoutError."""
    _expect(source, options.get("pattern"), ("stacked", "fused"), "there is nothing to split")
    return convert(source, target, "experts", **options)


def verify(
    source: Folder,
    output: Folder,
    *,
    pattern: str | None = None,
    workers: int | None = None,
    progress: StageProgress | None = None,
) -> Verification:
    """Prove that two folders hold the same weights and files, in whatever layouts, by a checksum of every tensor.

    Weights that are not the model's are compared byte by byte; the notes of the result name them.

    Raises MismatchError, which names the differences, and the errors of ``convert`` for a checkpoint it cannot read.
    """
    pair = open_experts(source, pattern), open_experts(output, pattern)
    return verify_experts(*pair, _check_workers(workers), _stage(progress, "verify"))


def _write(
    experts: Experts,
    files: list[Shard],
    index: bytes | None,
    folder: Path,
    workers: int,
    fsync: bool,
    progress: StageProgress | None,
) -> None:
    mode = weights_mode(experts.checkpoint)
    write_shards(files, folder, workers, mode=mode, fsync=fsync, progress=_stage(progress, "convert"))
    copy_side_files(experts.checkpoint, folder, fsync=fsync)
    if index is not None:
        write_file(folder / INDEX_NAME, index, mode=mode, fsync=fsync)
    if fsync:
        for path in {folder, *(p.parent for p in folder.rglob("*"))}:
            sync(path)


def _explained(error: OSError, destination: Destination, num_bytes: int) -> Exception:
    if error.errno == errno.EFBIG:
        return DestinationError(
            f"{destination.final.parent}: expected files of the size of a shard to be allowed, found a limit below it "
            "(of the file system, or ulimit -f); nothing was left behind: give a smaller shard_size (--shard-size)"
        )
    if error.errno == errno.EEXIST:
        return DestinationError(
            f"{error.filename}: expected to make it, found that something else made it meanwhile; nothing was left "
            "behind: write where nobody else does"
        )
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return DiskFullError(
        f"{destination.final.parent}: expected room for {num_bytes} bytes, and the disk (or the quota) was full "
        "before all were written; nothing was left behind: make room or write elsewhere"
    )


def _expect(source: Folder, pattern: str | None, layouts: tuple[Layout, ...], reason: str) -> None:
    with about(source):
        found = {block.layout for block in detect(open_checkpoint(source), pattern).blocks.values()}
    if not found.intersection(layouts):
        raise LayoutError(
            f"{source}: expected the layout {' or '.join(layouts)}, found {' and '.join(sorted(found))}; {reason}: use "
            "convert for any other layout"
        )


def _one_of(value: str, known: Iterable[Name], what: str) -> Name:
    """``value`` as one of the ``known``, which an error lists."""
    for name in known:
        if name == value:
            return name
    raise CheckpointError(f"expected a {what} of {', '.join(known)}, found {value!r}; name one of these")


def _check_workers(workers: int | None) -> int:
    if workers is None:
        return max(2, min(8, len(os.sched_getaffinity(0))))
    if workers < 1:
        raise CheckpointError(f"expected at least 1 worker, found {workers}; leave it out for one per CPU")
    return workers


def _stage(progress: StageProgress | None, stage: str) -> Callable[[int, int], None]:
    return partial(progress or (lambda stage, done, total: None), stage)
