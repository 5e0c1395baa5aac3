from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fxoffload.cli.app import main
from fxoffload.machine import load_profile, shipped_names
from fxoffload.machine.data_sheets import SHEETS
from tests.machine.example import example

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_measure_writes_a_file_that_can_be_loaded(tmp_path: Path) -> None:
    out = tmp_path / "new" / "cpu.json"
    command = [sys.executable, "-m", "fxoffload", "profile", "measure", "--device", "cpu", "--out", str(out)]
    done = subprocess.run([*command, "--notes", "in a test"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = load_profile(out)
    assert found.device_type == "cpu"
    assert found.notes.startswith("Measured ")
    assert found.notes.endswith("in a test")
    assert found.device_name in done.stdout
    assert "matmul TFLOP/s" in done.stdout
    assert "RuntimeWarning" not in done.stderr


def test_the_shipped_profiles_are_installed() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib is in Python 3.11 and newer")
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "fxoffload" / "machine"
    installed = {path for pattern in data["fxoffload.machine"] for path in folder.glob(pattern)}
    assert installed == {path for path in (folder / "shipped").iterdir() if path.is_file()}
    assert {path.stem for path in installed} | set(SHEETS) == set(shipped_names())


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """What the command ``fxoffload profile`` returns, in this process."""
    monkeypatch.setattr(sys, "argv", ["fxoffload", "profile", *arguments])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_show(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "show", "h200") == 0
    assert re.search(r"256\.0 MiB +55\.\d +55\.\d ", capsys.readouterr().out)
    file = tmp_path / "p.json"
    file.write_text(example().to_json())
    assert run(monkeypatch, "show", str(file)) == 0
    assert "Example GPU, 80.0 GiB" in capsys.readouterr().out


def test_failures_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, "show", "h201") == 1
    assert "did you mean 'h200'?" in capsys.readouterr().err
    assert run(monkeypatch, "measure", "--device", "cuda:99", "--out", str(tmp_path / "p.json")) == 1
    assert "expected cuda:99 on this machine" in capsys.readouterr().err
    (tmp_path / "file").touch()
    monkeypatch.setattr("fxoffload.machine.measure.measure", lambda device: example(device_type="cpu"))
    assert run(monkeypatch, "measure", "--device", "cpu", "--out", str(tmp_path / "file" / "p.json")) == 1
    assert "File exists" in capsys.readouterr().err
