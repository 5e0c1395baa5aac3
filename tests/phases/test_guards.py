"""Offloaded tensors cannot be used by mistake: tried in another process, which some would end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


OPTIMIZERS = ("adamw_foreach", "adamw_loop", "adamw_fused", "sgd_momentum")

Uses = dict[str, list[Any]]


@pytest.fixture(scope="module")
def used(request: pytest.FixtureRequest) -> Callable[[str], Uses]:
    """What each use did, by optimizer. One process tries all that tests ask for, which takes seconds to start; where it
    is ended, those that it did not come to the end of fail."""
    asked = {item.callspec.params["optimizer"] for item in request.session.items if item.path == request.path}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = ROOT / "tests" / "phases" / "uses.py"
    ended = subprocess.run(
        [sys.executable, str(script), *(o for o in OPTIMIZERS if o in asked)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]

    def of(optimizer: str) -> Uses:
        found = {line[1]: line[2:] for line in lines if line[0] == optimizer}
        finished = ended.returncode == 0 or (lines and lines[-1][0] != optimizer)
        assert finished and found, f"ended after {lines[-1:]}:\n{ended.stderr[-3000:]}"
        return found

    return of


@pytest.mark.slow_except("adamw_foreach")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_uses_of_what_is_away_raise_and_break_nothing(used: Callable[[str], Uses], optimizer: str) -> None:
    found = used(optimizer)
    same, trained_as_ever = found.pop("afterwards")
    in_workers, numbers = found.pop("in workers")
    raised, added, gradient, version = found.pop("backward")
    assert raised == "RuntimeError"
    assert not added, "the backward that raised has added nothing"
    assert gradient == 64.0
    assert version == 0
    assert len(found) == 30
    for use, (kind, message) in found.items():
        assert kind == "OffloadedError", (use, kind, message)
        assert "onload(" in message, (use, message)
        assert "phase" in message, (use, message)
        assert "on the device" not in message.split(":")[0], (use, message)
    assert same
    assert trained_as_ever
    assert in_workers == [["OffloadedError"] * 3]
    assert numbers == [0, 1, 2]
