"""Runs the process of a sweep and hands its records over one by one; goes on in another where one is lost."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.budgets import peaks_of
from benchmarks.launch import LOG_TAIL_CHARACTERS, end_session, read_result, signal_name, start_process
from benchmarks.schema import Record, Result, Status, SweepRequest, to_json

POLL_S = 0.1
LEAST_TIME_S = 20.0


def run_sweep(request: SweepRequest, caches: Path) -> Iterator[Record]:
    """One record for every variant of ``request``, in their order, each as soon as there is one."""
    end = time.monotonic() + request.time_left_s
    peaks = dict(request.peaks)
    left = list(request.variants)
    while left:
        time_left_s = end - time.monotonic()
        part = dataclasses.replace(request, variants=left, time_left_s=time_left_s, peaks=peaks)
        if time_left_s < LEAST_TIME_S:
            yield from _skipped(part, f"{max(time_left_s, 0):.0f} s left before --deadline-s")
            return
        num_records = 0
        for record in _SweepProcess(part, caches).records():
            num_records += 1
            peaks |= peaks_of(record.variant.label, record.result)
            yield record
        if not num_records:
            raise AssertionError("expected a record from every process")
        left = left[num_records:]


class _SweepProcess:
    """One process: ends with its last variant, with a variant that is lost, or at the deadline."""

    def __init__(self, request: SweepRequest, caches: Path) -> None:
        self.request = request
        self._caches = caches
        self._end = time.monotonic() + request.time_left_s
        self._log_from = 0

    def records(self) -> Iterator[Record]:
        with tempfile.TemporaryDirectory(prefix="fxoffload-sweep-") as name:
            folder = Path(name)
            asked = folder / "request.json"
            asked.write_text(to_json(self.request))
            process = start_process(["_sweep", str(asked), str(folder)], folder / "log.txt", self._caches)
            try:
                yield from self._follow(process, folder)
            finally:
                end_session(process)

    def _follow(self, process: subprocess.Popen[bytes], folder: Path) -> Iterator[Record]:
        for index in range(len(self.request.variants)):
            started = self._wait(process, folder / f"started{index}", self._end)
            if not started:
                yield from self._not_started(process, folder, index)
                return
            begin = time.monotonic()
            ended = folder / f"ended{index}"
            if not self._wait(process, ended, min(self._end, begin + self.request.protocol.timeout_s)):
                yield self._lost(process, folder, index, time.monotonic() - begin)
                return
            yield self._ended(folder, index, json.loads(ended.read_text()))

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], marker: Path, until: float) -> bool:
        """Whether ``marker`` came to be before the process or the time ended."""
        while time.monotonic() < until:
            alive = process.poll() is None  # asked first: a marker may be its last deed
            if marker.exists():
                return True
            if not alive:
                return False
            time.sleep(POLL_S)
        return False

    def _ended(self, folder: Path, index: int, wall_s: float) -> Record:
        result = read_result(folder / f"result{index}.json")
        reason = "; ".join(f"{phase}: {why}" for phase, why in result.failures.items())
        measured = result.step_ms is not None or any(probe.ran for probe in result.probes)
        status: Status = "ok" if not reason else "partial" if measured else "failed"
        if result.not_available:
            status, reason = "skipped", result.not_available
        return self._record(folder, index, status, reason, wall_s, result)

    def _lost(self, process: subprocess.Popen[bytes], folder: Path, index: int, wall_s: float) -> Record:
        """The process died in this variant, or it took too long: its results so far are kept."""
        result = read_result(folder / f"result{index}.json")
        code = process.poll()
        if code is None:
            finished = ", ".join(result.finished) or "none"
            status, reason = "timeout", f"not finished after {wall_s:.0f} s; finished phases: {finished}"
        else:
            status, reason = "failed", f"exit status {code} ({signal_name(code)}) in this variant"
        if result.step_ms is not None:
            status = "partial"
        return self._record(folder, index, status, reason, wall_s, result)

    def _not_started(self, process: subprocess.Popen[bytes], folder: Path, index: int) -> Iterator[Record]:
        """The deadline is near, or the process died between variants, or before the first."""
        code = process.poll()
        if index == 0 and code not in (None, 0):
            reason = f"the model could not be built: exit status {code} ({signal_name(code)})"
            for position in range(len(self.request.variants)):
                yield self._record(folder, position, "failed", reason, 0.0, Result())
        elif code in (None, 0):
            rest = dataclasses.replace(self.request, variants=self.request.variants[index:])
            yield from _skipped(rest, "too little time left before --deadline-s")

    def _record(self, folder: Path, index: int, status: Status, reason: str, wall_s: float, result: Result) -> Record:
        request, log = self.request, folder / "log.txt"
        with log.open("rb") as file:
            file.seek(self._log_from)
            text = file.read().decode(errors="replace")
            self._log_from = file.tell()
        tail = "" if status == "ok" else text[-LOG_TAIL_CHARACTERS:]
        variant = request.variants[index]
        return Record(request.scenario, request.case, variant, status, reason, wall_s, result, tail)


def _skipped(request: SweepRequest, why: str) -> Iterator[Record]:
    for variant in request.variants:
        yield Record(request.scenario, request.case, variant, "skipped", f"not started: {why}", 0.0, Result())
