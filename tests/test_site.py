"""The documentation site: it builds without a warning, and its references name all that there is."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import fxoffload
from fxoffload import environment, errors
from fxoffload.cli.app import app
from fxoffload.machine import lookup
from fxoffload.options import Options

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    """A link that leads nowhere, and an argument that a docstring names and a function lacks, are warnings."""
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("needs mkdocs-material and mkdocstrings: pip install fxoffload[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    found = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
    page = (tmp_path / "site" / "reference" / "python" / "index.html").read_text()
    assert "activation_budget" in page and "Raises" in page


def test_every_command_is_documented() -> None:
    group = typer.main.get_command(app)
    text = (DOCS / "reference" / "command_line.md").read_text()
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert f"fxoffload {name}" in text, name
        for inner in getattr(command, "commands", {}):
            assert re.search(rf"`(fxoffload {name} )?{inner}`", text), (name, inner)


def test_every_environment_variable_is_documented() -> None:
    text = (DOCS / "reference" / "environment.md").read_text()
    names = {
        value
        for module in (environment, lookup)
        for name, value in vars(module).items()
        if name.endswith("_VARIABLE") and isinstance(value, str)
    }
    assert len(names) >= 3
    for name in names:
        assert f"`{name}`" in text, name


def test_every_error_is_documented() -> None:
    text = (DOCS / "reference" / "errors.md").read_text()
    own = [e for e in vars(errors).values() if isinstance(e, type) and e.__module__ == errors.__name__]
    names = {e.__name__ for e in own if issubclass(e, Exception)}
    for name in names - {"FxOffloadError", "ShortenTraceback"}:
        assert name in text, name


def test_every_option_is_documented() -> None:
    text = (DOCS / "options.md").read_text()
    for option in dataclasses.fields(Options):
        assert f"| `{option.name}` |" in text, option.name


def test_every_public_name_is_documented() -> None:
    text = "".join((DOCS / "reference" / name).read_text() for name in ("python.md", "errors.md"))
    for name in fxoffload._LATE:
        if name not in ("PIECES", "FxOffloadError"):
            assert re.search(rf"\b{name}\b", text), name
