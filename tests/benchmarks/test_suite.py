"""The suite: which runs go together, their arguments, and one of them for real."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from benchmarks import run_suite
from benchmarks.arguments import expand_set, parse_beside, parse_cases, parse_protocol, parse_variants, split_settings
from benchmarks.cli import app
from benchmarks.machine import ROOT
from benchmarks.rl.variants import SCENARIOS as PHASE_SCENARIOS
from benchmarks.rl.variants import parse_variants as parse_phase_variants
from benchmarks.run_suite import GRACE_S, Outcome, Process, choose, report_of, take_turns, words_of
from benchmarks.scenarios import find_scenario
from benchmarks.suite import LARGE_PAGES, SUITE, Run


class Machine:
    """Time that passes only by sleeping, and runs that take their stated time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started: list[tuple[float, str, tuple[str, ...], float]] = []
        self.stopped: list[str] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def start(self, run: Run, gpus: Sequence[str], limit_s: float) -> Going:
        self.started.append((self.now, run.name, tuple(gpus), limit_s))
        return Going(self, run, self.now + run.seconds)

    def take_turns(self, runs: list[Run], gpus: Sequence[str], deadline_s: float = 1e4) -> list[Outcome]:
        return take_turns(runs, gpus, deadline_s, self.start, lambda run: "done", clock=self.clock, sleep=self.sleep)


class Going:
    def __init__(self, machine: Machine, run: Run, end: float) -> None:
        self.machine, self.run, self.end = machine, run, end

    def is_over(self) -> bool:
        return self.machine.now >= self.end

    def stop(self) -> None:
        self.machine.stopped.append(self.run.name)


LONG, SHORT, BOTH = Run("long", "plan", seconds=300), Run("short", "plan", seconds=100), Run("both", "fsdp", gpus=2)


def test_every_gpu_is_used_and_none_twice() -> None:
    machine = Machine()
    outcomes = machine.take_turns([LONG, BOTH, SHORT, SHORT], ["0", "1"])
    assert [(at, name, gpus) for at, name, gpus, _ in machine.started] == [
        (0.0, "both", ("0", "1")),
        (300.0, "long", ("0",)),
        (300.0, "short", ("1",)),
        (400.0, "short", ("1",)),
    ]
    assert [outcome.run.name for outcome in outcomes] == ["long", "both", "short", "short"]
    assert sorted(machine.stopped) == ["both", "long", "short", "short"], "logs are closed"


def test_what_measures_the_link_runs_alone() -> None:
    machine, link = Machine(), Run("link", "phases", seconds=50, alone=True)
    machine.take_turns([SHORT, link, SHORT, link], ["0", "1"])
    assert [(at, name) for at, name, _, _ in machine.started] == [
        (0.0, "link"),
        (50.0, "link"),
        (100.0, "short"),
        (100.0, "short"),
    ]


def test_one_run_at_a_time_without_a_gpu() -> None:
    machine = Machine()
    outcomes = machine.take_turns([LONG, BOTH, SHORT], [])
    assert [(at, name, gpus) for at, name, gpus, _ in machine.started] == [(0.0, "long", ()), (300.0, "short", ())]
    assert outcomes[1].said == "needs 2 GPUs, found 0"


def test_what_does_not_fit_into_the_time_says_so() -> None:
    machine = Machine()
    outcomes = machine.take_turns([LONG, SHORT, SHORT], ["0"], deadline_s=380.0 + GRACE_S)
    assert [(name, limit_s) for _, name, _, limit_s in machine.started] == [("long", 300.0), ("short", 80.0)]
    assert sorted(outcome.said for outcome in outcomes) == ["done", "done", "not started: 44 s left"]


def test_everything_is_stopped_where_one_fails_to_start() -> None:
    machine = Machine()
    start = machine.start

    def fail(run: Run, gpus: Sequence[str], limit_s: float) -> Going:
        if run is SHORT:
            raise OSError("no process")
        return start(run, gpus, limit_s)

    machine.start = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no process"):
        machine.take_turns([LONG, SHORT], ["0", "1"])
    assert machine.stopped == ["long"]


@pytest.mark.parametrize("run", SUITE, ids=lambda run: run.name)
def test_what_a_run_is_called_with_is_understood(run: Run, tmp_path: Path) -> None:
    words = expand_set(words_of(run, 60.0, tmp_path, ["verl=/x"]))
    values = split_settings([words[i + 1] for i, word in enumerate(words) if word == "--set"])
    scenario = find_scenario(run.scenario)
    assert parse_cases(values, scenario.case_defaults)
    protocol = parse_protocol(values, scenario.protocol_defaults)
    sharded = run.scenario in ("fsdp", "fsdp-lengths", "stock-fsdp", "phases", "collectives")
    has_one_each = sharded and not protocol.process_group
    assert run.gpus == (protocol.ranks if has_one_each else 1)
    of_phases = run.scenario in PHASE_SCENARIOS
    variants = run.variants or scenario.variants
    if run.scenario == "collectives":
        assert parse_beside(variants)
    else:
        assert parse_phase_variants(run.scenario, variants) if of_phases else parse_variants(variants, values)


@pytest.mark.parametrize("theirs", [None, "backend:native"])
def test_a_run_has_its_allocator_unless_the_caller_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str | None
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    if theirs is not None:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", theirs)
    told: list[str] = []

    def popen(*_: object, env: dict[str, str], **__: object) -> Any:
        told.append(env["PYTORCH_ALLOC_CONF"])
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr(run_suite.subprocess, "Popen", popen)
    for run in (LONG, Run("pages", "phases", allocator=LARGE_PAGES)):
        Process(run, ["0"], 60.0, tmp_path, []).stop()
    assert told == ([theirs] * 2 if theirs else ["expandable_segments:True", LARGE_PAGES])


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    assert "--resume" not in words_of(LONG, 60.0, tmp_path)
    earlier = report_of(LONG, tmp_path)
    earlier.parent.mkdir()
    earlier.touch()
    words = words_of(LONG, 60.0, tmp_path)
    assert words[words.index("--resume") + 1] == str(earlier)


def test_unknown_names() -> None:
    assert [run.name for run in choose("fsdp,phases")] == ["fsdp", "phases"]
    assert [run.name for run in choose("ablation")] == ["ablation-stock", "ablation-layers"]
    with pytest.raises(ValueError, match="unknown run 'nothing'; known: activations, "):
        choose("fsdp,nothing")


@pytest.mark.slow
def test_a_suite_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = "layers=2 seq=32 hidden=32 ffn=64 heads=4 kv_heads=2 head_dim=8 dtype=float32 device=cpu"
    runs = (Run("small", "activations", f"{small} steps=5 warmup=0", "eager"), Run("large", "fsdp", gpus=4))
    monkeypatch.setattr(run_suite, "SUITE", runs)
    arguments = expand_set(["suite", "--only", "small,large", "--set", "link_mib=1", "--out", str(tmp_path)])
    for _ in range(2):  # the second finds all there
        done = CliRunner().invoke(app, arguments, env={"CUDA_VISIBLE_DEVICES": ""})
        assert done.exit_code == 0, done.output
        assert "1 of 1 rows ok" in done.output
        assert "needs 4 GPUs, found 0" in done.output
    assert "eager" in (tmp_path / "small.log").read_text()


def test_a_run_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    small = "layers=2 seq=32 hidden=32 ffn=64 heads=4 kv_heads=2 head_dim=8 dtype=float32 device=cpu"
    small += " link_mib=64 link_copies=100000"  # minutes, so that no worker ends by itself
    going = Process(Run("small", "activations", small, "eager"), [], 60.0, tmp_path, [])
    workers: list[psutil.Process] = []
    try:
        end = time.monotonic() + 30.0
        while not workers and time.monotonic() < end:
            time.sleep(0.05)
            workers = workers_of(going._process.pid)
        assert workers and not going.is_over()
    finally:
        going.stop()
    gone, alive = psutil.wait_procs(workers, timeout=30.0)
    for process in alive:
        process.kill()
    assert gone and not alive


def workers_of(pid: int) -> list[psutil.Process]:
    """The measuring processes of a run, which are in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children() if "_worker" in child.cmdline()]
    return []


def test_the_command_line_imports_no_torch() -> None:
    """So that a mistake is told at once, and so that no peer's process has fxoffload in it."""
    code = (
        "import sys, benchmarks.cli, benchmarks.runner; sys.exit('torch' in sys.modules or 'fxoffload' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
