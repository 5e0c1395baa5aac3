"""What ``fxoffload moe`` shows: a table, a progress bar, a line at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fxoffload.checkpoints import Conversion, Inspection, Verification
from fxoffload.checkpoints.errors import ranges
from fxoffload.sizes import format_bytes


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Bytes, GB/s and the time left, on stderr; silent where that is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks = {stage: bar.add_task(stage, total=None, visible=False) for stage in ("convert", "verify")}

        def report(stage: str, done: int, total: int) -> None:
            bar.update(tasks[stage], completed=done, total=total, visible=True)

        yield report


def print_inspection(found: Inspection, console: Console) -> None:
    """What it is, one row for each group of layers that are alike, and the whole below."""
    layout = found.layout if found.form is None else f"{found.layout} ({found.form})"
    table = Table("layers", "experts", "gate \\[I, H]", "dtypes", "bytes")
    for tower in found.towers:
        table.add_row(
            escape(f"{tower.prefix}{{{ranges(tower.layers)}}}"),
            str(tower.num_experts),
            escape(str(list(tower.shape))),
            ", ".join(tower.dtypes),
            format_bytes(tower.num_bytes),
        )
    dtypes = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.bytes_by_dtype.items())
    console.print(escape(f"{found.folder}: {found.family}, layout {layout}"), soft_wrap=True, highlight=False)
    console.print(table)
    console.print(
        f"{found.num_tensors} tensors in {found.num_shards} shards, {format_bytes(found.num_bytes)}: {dtypes}; "
        f"{len(found.other_files)} other files",
        soft_wrap=True,
        highlight=False,
    )
    for note in found.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True, highlight=False)


def describe_conversion(done: Conversion, target: str) -> str:
    """One line, another for each note, and another where it was verified."""
    layout = done.layout if done.form is None else f"{done.layout} ({done.form})"
    rate = done.num_bytes / 1e9 / max(done.seconds, 1e-9)
    text = (
        f"{target}: {done.source_layout} -> {layout}, {done.num_tensors} tensors in {done.num_shards} shards, "
        f"{format_bytes(done.num_bytes)} in {done.seconds:.1f} s ({rate:.2f} GB/s)"
    )
    verified = [] if done.verification is None else [describe_verification(done.verification)]
    return "\n".join([text, *(f"note: {note}" for note in done.notes), *verified])


def describe_verification(done: Verification) -> str:
    return (
        f"verified: {done.num_tensors} tensors (one per expert), {format_bytes(done.num_bytes)}, equal bit for bit; "
        f"fingerprint {done.fingerprint}"
    )
