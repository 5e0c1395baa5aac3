"""A release: sdist and wheel are built from what git tracks, and the wheel works installed, outside of the checkout."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import fxoffload

ROOT = Path(__file__).parents[1]

STEP = """
import importlib.metadata, sys
import torch, fxoffload
from fxoffload.machine import load_profile

assert fxoffload.__file__.startswith(sys.prefix), fxoffload.__file__
assert importlib.metadata.distribution("fxoffload").files is not None
assert load_profile("h200").device_name == "NVIDIA H200"
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
options = {"device_types": ("cpu",), "inner": "aot_eager", "min_bytes": 1, "policy": "offload_all"}
compiled = torch.compile(model, backend="fxoffload", options=options)
compiled(torch.randn(4, 8)).sum().backward()
assert fxoffload.stats().bytes_offloaded > 0
print("trained")
"""


def run(command: list[str | Path], folder: Path) -> str:
    """stdout of a command that sees nothing of the checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that ``python -m build`` makes of the sdist, of a copy of what git tracks or may."""
    # Not build alone: the folder of that name in a checkout can be imported too.
    if importlib.util.find_spec("build") is None or importlib.util.find_spec("build.__main__") is None:
        pytest.skip("needs build: pip install fxoffload[test]")
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", ".", ":!benchmarks", ":!tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    copy = tmp_path_factory.mktemp("checkout")
    for name in listing.stdout.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    # Isolated, it would fetch setuptools from the network.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", copy / "dist", copy], copy)
    (sdist,), (wheel,) = (list((copy / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    assert sdist.name == f"fxoffload-{fxoffload.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", ".release/fxoffload_release.py"} <= packed
    assert not [name for name in packed if name.startswith("tests/")]
    return wheel


def test_all_that_is_imported_or_read_is_in_the_wheel(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    # fxoffload/passes is a link to passes/, which rglob does not follow.
    sources = [(ROOT / "fxoffload").rglob("*.py"), (ROOT / "fxoffload").rglob("*.json")]
    there = {str(path.relative_to(ROOT)) for paths in sources for path in paths if path.parent.name != "passes"}
    there |= {f"fxoffload/passes/{path.name}" for path in (ROOT / "passes").glob("*.py")}
    assert there | {"fxoffload/py.typed"} <= packed
    assert not [name for name in packed if not name.startswith("fxoffload")], "another top-level package"


def test_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        found = email.message_from_bytes(archive.read(name))
    assert found["Version"] == fxoffload.__version__
    urls = dict(str(url).split(", ") for url in found.get_all("Project-URL") or ())
    assert set(urls) >= {"Repository", "Documentation", "Changelog", "Issues"}
    assert "Programming Language :: Python :: 3.10" in (found.get_all("Classifier") or ())
    assert found["Description-Content-Type"] == "text/markdown"
    text = str(found.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    picture = f"]({urls['Repository']}/raw/main/docs/images/peers.png)"
    assert picture in text and (ROOT / "docs" / "images" / "peers.png").exists()


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel. Torch and the rest are this environment's, by a path; nothing is fetched."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    scripts = sysconfig.get_path("scripts", "venv", vars={"base": str(folder)})
    pip = [sys.executable, "-m", "pip", "--python", Path(scripts) / "python"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], folder.parent)
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site / "of_the_tests.pth").write_text("\n".join(sorted(paths)) + "\n")
    return Path(scripts)


@pytest.mark.slow
def test_the_installed_command_answers(environment: Path, tmp_path: Path) -> None:
    assert run([environment / "fxoffload", "--version"], tmp_path).startswith(f"fxoffload {fxoffload.__version__}, ")
    shown = run([environment / "fxoffload", "--help"], tmp_path)
    assert all(name in shown for name in ("doctor", "plan", "bench", "profile", "moe"))


@pytest.mark.slow
def test_the_installed_package_trains(environment: Path, tmp_path: Path) -> None:
    assert run([environment / "python", "-c", STEP], tmp_path) == "trained\n"


# -- the readme --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fxoffload_release", ROOT / ".release" / "fxoffload_release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_relative_links_become_addresses(backend: ModuleType) -> None:
    text = "![a picture](docs/a.png) [page](docs/a.md#part), [far](https://b.example/c) and [here](#use)"
    assert backend.index_readme(text, "https://r.example/x") == (
        "![a picture](https://r.example/x/raw/main/docs/a.png) [page](https://r.example/x/blob/main/docs/a.md#part), "
        "[far](https://b.example/c) and [here](#use)"
    )


def test_the_readme_links_to_what_is_there() -> None:
    links = re.findall(r"\]\((?!https://)([^)#]+)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_version_is_said_in_one_place() -> None:
    found = [
        name
        for name in ("pyproject.toml", "CITATION.cff", "mkdocs.yml", "README.md")
        if fxoffload.__version__ in (ROOT / name).read_text()
    ]
    assert not found, f"the version is in fxoffload/__init__.py; found it in {found}"
