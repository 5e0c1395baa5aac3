"""The readme of a release: README.md with the repository's address in front of its relative links and pictures.

All else is in pyproject.toml. In a checkout README.md keeps relative links, which work there; a package index shows the
text alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)\s]+)\)")


def index_readme(text: str, repository: str) -> str:
    """``text`` with each relative link as an address in ``repository``; pictures as files, all else as pages."""

    def absolute(link: re.Match[str]) -> str:
        view = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository}/{view}/main/{link['path']})"

    return _LINK.sub(absolute, text)


def repository_of(pyproject: str) -> str:
    """The address in the text of pyproject.toml. No TOML parser: Python 3.10 has none."""
    found = re.search(r'^Repository = "(.+)"$', pyproject, re.MULTILINE)
    if found is None:
        raise ValueError("expected Repository in [project.urls] of pyproject.toml, found none")
    return found[1]


if __name__ == "__main__":
    address = repository_of((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setup(
        long_description=index_readme((ROOT / "README.md").read_text(encoding="utf-8"), address),
        long_description_content_type="text/markdown",
    )
