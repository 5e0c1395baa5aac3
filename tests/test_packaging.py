from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "Makefile",
    "CHANGELOG.md",
    "LICENSE",
    "CONTRIBUTING.md",
    "CITATION.cff",
    "mkdocs.yml",
    "fxoffload",
    "passes",
    "tests",
    "benchmarks",
    "docs",
}


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="tomllib is in Python 3.11 and newer")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed(pyproject: dict[str, Any]) -> None:
    folders = {
        path.parent.relative_to(ROOT)
        for path in (ROOT / "fxoffload").rglob("*.py")
        if not path.is_relative_to(ROOT / "fxoffload" / "passes")
    }
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)
    on_disk = {".".join(folder.parts) for folder in folders} | {"fxoffload.passes"}
    assert set(pyproject["tool"]["setuptools"]["packages"]) == on_disk
    assert pyproject["tool"]["setuptools"]["package-dir"]["fxoffload.passes"] == "passes"


def test_passes_has_no_subpackages() -> None:
    assert not list((ROOT / "passes").glob("*/*.py"))


def test_the_link_is_relative_and_leads_to_passes() -> None:
    link = ROOT / "fxoffload" / "passes"
    assert link.is_symlink()
    assert str(link.readlink()) == "../passes"


def test_passes_has_one_name() -> None:
    with pytest.raises(ImportError, match=r"'passes'; import it as 'fxoffload\.passes'"):
        importlib.import_module("passes")
    assert importlib.import_module("fxoffload.passes").__name__ == "fxoffload.passes"


def test_the_entry_point_is_declared_and_loads(pyproject: dict[str, Any]) -> None:
    points = pyproject["project"]["entry-points"]["torch_dynamo_backends"]
    assert points == {"fxoffload": "fxoffload.backend:fxoffload"}
    module, _, name = points["fxoffload"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_command_is_declared_and_loads(pyproject: dict[str, Any]) -> None:
    scripts = pyproject["project"]["scripts"]
    assert scripts == {"fxoffload": "fxoffload.cli.app:main"}
    module, _, name = scripts["fxoffload"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.slow
def test_the_import_registers_the_backend_and_starts_no_cuda() -> None:
    # Without entry points, as where the package is not installed.
    code = """
import importlib.metadata as metadata
metadata.entry_points = lambda **params: metadata.EntryPoints(())
import fxoffload
import torch
assert not torch.cuda.is_initialized(), "the import started CUDA"
import torch._dynamo
names = torch._dynamo.list_backends(exclude_tags=())
assert "fxoffload" in names, names
assert not torch.cuda.is_initialized(), "listing the backends started CUDA"
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_the_import_leaves_inductor_alone() -> None:
    """It takes about a second. Nor do parts that need no compiler import it."""
    code = """
import sys
import fxoffload
assert "torch._inductor.compile_fx" not in sys.modules, "fxoffload"
for name in ("phases", "checkpoints", "cli.app"):
    __import__(f"fxoffload.{name}")
    assert "torch._inductor.compile_fx" not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_make_help_lists_all_targets() -> None:
    targets = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^make ([\w-]+) ", done.stdout, re.MULTILINE)) == set(" ".join(targets).split()) - {"help"}


def test_top_level_listing() -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = {line.split("/")[0] for line in listing.stdout.splitlines()}
    if not names:
        pytest.skip("not a git checkout with tracked files")
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL
