"""The command line: its subcommands, and the form of a failure.

Nothing here, nor in the modules of the subcommands, imports torch before a command runs: help takes a moment.
"""

from __future__ import annotations

import signal
import sys
import warnings
from types import FrameType
from typing import Annotated

import typer

from fxoffload import __version__
from fxoffload.checkpoints.errors import CheckpointError
from fxoffload.checkpoints.interrupts import ENDING
from fxoffload.cli.bench import bench
from fxoffload.cli.doctor import doctor
from fxoffload.cli.moe import app as moe
from fxoffload.cli.moe_tables import printable
from fxoffload.cli.plan import plan
from fxoffload.cli.profile import app as profile
from fxoffload.torch_private.check_version import torch_version

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(moe, name="moe")
app.add_typer(profile, name="profile")
app.command()(bench)
app.command()(doctor)
app.command()(plan)


class InterruptedBySignal(BaseException):
    """No KeyboardInterrupt, which typer turns into a status of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"fxoffload {__version__}, torch {torch_version() or 'not installed'}")
        raise typer.Exit


@app.callback()
def fxoffload(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions.")
    ] = False,
) -> None:
    """Train in less GPU memory; tools for the torch.compile backend."""


def main() -> None:
    """Run a command; a mistake of the user's is one message on stderr and exit status 1, not a traceback."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(number, _interrupt)
    warnings.showwarning = _show_warning
    try:
        app(prog_name="fxoffload")
    except Exception as error:
        if not _is_told(error):
            raise
        print(f"fxoffload: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)
    except InterruptedBySignal as error:
        left = "; the destination is as it was, or whole" if sys.argv[1:2] == ["moe"] else ""
        print(f"fxoffload: interrupted ({error}){left}", file=sys.stderr)
        sys.exit(error.status)


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """One line. Where in this program it comes from tells a user nothing."""
    kind = "" if category is UserWarning else f"{category.__name__}: "
    print(f"fxoffload: {kind}{printable(str(message))}", file=sys.stderr)


def _is_told(error: Exception) -> bool:
    """Whether the text of an error is all that a user needs."""
    errors = sys.modules.get("fxoffload.errors")  # not imported: none of them was raised
    return isinstance(error, (CheckpointError, OSError, *([errors.FxOffloadError] if errors else [])))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The first signal ends the run; more of them do not disturb it while it cleans up."""
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise InterruptedBySignal(number)
