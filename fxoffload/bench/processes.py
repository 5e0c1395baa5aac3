"""Runs one measuring process and always comes back: with its answer, or with the reason there is none."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fxoffload.bench.records import Answer, Request, Status

ROOT = Path(__file__).resolve().parents[2]
MOST_REASON_CHARACTERS = 500
ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b")


@dataclass(frozen=True)
class Ended:
    """``answer``: None where ``status`` is not "ok"."""

    status: Status
    reason: str
    wall_s: float
    answer: Answer | None


def run(request: Request, limit_s: float) -> Ended:
    """Measure ``request`` in a fresh process with fresh compile caches; it is killed after ``limit_s`` seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fxoffload-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        asked, answer = folder / "asked", folder / "answer"
        asked.write_bytes(pickle.dumps(request))
        code, log = _run([str(asked), str(answer)], folder, limit_s)
        found = pickle.loads(answer.read_bytes()) if code == 0 else None
    wall_s = time.monotonic() - start
    if code is None:
        return Ended("timeout", f"not finished after {limit_s:.0f} s", wall_s, None)
    if code != 0:
        return Ended("failed", _reason(code, log), wall_s, None)
    return Ended("ok", "", wall_s, found)


def _run(words: list[str], folder: Path, limit_s: float) -> tuple[int | None, str]:
    """The exit status (None: it took too long) and the text that it wrote."""
    log = folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "fxoffload.bench", *words],
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # The whole session: Inductor's compile workers outlive a killed parent.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(errors="replace")


def _environment(folder: Path) -> dict[str, str]:
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    if ROOT.name not in ("site-packages", "dist-packages"):  # a checkout that is not installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return environment


def _reason(code: int, log: str) -> str:
    """The line of a traceback that names the error (torch writes advice below it), else the last that it wrote."""
    lines = [line for line in log.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if ERROR.match(line)), lines[-1] if lines else "no output")
    if code < 0:
        last = f"ended by {signal.Signals(-code).name}; {last}"
    return last[:MOST_REASON_CHARACTERS]
