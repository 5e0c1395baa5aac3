"""``fxoffload moe``: the same conversions, with a table, a progress bar and messages instead of tracebacks."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fxoffload import checkpoints
from fxoffload.cli import app as app_module
from fxoffload.cli.app import app, main
from tests.checkpoints.making import FAMILY, TINY, as_layout, assert_same, expert_state, load, make, other_state
from tests.checkpoints.test_towers import PUBLISHED

ROOT = Path(__file__).parents[2]
QWEN = FAMILY["qwen3_moe"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: exit status, stdout, stderr."""
    monkeypatch.setattr(app_module.signal, "signal", lambda *args: None)

    def invoke(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fxoffload", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        out, err = capfd.readouterr()
        return (code if isinstance(code, int) else int(code is not None)), out, err

    return invoke


def expected(layout: str) -> dict:
    return as_layout(QWEN, expert_state(QWEN, TINY), layout) | other_state(TINY)


def test_merge_convert_and_split(tmp_path: Path, run: Run) -> None:
    source = make(tmp_path / "a")
    code, out, err = run("moe", "merge", source, tmp_path / "b", "--verify", "--shard-size", "1kB", "--workers", "1")
    assert code == 0, err
    assert "experts -> stacked" in out and "GB/s" in out
    assert "equal bit for bit; fingerprint " in out
    assert err == "", "no progress bar where there is no terminal"
    assert run("moe", "convert", tmp_path / "b", tmp_path / "c", "--to", "fused", "--no-fsync")[0] == 0
    assert run("moe", "split", tmp_path / "c", tmp_path / "d")[0] == 0
    for folder, layout in (("b", "stacked"), ("c", "fused"), ("d", "experts")):
        assert_same(load(tmp_path / folder), expected(layout))
    code, out, _ = run("moe", "verify", source, tmp_path / "c")
    assert code == 0 and checkpoints.verify(source, source).fingerprint in out


def test_inspect_shows_a_table_and_json(tmp_path: Path, run: Run) -> None:
    source = make(tmp_path / "gpt", "fused", "gpt_oss")
    code, out, _ = run("moe", "inspect", source)
    assert code == 0
    for word in (
        "gpt_oss",
        "fused (interleaved)",
        "model.layers.{0-1}",
        "[5, 6]",
        "BF16",
        "4 other files",
        f"{source}: ",
    ):
        assert word in out
    code, out, _ = run("moe", "inspect", source, "--json")
    found = json.loads(out)
    assert (found["layout"], found["form"], found["towers"][0]["num_experts"]) == ("fused", "interleaved", 4)
    assert found["num_bytes"] == sum(tensor.nbytes for tensor in load(source).values())


def test_a_mistake_is_a_message_and_not_a_traceback(tmp_path: Path, run: Run) -> None:
    source = make(tmp_path / "a")
    for words, message in (
        (("merge", source, source), "is the source"),
        (("split", source, tmp_path / "b"), "nothing to split"),
        (("convert", source, tmp_path / "b", "--to", "merged"), "expected a layout of"),
        (("merge", source, tmp_path / "b", "--shard-size", "5 gigs"), "shard_size is '5 gigs'"),
        (("inspect", tmp_path / "none"), "found nothing at"),
        (("verify", source, tmp_path / "none"), "found nothing at"),
    ):
        code, out, err = run("moe", *words)
        assert (code, out) == (1, "")
        assert err.startswith("fxoffload: ") and message in err and "Traceback" not in err
    (tmp_path / "b").mkdir()
    code, _, err = run("moe", "merge", source, tmp_path / "b")
    assert code == 1 and "--overwrite" in err
    assert run("moe", "merge", source, tmp_path / "b", "--overwrite")[0] == 0


def test_an_empty_destination_is_not_the_current_folder(tmp_path: Path, run: Run) -> None:
    code, _, err = run("moe", "merge", make(tmp_path / "a"), "", "--overwrite")
    assert code == 1 and "found an empty name" in err


def test_an_empty_source_is_not_the_current_folder(run: Run) -> None:
    code, _, err = run("moe", "inspect", "")
    assert (code, err) == (1, "fxoffload: expected a checkpoint folder, found an empty name; name the folder\n")


def test_a_report_that_cannot_be_printed_says_that_the_work_is_done(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fxoffload", "moe", "merge", str(make(tmp_path / "a")), str(tmp_path / "b")]
    with open("/dev/full", "w") as full:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=tmp_path, env=env, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert f"{tmp_path / 'b'} is whole, but this could not be printed" in done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert_same(load(tmp_path / "b"), expected("stacked"))


def test_a_pattern_on_the_command_line(tmp_path: Path, run: Run) -> None:
    source = make(tmp_path / "a")
    (source / "config.json").unlink()
    code, _, err = run("moe", "merge", source, tmp_path / "b")
    assert code == 1 and "--pattern" in err
    pattern = err[err.index("--pattern '") + 11 :].split("'")[0]
    code, _, err = run("moe", "merge", source, tmp_path / "b", "--pattern", pattern)
    assert code == 0, err
    assert_same(load(tmp_path / "b"), expected("stacked"))


def test_help_names_every_command() -> None:
    found = CliRunner().invoke(app, ["moe", "--help"])
    assert found.exit_code == 0
    assert all(name in found.output for name in ("merge", "split", "convert", "inspect", "verify"))


def test_a_terminal_sees_bytes_and_their_rate(tmp_path: Path) -> None:
    """``python -m fxoffload`` under a pseudo-terminal."""
    source = make(tmp_path / "a")
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "fxoffload", "moe", "merge", str(source), str(tmp_path / "b"), "--verify"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end was closed
            break
        if not data:
            break
        seen += data
    os.close(ours)
    assert process.wait(timeout=60) == 0
    text = seen.decode()
    num_bytes = checkpoints.inspect(source).num_bytes
    assert "convert" in text and "verify" in text
    assert f"{num_bytes / 1000:.1f}/{num_bytes / 1000:.1f} kB" in text
    assert "B/s" in text


def test_the_package_imports_no_command_line_and_no_safetensors() -> None:
    code = """
import sys
import fxoffload
import fxoffload.checkpoints
loaded = {name.partition(".")[0] for name in sys.modules} & {"typer", "rich", "click", "safetensors", "transformers"}
loaded |= {name for name in sys.modules if name.startswith("fxoffload.cli")}
assert not loaded, loaded
import fxoffload.cli.app
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_towers_on_the_command_line(tmp_path: Path, run: Run) -> None:
    source = PUBLISHED["Qwen3.5-MoE"].save(tmp_path / "a")
    code, out, _ = run("moe", "inspect", source)
    assert code == 0 and "layout mixed: fused (concatenated), experts" in out
    rows = [line for line in out.splitlines() if ".layers.{" in line]
    assert [line.replace("│", " ").split()[:2] for line in rows] == [
        ["model.language_model.layers.{0-1}", "fused"],
        ["mtp.layers.{0}", "experts"],
    ]
    towers = json.loads(run("moe", "inspect", source, "--json")[1])["towers"]
    assert [(t["layout"], t["form"]) for t in towers] == [("fused", "concatenated"), ("experts", None)]
    code, out, _ = run("moe", "convert", source, tmp_path / "b", "--to", "fused", "--verify")
    assert code == 0 and "mixed -> fused (concatenated)" in out
    words = ("moe", "convert", tmp_path / "b", tmp_path / "c", "--to", "fused", "--verify")
    assert run(*words, "--tower", "mtp.=experts")[0] == 0
    assert_same(load(tmp_path / "c"), load(source))
    for wrong in ("mtp.", "=experts", "mtp.=x"):
        assert run(*words, "--overwrite", "--tower", wrong)[0] != 0


def test_weights_beside_the_index_are_named(tmp_path: Path, run: Run) -> None:
    source = make(tmp_path / "a")
    (source / "pytorch_model.bin").touch()
    (source / "\x1b]0;x.gguf").touch()
    found = json.loads(run("moe", "inspect", source, "--json")[1])
    assert found["extra_files"] == [] and set(found["foreign_weights"]) == {"pytorch_model.bin", "\x1b]0;x.gguf"}
    for words, count in (
        (("inspect", source), 1),
        (("merge", source, tmp_path / "b", "--verify"), 2),
        (("verify", source, tmp_path / "b"), 1),
    ):
        code, out, _ = run("moe", *words)
        notes = [line for line in out.splitlines() if line.startswith("note: ")]
        assert code == 0 and len(notes) == count
        assert all("pytorch_model.bin" in note and r"'\x1b]0;x.gguf'" in note for note in notes)
        assert "\x1b" not in out
