"""``fxoffload profile``: measure a machine into a file, or show a profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="What plans know of a machine: its rates, measured into a file, or shown.")

Device = Annotated[str | None, typer.Option(help="For example cuda:1; by default the current GPU, else the CPU.")]


@app.command()
def measure(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The JSON file to write.")],
    device: Device = None,
    notes: Annotated[str, typer.Option(help="Added to the profile's notes.")] = "",
) -> None:
    """Measure this machine; seconds, in which nothing else should use it."""
    import dataclasses

    from fxoffload.machine import cache
    from fxoffload.machine import measure as measuring
    from fxoffload.machine.describe import describe
    from fxoffload.machine.devices import resolve

    found = measuring.measure(resolve(device))
    if notes:
        found = dataclasses.replace(found, notes=f"{found.notes} {notes}")
    cache.write(out, found)
    typer.echo(describe(found))


@app.command()
def show(
    profile: Annotated[str | None, typer.Argument(help="A file or a shipped name; by default this machine's.")] = None,
) -> None:
    """Print a profile: rates of copies, products, attention and memory."""
    from fxoffload.machine.describe import describe
    from fxoffload.machine.lookup import profile_for
    from fxoffload.machine.shelf import load_profile

    typer.echo(describe(load_profile(profile) if profile else profile_for(None, allow_measure=False)))
