"""The Python blocks of README and docs run, without a GPU and without Inductor's kernels; those that need a framework
are skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from fxoffload.compiler import planning
from fxoffload.options import Options
from tests.marks import slow

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
# What their blocks do, the README's do.
SLOW = ("docs/index.md", "docs/guides/planning_without_a_gpu.md")


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in DOCUMENTS])
def test_python_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FXOFFLOAD_PHASES_DEVICE_TYPES", "cpu")
    torch.compiler.reset()
    # Kernels need a C++ compiler and most of a minute; what a block says does not depend on them.
    chosen = Options.from_torch_compile
    uncompiled = staticmethod(lambda mode, options: replace(chosen(mode, options), inner="aot_eager"))
    monkeypatch.setattr(Options, "from_torch_compile", uncompiled)
    monkeypatch.setattr(planning, "DRAWN_POINTS", 2)  # of a frontier, each of which takes seconds
    document = Sybil([PythonCodeBlockParser(), SkipParser()], path=str(ROOT)).parse(ROOT / name)
    for example in document.examples():
        example.evaluate()
    torch.compiler.reset()


@pytest.mark.slow
def test_the_script_for_several_ranks_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = (ROOT / "docs/guides/fsdp2.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "train.py").write_text(blocks[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fxoffload/bytes_offloaded" in done.stdout
