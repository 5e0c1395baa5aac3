"""The build backend: setuptools', with two commands of its own.

A release's readme is README.md with the repository's address in front of its relative links and pictures. In a checkout
README.md keeps relative links, which work there; a package index shows the text alone. An sdist holds this file, and no
tests.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403  (the hooks of PEP 517)
from setuptools.command.egg_info import egg_info
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)\s]+)\)")


class EggInfo(egg_info):
    """Also gives the readme to the metadata."""

    def finalize_options(self) -> None:
        address = repository_of((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        metadata = self.distribution.metadata
        metadata.long_description = index_readme((ROOT / "README.md").read_text(encoding="utf-8"), address)
        metadata.long_description_content_type = "text/markdown"
        super().finalize_options()


class Sdist(sdist):
    """With this file, without tests."""

    def make_distribution(self) -> None:
        self.filelist.prune("tests")
        self.filelist.append(str(Path(__file__).resolve().relative_to(ROOT)))
        super().make_distribution()


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
