"""What is offloaded cannot be used by mistake: tried in another process, which some would end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def used(optimizer: str) -> dict[str, list[Any]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = ROOT / "tests" / "phases" / "uses.py"
    ended = subprocess.run(
        [sys.executable, str(script), optimizer], env=environment, capture_output=True, text=True, timeout=120
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert ended.returncode == 0, f"ended after {lines[-1:]}:\n{ended.stderr[-3000:]}"
    return {line[0]: line[1:] for line in lines}


@pytest.mark.parametrize("optimizer", ["adamw_foreach", "adamw_loop", "adamw_fused", "sgd_momentum"])
def test_uses_of_what_is_away_raise_and_break_nothing(optimizer: str) -> None:
    found = used(optimizer)
    same, trained_as_ever = found.pop("afterwards")
    in_workers, numbers = found.pop("in workers")
    raised, added, gradient, version = found.pop("backward")
    assert raised == "RuntimeError"
    assert not added, "the backward that raised has added nothing"
    assert gradient == 64.0
    assert version == 0
    assert len(found) == 31
    for use, (kind, message) in found.items():
        assert kind == "OffloadedError", (use, kind, message)
        assert "onload(" in message, (use, message)
        assert "phase" in message, (use, message)
        assert "on the device" not in message.split(":")[0], (use, message)
    assert same
    assert trained_as_ever
    assert in_workers == [["OffloadedError"] * 3]
    assert numbers == [0, 1, 2]
