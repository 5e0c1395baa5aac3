"""The command line: which subcommands there are, and what a failure looks like."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import typer

from fxoffload.checkpoints.errors import CheckpointError
from fxoffload.cli.moe import app as moe
from fxoffload.errors import FxOffloadError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(moe, name="moe")


@app.callback()
def fxoffload() -> None:
    """Train in less GPU memory; tools beside the torch.compile backend."""


def main() -> None:
    """Run a command; a mistake of the user's is one message on stderr and exit status 1, not a traceback."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app(prog_name="fxoffload")
    except (CheckpointError, FxOffloadError, OSError) as error:
        print(f"fxoffload: {error}", file=sys.stderr)
        sys.exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM cleans up as Ctrl-C does."""
    raise KeyboardInterrupt
