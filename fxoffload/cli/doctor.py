"""``fxoffload doctor``: what of this machine matters, and what would not work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from fxoffload.doctor import Finding


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Look at torch, GPUs, the compiler, the machine's profile and the memory to pin; say what would not work and why.

    Exit status 1 where something is broken (!); 0 otherwise, also without a GPU, where planning works, and with advice
    on what would be better (*).
    """
    from dataclasses import asdict

    from fxoffload.doctor import examine

    found = examine()
    problems = [f for f in found if f.problem]
    if as_json:
        typer.echo(json.dumps([asdict(f) for f in found], indent=1))
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        for finding in found:
            mark = "[red]!" if finding.problem else "[yellow]*" if finding.advice else "[green]ok"
            table.add_row(mark, *_cells(finding))
        console = Console()
        console.print(table)
        console.print(f"\n{_verdict(found)}")
    if problems:
        raise typer.Exit(1)


def _verdict(found: list[Finding]) -> str:
    if problems := sum(bool(f.problem) for f in found):
        return f"{problems} of {len(found)} need a look"
    from fxoffload.doctor import NO_GPU

    if any(f.subject == NO_GPU for f in found):
        return "without a GPU models can be planned, and compiled models offload nothing"
    return "all works"


def _cells(finding: Finding) -> tuple[str, str]:
    problem = f"\n[red]{escape(finding.problem)}[/red]" if finding.problem else ""
    advice = f"\n[yellow]{escape(finding.advice)}[/yellow]" if finding.advice else ""
    return escape(finding.subject), escape(finding.found) + problem + advice
