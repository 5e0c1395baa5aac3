"""The examples in docs/examples run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fxoffload import Plan

ROOT = Path(__file__).parents[1]


def run_example(name: str, *arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "docs" / "examples" / name), *arguments]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow
def test_plan_ahead(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = run_example("plan_ahead.py", str(tmp_path))
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert "NVIDIA H200" in text and "offload" in text
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
    assert plan.predicted_step_ms <= 1.02 * plan.baseline_step_ms
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_demo() -> None:
    pytest.importorskip("transformers")
    text = run_example("demo.py")
    assert "gradients and weights identical: yes" in text
    assert "NVIDIA H200" in text and "Inductor + checkpointing" in text and "of its 36 layers" in text
    picture = re.search(r"picture of memory over the step: (\S+)", text)
    assert picture is not None and Path(picture[1]).stat().st_size > 10_000
    ignored = subprocess.run(["git", "check-ignore", "--quiet", picture[1]], cwd=ROOT)
    assert ignored.returncode == 0, f"{picture[1]} would be committed"


@pytest.mark.slow
def test_moe_checkpoints(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = run_example("moe_checkpoints.py", str(tmp_path))
    assert "weights equal: True" in text
    assert "logits close: True" in text
    assert "stacked: 23 tensors" in text and "layout stacked" in text


@pytest.mark.slow
def test_grpo_toy() -> None:
    pytest.importorskip("transformers")
    text = run_example("grpo_toy.py", "30")
    rows = {row.split()[0]: row.split() for row in text.splitlines() if row.split()}
    found = re.search(r"reward of the first 5 steps: (\S+), of the last 5: (\S+)", text)
    assert found is not None, text
    first, last = map(float, found.groups())
    assert last > first + 0.4, text
    # On the device at the end of each phase: the policy, the engine, the optimizer's state.
    empty = ["0", "B"]
    assert rows["rollout"][2:4] == empty and rows["rollout"][-2:] == empty
    assert rows["rollout"][4:6] != empty
    assert rows["logprob"][2:4] != empty and rows["logprob"][4:6] == empty and rows["logprob"][-2:] == empty
    assert rows["train"][2:4] != empty and rows["train"][4:6] == empty and rows["train"][-2:] != empty
