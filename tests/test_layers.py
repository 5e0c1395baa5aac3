"""Imports go down the layers of pyproject.toml, and no module imports itself by way of others."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]


def test_imports_go_down() -> None:
    """The contracts of ``[tool.importlinter]``."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_no_import_circles() -> None:
    """Those under TYPE_CHECKING count too."""
    graph = grimp.build_graph("fxoffload", cache_dir=None)
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    assert len(imports) > 300
    assert imports["fxoffload.compiler.session"] > {"fxoffload.errors"}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({**imports, "fxoffload.errors": {"fxoffload.compiler.session"}}).prepare()
