"""verl's functions on FSDP2, two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_fsdp2_workers_compute_the_same(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("verl_world.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "2", str(tmp_path / "store")],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        logs = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, log in zip(ranks, logs, strict=True):
        assert rank.returncode == 0 and "finished" in log, log
