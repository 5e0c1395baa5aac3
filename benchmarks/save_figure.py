"""Writes a picture in one step, as every other file of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.schema import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> None:
    """The picture at ``path``, whose ending says the format; without one it is a PNG."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:] or "png", dpi=150)
    write_atomically(path, content.getvalue())
