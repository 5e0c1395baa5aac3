"""Runs measuring processes and always comes back: with their results, or with the reason there are none."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.schema import Record, Request, Result, Status, WarmStart, from_json, to_json

# Room for the stacks of some ten threads; the main thread's comes last.
LOG_TAIL_CHARACTERS = 12_000
GRACE_S = 20.0
# What ``faulthandler.dump_traceback_later`` writes first, in the workers.
DUMP_BEGINS = "Timeout ("
PHASE_BEGINS = "[benchmark]"


@dataclass(frozen=True)
class Exit:
    codes: list[int | None]
    timed_out: bool


def run_variant(request: Request, time_left_s: float) -> Record:
    """Measure one variant in fresh processes, one per rank, with fresh compile caches each.

    Where the protocol says ``warm``, a variant that ended ok is started once more with the caches that it filled.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fxoffload-benchmark-") as name:
        folder = Path(name)
        record = _run_once(request, time_left_s, folder, "cold")
        if request.protocol.warm and record.status == "ok":
            left_s = time_left_s - (time.monotonic() - start)
            record.result.warm = _as_warm(_run_once(request, left_s, folder, "warm"))
            if record.result.warm.status != "ok":
                record.status, record.reason = "partial", f"warm start: {record.result.warm.reason}"
    record.wall_s = time.monotonic() - start
    return record


def _run_once(request: Request, time_left_s: float, folder: Path, name: str) -> Record:
    """One start of all ranks. Requests, answers and logs lie in ``folder``/``name``, compile caches in ``folder``."""
    start = time.monotonic()
    timeout_s = min(request.protocol.timeout_s, time_left_s)
    request = replace(request, protocol=replace(request.protocol, timeout_s=timeout_s))
    (folder / name).mkdir()
    request = replace(request, rendezvous=str(folder / name / "store"))
    processes = [_start(replace(request, rank=rank), folder, name) for rank in _ranks(request)]
    ended = _wait(processes, timeout_s)
    results = [read_result(folder / name / f"result{r}.json") for r in _ranks(request)]
    logs = [_log(folder / name / f"log{r}.txt") for r in _ranks(request)]
    status, reason = judge(ended, results, logs, timeout_s)
    tails = "\n".join(log[-LOG_TAIL_CHARACTERS:] for log in logs)[-2 * LOG_TAIL_CHARACTERS :]
    log_tail = "" if status == "ok" else tails
    wall_s = time.monotonic() - start
    return Record(request.scenario, request.case, request.variant, status, reason, wall_s, results[0], log_tail)


def _as_warm(record: Record) -> WarmStart:
    result = record.result
    return WarmStart(
        status=record.status,
        reason=record.reason,
        wall_s=record.wall_s,
        first_step_ms=result.first_step_ms,
        second_step_ms=result.second_step_ms,
        compile_s=result.compile_s,
        compile_times_s=result.compile_times_s,
        compile_shares=result.compile_shares,
        dynamo_counters=result.dynamo_counters,
    )


def _ranks(request: Request) -> range:
    return range(request.protocol.num_processes)


def _start(request: Request, folder: Path, name: str) -> subprocess.Popen[bytes]:
    rank = request.rank
    asked, answer = folder / name / f"request{rank}.json", folder / name / f"result{rank}.json"
    asked.write_text(to_json(request))
    words = ["_worker", str(asked), str(answer)]
    # Ranks that are only pretended share the host's memory as well: plans are made as for them.
    return start_process(words, folder / name / f"log{rank}.txt", folder / f"caches{rank}", request.protocol.ranks)


def start_process(words: list[str], log_path: Path, caches: Path, ranks: int = 1) -> subprocess.Popen[bytes]:
    """``python -m benchmarks`` with ``words``, in a session of its own; one of ``ranks``."""
    environment = dict(os.environ)
    environment["LOCAL_WORLD_SIZE"] = str(ranks)  # as torchrun sets it: they share the host's memory
    # The parent's variables pass through, NCCL's too; only the caches and the import path are ours.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    environment["TRITON_CACHE_DIR"] = str(caches / "triton")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    environment["HF_HUB_OFFLINE"] = "1"
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks", *words],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> Exit:
    """Until all ended or the time is up. Where one rank failed the others hang in a collective: a short grace."""
    deadline = time.monotonic() + timeout_s
    timed_out = False
    try:
        while any(p.poll() is None for p in processes):
            if any(p.poll() not in (None, 0) for p in processes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                timed_out = not any(p.poll() not in (None, 0) for p in processes)
                break
            time.sleep(0.1)
    finally:
        codes = [p.poll() for p in processes]
        for process in processes:
            end_session(process)
    return Exit(codes, timed_out)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End what this process started too: Inductor's compile workers outlive a killed parent."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_result(path: Path) -> Result:
    """What the process finished before it ended; an empty result when it wrote nothing."""
    try:
        return from_json(Result, path.read_text())
    except FileNotFoundError:
        return Result()


def _log(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def judge(ended: Exit, results: list[Result], logs: list[str], timeout_s: float) -> tuple[Status, str]:
    """Partial: the steps were measured, something after them was not."""
    if results[0].not_available:
        return "skipped", results[0].not_available
    measured = results[0].was_measured
    failures = [f"{_of_rank(r)}{p}: {why}" for r, result in enumerate(results) for p, why in result.failures.items()]
    if failures:
        return "partial" if measured else "failed", "; ".join(failures)
    if ended.timed_out or any(map(_ended_in_dump, ended.codes, logs)):
        finished = ", ".join(results[0].finished) or "none"
        return "timeout", f"not finished after {timeout_s:.0f} s; finished phases: {finished}"
    # One that failed says why; those without a code waited for it.
    for code, log in sorted(zip(ended.codes, logs, strict=True), key=lambda one: one[0] is None):
        if code != 0:
            last = log.strip().splitlines()[-1:] or ["no output"]
            return "partial" if measured else "failed", f"exit status {code} ({signal_name(code)}): {last[0][:300]}"
    return "ok", ""


def _ended_in_dump(code: int | None, log: str) -> bool:
    """Whether a process crashed while it wrote where it was, as it does shortly before its time is up: to read the
    stacks of threads that run can end it. Where it said afterwards that a phase began, it had lived on."""
    if code not in (-signal.SIGSEGV, -signal.SIGBUS):
        return False
    lines = log.splitlines()
    begun = [i for i, line in enumerate(lines) if line.startswith(DUMP_BEGINS)]
    return bool(begun) and not any(line.startswith(PHASE_BEGINS) for line in lines[begun[-1] :])


def _of_rank(rank: int) -> str:
    return f"rank {rank} " if rank else ""


def signal_name(code: int | None) -> str:
    if code is None or code >= 0:
        return "no signal"
    hint = ", as the kernel does when host memory runs out" if code == -signal.SIGKILL else ""
    return signal.Signals(-code).name + hint
