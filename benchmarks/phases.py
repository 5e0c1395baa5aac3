"""Runs the phases of a measurement one after another and writes the result after each, so that no phase is lost."""

import gc
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.activations.available import NotAvailable
from benchmarks.schema import Host, Result, to_json, write_atomically


class Phases:
    """A phase that fails is named in the result with its reason. Required phases end the measurement, others do not."""

    def __init__(self, result: Result, answer: Path) -> None:
        self._result = result
        self._answer = answer
        self._stopped = False

    def required(self, name: str, work: Callable[[], None]) -> None:
        if not self._run(name, work):
            self._stopped = True

    def optional(self, name: str, work: Callable[[], None]) -> None:
        self._run(name, work)

    def _run(self, name: str, work: Callable[[], None]) -> bool:
        if self._stopped:
            return False
        print(f"[benchmark] {name}", flush=True)
        try:
            work()
        except Exception as error:  # any failure of a variant is a finding about that variant, not about the run
            traceback.print_exc()
            self._result.failures[name] = _reason(error)
            if isinstance(error, NotAvailable):
                self._result.not_available = str(error)
            gc.collect()
        else:
            self._result.finished.append(name)
        write_atomically(self._answer, to_json(self._result))
        return name in self._result.finished


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    first = lines[0]
    if first.endswith(":") and len(lines) > 1:  # Dynamo's "backend='inductor' raised:"
        first = f"{first} {lines[1]}"
    return f"{type(error).__name__}: {first[:400]}"


def host_before() -> Host:
    """Host memory now, to be completed by ``host_after``."""
    rss, available = psutil.Process().memory_info().rss, psutil.virtual_memory().available
    return Host(rss, rss, rss, available, available)


def host_after(host: Host) -> None:
    memory = psutil.Process().memory_info()
    host.rss_after_bytes = memory.rss
    host.max_rss_bytes = max(host.max_rss_bytes, _max_rss_bytes())
    host.machine_available_after_bytes = psutil.virtual_memory().available


def _max_rss_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
