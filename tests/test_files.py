"""Writes never go through a planted link: names cannot be guessed, new files are new."""

from __future__ import annotations

import ast
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.run_suite import Process
from benchmarks.save_figure import save_figure
from benchmarks.schema import write_atomically
from benchmarks.suite import Run
from fxoffload.bench import run, show
from fxoffload.cli.app import app
from fxoffload.files import replace_file
from fxoffload.machine import cache
from fxoffload.machine.devices import Identity
from fxoffload.runtime.host_memory.ledger import Ledger
from tests.machine.example import example
from tests.planner.test_plan import plan

ROOT = Path(__file__).parents[1]


def bench_json(path: Path) -> None:
    class Report:
        rows = ()

        def to_json(self) -> str:
            return "{}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "bench", lambda *_: Report())
        patch.setattr(show, "render", lambda report: "")
        CliRunner().invoke(app, ["bench", "--json", str(path)])


def picture(path: Path) -> None:
    from matplotlib.figure import Figure

    save_figure(Figure(figsize=(1, 1)), path)


def log_of_a_run(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *_, **__: None)
        Process(Run(path.stem, "phases"), [], 1.0, path.parent, [])._log.close()


WRITERS: dict[str, Callable[[Path], object]] = {
    "file.json": lambda path: replace_file(path, b"{}"),
    "trace.json": lambda path: plan().save_trace(path),
    "plan.png": lambda path: plan().plot(path),
    "profile.json": lambda path: cache.write(path, example()),
    "bench.json": bench_json,
    "report.json": lambda path: write_atomically(path, "{}"),
    "picture.png": picture,
    "run.log": log_of_a_run,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_at_the_name_is_replaced_and_not_followed(tmp_path: Path, name: str) -> None:
    path, victim = tmp_path / name, tmp_path / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)
    WRITERS[name](path)
    assert victim.read_text() == "precious"
    assert path.is_file() and not path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == sorted([name, "victim"])
    usual = tmp_path / "usual"
    usual.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode), "others can read it as any file"


@pytest.mark.parametrize("write", [replace_file, write_atomically])
def test_a_link_at_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    path, victim = tmp_path / "plan.json", tmp_path / "victim"
    victim.write_text("precious")
    names, replace = set(), os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (names.add(old.name), replace(old, new)))
    for _ in range(2):
        write(path, b"{}")
    assert len(names) == 2, "no name is used twice"
    assert all(len(name) > 32 and "plan" not in name for name in names)
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: "known")
    write(path, b"{}")
    (laid,) = (tmp_path / name for name in names if "known" in name)
    laid.symlink_to(victim)
    with pytest.raises(FileExistsError):
        write(path, b"[]")
    assert (victim.read_text(), path.read_text()) == ("precious", "{}")


@pytest.mark.parametrize("to", ["file", "pipe"])
def test_dev_stdout_is_written_to(tmp_path: Path, to: str) -> None:
    file_of_it = ROOT / "fxoffload" / "files.py"  # by itself: the package would import torch
    code = f"import runpy; runpy.run_path({str(file_of_it)!r})['replace_file']('/dev/stdout', b'{{}}')"
    before = os.readlink("/dev/stdout")
    with (tmp_path / "out").open("wb") as file:
        target = file if to == "file" else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", code], stdout=target, check=True)
    assert (done.stdout or (tmp_path / "out").read_bytes()) == b"{}"
    assert os.readlink("/dev/stdout") == before


def test_locks_and_entries_do_not_follow_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    identity = Identity("Example", "cuda", "1", "2")
    lock = cache.path_of(identity).with_suffix(".lock")
    lock.symlink_to(tmp_path / "nowhere")
    with cache.locked(identity):
        pass
    folder = tmp_path / "ledger"
    folder.mkdir(mode=0o700)
    (folder / "lock").symlink_to(tmp_path / "nowhere")
    Ledger(folder).booked_bytes()
    assert not (tmp_path / "nowhere").exists()


# Every other call that could write, and why no link can be planted there.
LAID_BY_NOBODY = {
    "benchmarks/copy_trace.py": "a TemporaryDirectory",
    "benchmarks/launch.py": "a TemporaryDirectory",
    "benchmarks/launch_sweep.py": "a TemporaryDirectory",
    "benchmarks/moe_data.py": "a folder that it makes, in a TemporaryDirectory",
    "benchmarks/moe_variants.py": "a TemporaryDirectory",
    "benchmarks/sweep.py": "a TemporaryDirectory of launch_sweep",
    "fxoffload/bench/__main__.py": "a TemporaryDirectory of processes",
    "fxoffload/bench/processes.py": "a TemporaryDirectory",
    "fxoffload/compiler/plan_ahead.py": "a TemporaryDirectory",
    "fxoffload/files.py": "no folder: a device or a pipe",
}
WRITING = {"write_text", "write_bytes", "tofile", "copyfile", "copy2", "copytree", "save_file", "export_chrome_trace"}
SAFE_OS_FLAGS = {"O_EXCL", "O_NOFOLLOW", "O_RDONLY"}


def calls_that_may_follow_a_link(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if name in WRITING:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        elif name == "open" and owner == "os":
            flags = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
            if not flags & SAFE_OS_FLAGS:
                yield f"{path.relative_to(ROOT)}:{node.lineno} os.open"
        elif name == "open":
            if any(keyword.arg == "opener" for keyword in node.keywords):
                continue  # it calls os.open
            words = [*node.args, *(keyword.value for keyword in node.keywords)]
            modes = [w.value for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)]
            if any(mode[:1] in ("w", "a") and set(mode) <= set("wabt+") for mode in modes):
                yield f"{path.relative_to(ROOT)}:{node.lineno} open"


def test_nothing_else_writes_to_names_that_can_be_guessed() -> None:
    found = []
    for folder in ("fxoffload", "benchmarks", "passes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("fxoffload/passes/") and name not in LAID_BY_NOBODY:
                found += calls_that_may_follow_a_link(path)
    assert found == []
