"""``fxoffload moe``: convert MoE checkpoints between layouts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from fxoffload import checkpoints
from fxoffload.checkpoints.convert import DEFAULT_SHARD_SIZE
from fxoffload.checkpoints.families import FORMS
from fxoffload.checkpoints.find_family import EXAMPLE
from fxoffload.cli.moe_tables import (
    describe_conversion,
    describe_verification,
    print_inspection,
    printable,
    progress_bar,
)

app = typer.Typer(
    no_args_is_help=True,
    help="Convert MoE checkpoints between one tensor per expert, stacked experts and fused gate and up projections.",
)

# As text: a Path of an empty name would be the current folder.
Source = Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint's folder.")]
Target = Annotated[str, typer.Argument(metavar="DST", help="The folder to write; must not exist.")]
ShardSize = Annotated[str, typer.Option(help="Most bytes of tensors in a file, for example 5GB or 2GiB.")]
Workers = Annotated[int | None, typer.Option(help="Threads; by default one per CPU, 2 to 8.")]
Verify = Annotated[bool, typer.Option("--verify", help="Compare a checksum of every tensor with the source.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the checkpoint at DST once the new one is whole.")
]
Pattern = Annotated[str | None, typer.Option(help=f"An expert's key, for a family that is not known: '{EXAMPLE}'.")]
Fsync = Annotated[bool, typer.Option("--fsync/--no-fsync", help="Return once the output is on the disk.")]
Fused = Annotated[str | None, typer.Option(help="; ".join(f"{name}: {text}" for name, text in FORMS.items()))]
Towers = Annotated[
    list[str] | None,
    typer.Option(metavar="BEGINNING=LAYOUT", help="Another layout for a tower, by how its keys begin: mtp.=experts."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("split", help="Stacked or fused -> one tensor per expert, as Hugging Face stores it.")
@app.command("merge", help="One tensor per expert -> stacked: gate_proj, up_proj [E, I, H], down_proj [E, H, I].")
def merge_or_split(
    context: typer.Context,
    source: Source,
    target: Target,
    shard_size: ShardSize = DEFAULT_SHARD_SIZE,
    workers: Workers = None,
    verify: Verify = False,
    overwrite: Overwrite = False,
    pattern: Pattern = None,
    fsync: Fsync = True,
) -> None:
    # The options above by their names, as both functions take them.
    _run(checkpoints.merge if context.command.name == "merge" else checkpoints.split, context.params)


@app.command()
def convert(
    source: Source,
    target: Target,
    to: Annotated[str, typer.Option(help="experts, stacked or fused.")],
    form: Fused = None,
    tower: Towers = None,
    shard_size: ShardSize = DEFAULT_SHARD_SIZE,
    workers: Workers = None,
    verify: Verify = False,
    overwrite: Overwrite = False,
    pattern: Pattern = None,
    fsync: Fsync = True,
) -> None:
    """Any of the three layouts -> another."""
    arguments = locals()
    towers = _parse_towers(arguments.pop("tower"))
    _run(checkpoints.convert, {**arguments, "towers": towers})


def _parse_towers(words: list[str] | None) -> dict[str, str]:
    towers = {}
    for word in words or ():
        beginning, _, layout = word.rpartition("=")
        if not beginning or beginning in towers:
            raise typer.BadParameter(f"expected --tower BEGINNING=LAYOUT, once for a beginning, found {word!r}")
        towers[beginning] = layout
    return towers


@app.command()
def inspect(source: Source, pattern: Pattern = None, as_json: AsJson = False) -> None:
    """Layout, family, layers, experts, dtypes and bytes. Reads headers only."""
    found = checkpoints.inspect(source, pattern=pattern)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        print_inspection(found, Console())


def _run(work: Callable[..., checkpoints.Conversion], arguments: dict[str, Any]) -> None:
    """``work`` with the arguments of a command, which are named as its own."""
    with progress_bar() as progress:
        done = work(**arguments, progress=progress)
    try:
        typer.echo(printable(describe_conversion(done, arguments["target"])))
    except (OSError, UnicodeError) as error:
        raise OSError(f"{arguments['target']} is whole, but this could not be printed: {error}") from error


@app.command("verify")
def verify_folders(
    source: Source,
    output: Annotated[str, typer.Argument(metavar="DST", help="A folder that should hold the same weights.")],
    workers: Workers = None,
    pattern: Pattern = None,
) -> None:
    """Prove that two folders hold the same weights and files, in whatever layouts."""
    with progress_bar() as progress:
        done = checkpoints.verify(source, output, pattern=pattern, workers=workers, progress=progress)
    typer.echo(printable(describe_verification(done)))
