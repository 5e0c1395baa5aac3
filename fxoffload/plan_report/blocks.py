"""A report as blocks, which are shown as text in a terminal or a log, and as HTML in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tabulate import tabulate


@dataclass(frozen=True)
class Lines:
    """Lines of text, one below the other."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Points:
    """A list. ``title``: a line above it."""

    title: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of text. ``align``: "left" or "right", by column."""

    headers: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    align: tuple[str, ...]


Block: TypeAlias = Lines | Points | Table


def as_text(blocks: Iterable[Block]) -> str:
    """The blocks, with an empty line between two."""
    return "\n\n".join(_text(block) for block in blocks)


def as_html(blocks: Iterable[Block]) -> str:
    """The same for ``_repr_html_``, with everything escaped. The first block's first line is the title."""
    found = [_html(block) for block in blocks]
    return "<div>\n" + "\n".join(found) + "\n</div>"


def _text(block: Block) -> str:
    if isinstance(block, Lines):
        return "\n".join(block.lines)
    if isinstance(block, Points):
        return "\n".join((block.title, *(f"- {item}" for item in block.items)))
    # Without number parsing, or 12.30 would become 12.3.
    return tabulate(block.rows, block.headers, disable_numparse=True, colalign=block.align)


def _html(block: Block) -> str:
    if isinstance(block, Lines):
        return "<p>" + "<br>".join(html.escape(line) for line in block.lines) + "</p>"
    if isinstance(block, Points):
        items = "".join(f"<li>{html.escape(item)}</li>" for item in block.items)
        return f"<p>{html.escape(block.title)}</p><ul>{items}</ul>"
    # tabulate escapes cells of this format.
    return str(tabulate(block.rows, block.headers, tablefmt="html", disable_numparse=True, colalign=block.align))
