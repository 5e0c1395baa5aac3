"""What ``fxoffload moe`` shows: a table, a progress bar, a line at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table

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
    """The kind of checkpoint, one row for each group of layers that are alike, and the whole below."""
    layouts = {_with_form(tower.layout, tower.form): tower.layout for tower in found.towers}
    mixed, several_forms = len(layouts) > 1, len({tower.form for tower in found.towers if tower.form}) > 1
    layout = f"mixed: {', '.join(layouts)}" if mixed else next(iter(layouts))
    whole = [Column("layers", no_wrap=True), *([Column("layout", no_wrap=True)] if mixed else [])]
    folded = [Column(name, overflow="fold") for name in ("experts", "gate \\[I, H]", "dtypes", "bytes")]
    table = Table(*whole, *folded)
    for tower in found.towers:
        table.add_row(
            escape(printable(f"{tower.prefix}{{{ranges(tower.layers)}}}")),
            *([_with_form(tower.layout, tower.form if several_forms else None)] if mixed else []),
            str(tower.num_experts),
            escape(str(list(tower.shape))),
            ", ".join(tower.dtypes),
            format_bytes(tower.num_bytes),
        )
    dtypes = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.bytes_by_dtype.items())
    head = printable(f"{found.folder}: {found.family}, layout {layout}")
    console.print(escape(head), soft_wrap=True, highlight=False)
    console.print(table)
    console.print(
        f"{found.num_tensors} tensors in {found.num_shards} shards, {format_bytes(found.num_bytes)}: {dtypes}; "
        f"{len(found.other_files)} other files",
        soft_wrap=True,
        highlight=False,
    )
    for note in found.notes:
        console.print(f"note: {escape(printable(note))}", soft_wrap=True, highlight=False)


def describe_conversion(done: Conversion, target: str) -> str:
    """One line, another for each note, and another where it was verified."""
    layout = _with_form(done.layout, done.form)
    rate = done.num_bytes / 1e9 / max(done.seconds, 1e-9)
    text = (
        f"{target}: {done.source_layout} -> {layout}, {done.num_tensors} tensors in {done.num_shards} shards, "
        f"{format_bytes(done.num_bytes)} in {done.seconds:.1f} s ({rate:.2f} GB/s)"
    )
    verified = [] if done.verification is None else [describe_verification(done.verification)]
    return "\n".join([text, *(f"note: {note}" for note in done.notes), *verified])


def describe_verification(done: Verification) -> str:
    text = (
        f"verified: {done.num_tensors} tensors (one per expert), {format_bytes(done.num_bytes)}, equal bit for bit; "
        f"fingerprint {done.fingerprint}"
    )
    return "\n".join([text, *(f"note: {note}" for note in done.notes)])


def printable(text: str) -> str:
    """``text`` without characters that a terminal obeys or UTF-8 lacks: names of files may be any bytes."""
    shown = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)


def _with_form(layout: str, form: str | None) -> str:
    return layout if form is None else f"{layout} ({form})"
