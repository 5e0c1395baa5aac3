"""Takes the runs of the suite in turn, several at once where the machine has several GPUs, within a time.

Runs that want the machine to themselves go first, one at a time, then those of several GPUs, while all are free. The
rest share the machine: its cores and its host memory. A run does not repeat earlier measurements in the same folder.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.machine import ROOT
from benchmarks.schema import Report, from_json
from benchmarks.suite import SUITE, Run

# A run that its own deadline ends gets so much longer to stop its processes and to write.
GRACE_S = 30.0
# Less than that, and a run is not worth a start.
LEAST_S = 45.0


class Started(Protocol):
    """A run that goes on."""

    def is_over(self) -> bool: ...

    def stop(self) -> None: ...


@dataclass
class Outcome:
    """How a run went. ``said``: rows that are ok of those asked for, or why there are none."""

    run: Run
    said: str
    seconds: float = 0.0


class Process:
    """``python -m benchmarks run`` of one run, its output in ``NAME.log``."""

    def __init__(self, run: Run, gpus: Sequence[str], limit_s: float, out: Path, settings: Sequence[str]) -> None:
        log = out / f"{run.name}.log"
        log.unlink(missing_ok=True)
        self._log = log.open("xb")  # a link at that name is removed, not followed
        environment = dict(os.environ)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        environment.setdefault("PYTORCH_ALLOC_CONF", run.allocator)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks", *words_of(run, limit_s, out, settings)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._end = time.monotonic() + limit_s + GRACE_S

    def is_over(self) -> bool:
        if self._process.poll() is None and time.monotonic() > self._end:
            self.stop()
        return self._process.poll() is not None

    def stop(self) -> None:
        """It ends its own processes when it is told to end."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def words_of(run: Run, limit_s: float, out: Path, settings: Sequence[str] = ()) -> list[str]:
    """What follows ``python -m benchmarks``. ``settings`` come last, so that they win."""
    words = ["run", run.scenario]
    if both := [*shlex.split(run.settings), *settings]:
        words += ["--set", *both]
    if run.variants:
        words += ["--variants", run.variants]
    earlier = report_of(run, out)
    if earlier.exists():
        words += ["--resume", str(earlier)]
    return [*words, "--deadline-s", f"{limit_s:.0f}", "--out", str(out / run.name)]


def report_of(run: Run, out: Path) -> Path:
    """Where a run writes its JSON."""
    return out / run.name / f"{run.scenario}.json"


def choose(names: str | None) -> list[Run]:
    """The runs of these names, separated by commas; all for None. "ablation" stands for "ablation-stock" and all others
    that begin so, where no run has the name itself.

    Raises:
        ValueError: there is none of that name.
    """
    if names is None:
        return list(SUITE)
    found: list[Run] = []
    for name in names.split(","):
        named = [r for r in SUITE if r.name == name] or [r for r in SUITE if r.name.startswith(f"{name}-")]
        if not named:
            raise ValueError(f"unknown run {name!r}; known: {', '.join(run.name for run in SUITE)}")
        found += named
    return found


def take_turns(
    runs: Iterable[Run],
    gpus: Sequence[str],
    deadline_s: float,
    start: Callable[[Run, Sequence[str], float], Started],
    said_by: Callable[[Run], str],
    tell: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Outcome]:
    """Everything that fits, in the order of ``runs`` but for those that run alone or on several GPUs, which go first.
    Outcomes are in the order of ``runs``.

    Args:
        gpus: names of the GPUs, one for each run of one GPU at a time. None: one run at a time, on the CPU.
        start: starts a run on some GPUs, for at most this many seconds.
        said_by: the outcome of a run that is over.
    """
    end = clock() + deadline_s
    most = max(len(gpus), 1)
    asked = list(runs)
    waiting = sorted(asked, key=lambda run: (not run.alone, -run.gpus))
    outcomes = [Outcome(run, f"needs {run.gpus} GPUs, found {len(gpus)}") for run in waiting if run.gpus > most]
    waiting = [run for run in waiting if run.gpus <= most]
    free = list(gpus) or [""]
    going: list[tuple[Run, list[str], Started, float]] = []
    try:
        while waiting or going:
            for run, taken, started, began in list(going):
                if started.is_over():
                    started.stop()
                    going.remove((run, taken, started, began))
                    free += taken
                    outcomes.append(Outcome(run, said_by(run), clock() - began))
                    tell(f"{run.name}: {outcomes[-1].said} after {outcomes[-1].seconds:.0f} s")
            left_s = end - clock() - GRACE_S
            if left_s < LEAST_S:
                outcomes += [Outcome(run, f"not started: {max(left_s, 0):.0f} s left") for run in waiting]
                waiting = []
            # The first that waits for several GPUs keeps later ones from taking them one by one.
            while waiting and waiting[0].gpus <= len(free) and not any(run.alone for run, *_ in going):
                if waiting[0].alone and going:
                    break
                run = waiting.pop(0)
                taken, free = free[: run.gpus], free[run.gpus :]
                limit_s = min(run.seconds, left_s)
                tell(f"{run.name}: begins{f' on {chr(44).join(taken)}' if gpus else ''}, {limit_s:.0f} s at most")
                going.append((run, taken, start(run, [name for name in taken if name], limit_s), clock()))
            if going:
                sleep(0.5)
    finally:
        for _, _, started, _ in going:
            started.stop()
    return sorted(outcomes, key=lambda outcome: asked.index(outcome.run))


def said_by_report(run: Run, out: Path) -> str:
    """How many rows are ok."""
    try:
        records = from_json(Report, report_of(run, out).read_text()).records
    except FileNotFoundError:
        return f"no report: see {out / run.name}.log"
    ok = sum(record.status == "ok" for record in records)
    return f"{ok} of {len(records)} rows ok"


def find_gpus() -> list[str]:
    """Those that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []
