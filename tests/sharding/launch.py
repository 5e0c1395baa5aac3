"""Starts a world of CPU processes (gloo), each of which runs the same cases, and reads their findings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 900.0  # of one launch with all slow cases: 100 to 250 on two cores
COLLECTIVE_LIMIT_S = 120.0  # the ranks compile at different speeds
GRACE_S = 10.0  # for a rank to say why it failed, after another one did

Found = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What one rank is asked to do. ``cases``: "module.function" of this folder."""

    folder: str
    rank: int
    world: int
    cases: tuple[str, ...]

    @staticmethod
    def read(path: Path) -> Request:
        """The request in a file."""
        return Request(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Ended:
    """What one rank left: findings by case, its exit status (None: it was ended from here) and its output."""

    cases: dict[str, Found]
    code: int | None
    log: str

    def found(self, case: str) -> Found:
        """Of one case."""
        found = self.cases.get(case)
        assert found is not None, f"did not finish {case!r} (exit status {self.code}):\n{self.log[-6000:]}"
        assert "raised" not in found, f"{case} raised:\n{found['raised']}"
        return found


def launch(folder: Path, world: int, cases: Sequence[str]) -> list[Ended]:
    """Run all ranks, for at most ``TIME_LIMIT_S``."""
    processes = []
    try:
        for rank in range(world):
            processes.append(_start(Request(str(folder), rank, world, tuple(cases))))
        _wait(processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        codes = [p.wait() for p in processes]
    return [_ended(folder, rank, code) for rank, code in enumerate(codes)]


def _ended(folder: Path, rank: int, code: int | None) -> Ended:
    found = folder / f"found{rank}.json"
    cases = json.loads(found.read_text()) if found.exists() else {}
    return Ended(cases, code, (folder / f"log{rank}.txt").read_text(errors="replace"))


def _start(request: Request) -> subprocess.Popen[bytes]:
    folder = Path(request.folder)
    asked = folder / f"request{request.rank}.json"
    asked.write_text(json.dumps(asdict(request)))
    environment = dict(os.environ)
    # Another package may install a `tests` of its own, which would hide this one.
    path = [str(ROOT / "tests"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment.update(PYTHONPATH=os.pathsep.join(filter(None, path)), OMP_NUM_THREADS="1")
    environment["LOCAL_WORLD_SIZE"] = str(request.world)  # as torchrun sets it
    with (folder / f"log{request.rank}.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "sharding.world", str(asked)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended or the time is up. Where one failed, the others hang in a collective."""
    deadline = time.monotonic() + TIME_LIMIT_S
    failed = False
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if not failed and any(p.poll() not in (None, 0) for p in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.1)
