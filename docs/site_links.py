"""A hook of mkdocs: links from documents into the repository, which is no part of the site, become plain paths."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(benchmarks/[^)#]*|tests/[^)#]*|README\.md|CHANGELOG\.md)(?:#[^)]*)?\)")
_EXAMPLES = re.compile(r"\[([^\]]+)\]\((?:\.\./)?(examples/[^)]*)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page."""
    markdown = _OUTSIDE.sub(lambda m: _shown(m[1], m[2]), markdown)
    return _EXAMPLES.sub(lambda m: _shown(m[1], f"docs/{m[2]}"), markdown)


def _shown(text: str, path: str) -> str:
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
