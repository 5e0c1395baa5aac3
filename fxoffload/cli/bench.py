"""``fxoffload bench``: what this machine gains, in a few minutes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fxoffload.files import replace_file

LIMIT_S = 180.0

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write every figure here.")]


def bench(
    json_file: JsonFile = None,
    limit_s: Annotated[float, typer.Option(min=1.0, help="No variant takes longer than so many seconds.")] = LIMIT_S,
) -> None:
    """Train a decoder that fits the GPU's free memory in four ways, then offload it whole and bring it back.

    Plain Inductor, with checkpointing, fxoffload's default, fxoffload at checkpointing's peak: step time and peak
    memory, each in a process of its own. Without a GPU: a rehearsal in less than a minute, which says that it is one.
    """
    from fxoffload.bench.run import bench as measure
    from fxoffload.bench.show import render

    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"expected an existing folder for the file, found no {json_file.parent.resolve()}")
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            report = measure(limit_s, lambda name: status.update(f"{name} ..."))
    else:
        report = measure(limit_s, lambda name: print(f"{name} ...", file=sys.stderr, flush=True))
    typer.echo(render(report))
    if json_file is not None:
        replace_file(json_file, report.to_json().encode())
    if not any(row.steps or row.switches for row in report.rows):
        raise typer.Exit(1)
