"""One process that measures many variants of a case, one after the other: the model is built and filled once.

Between variants, compiled code is dropped and the allocator's cache is emptied; fxoffload's pinned host memory and the
compile caches stay. A variant that fails is a result like any other. Where the device itself is lost, the process ends,
and the parent starts another for the variants that are left.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils as dynamo_utils

from benchmarks.budgets import peaks_of
from benchmarks.length_search import LengthSearch
from benchmarks.limits import empty_cache
from benchmarks.machine import describe_process
from benchmarks.measure import warm_up_device
from benchmarks.measure_plan import PlanMeasurement, resolve
from benchmarks.offload import peer_settings
from benchmarks.phases import Phases
from benchmarks.schema import Request, Result, SweepRequest, Variant, from_json, to_json, write_atomically
from benchmarks.single import apply
from benchmarks.stock.measure import StockMeasurement
from benchmarks.stock.models import is_stock
from benchmarks.worker import DUMP_BEFORE_TIMEOUT_S
from benchmarks.workloads import build_job

# Nothing is started with less time than this, or than the last variant took.
LEAST_TIME_S = 10.0


def serve_sweep(asked: Path, folder: Path) -> None:
    """Measure everything that ``asked`` lists into ``folder``: started<i>, result<i>.json and ended<i>."""
    sweep = Sweep(from_json(SweepRequest, asked.read_text()), folder)
    sweep.run()


class Sweep:
    def __init__(self, request: SweepRequest, folder: Path) -> None:
        self.request = request
        self.folder = folder
        self._end = time.monotonic() + request.time_left_s
        self._peaks = dict(request.peaks)
        self.device = torch.device(request.case.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(self.device)
        torch.manual_seed(request.case.seed)
        print("[benchmark] build the model", flush=True)
        self.job = build_job(request.case, self.device)
        if request.scenario != "max-seq":
            self.job.allocate_gradients()
        warm_up_device(self.device)
        self._software = describe_process()

    def run(self) -> None:
        last_s = 0.0
        for index, variant in enumerate(self.request.variants):
            left_s = self._end - time.monotonic()
            if left_s < max(LEAST_TIME_S, last_s):
                print(f"[benchmark] {left_s:.0f} s left, the last variant took {last_s:.0f}: no more", flush=True)
                return
            start = time.monotonic()
            (self.folder / f"started{index}").touch()
            self._measure(index, variant)
            last_s = time.monotonic() - start
            write_atomically(self.folder / f"ended{index}", json.dumps(last_s))
            self._check_device()

    def _measure(self, index: int, variant: Variant) -> None:
        print(f"[benchmark] variant {variant.label}", flush=True)
        left_s = min(self.request.protocol.timeout_s, self._end - time.monotonic())
        faulthandler.dump_traceback_later(max(1.0, left_s - DUMP_BEFORE_TIMEOUT_S), file=sys.stderr)
        result = Result(software=dict(self._software))
        path = self.folder / f"result{index}.json"
        phases = Phases(result, path)
        store = str(self.folder / f"store{index}")  # where a peer's one rank meets itself
        request = Request(self.request.scenario, self.request.case, variant, self.request.protocol, rendezvous=store)
        before = self._allocated_bytes()
        with peer_settings(variant):
            if request.scenario == "max-seq":
                LengthSearch(request, result, self.device, self.job).run(phases)
            else:
                self._measure_steps(request, result, phases)
        forget_compiled(self.device)
        faulthandler.cancel_dump_traceback_later()
        result.leaked_bytes = self._allocated_bytes() - before
        write_atomically(path, to_json(result))
        self._peaks |= peaks_of(variant.label, result)

    def _measure_steps(self, request: Request, result: Result, phases: Phases) -> None:
        resolved: dict[str, Any] = {}
        phases.required("options", lambda: resolved.update(resolve(request, result, self._peaks, self.device)))
        variant = dataclasses.replace(request.variant, options=resolved)
        kind = StockMeasurement if is_stock(request.case) else PlanMeasurement
        request = dataclasses.replace(request, variant=variant)  # its budget in bytes
        measurement = kind(request, result, self.device, lambda: apply(request, variant, self.job, self.device))
        try:
            measurement.run(phases)
        finally:
            measurement.close()

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _check_device(self) -> None:
        """A device that is lost (an illegal access) fails every variant to come: leave them to another process."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                torch.ones(1, device=self.device).item()
        except Exception:
            traceback.print_exc()
            print("[benchmark] the device is lost", flush=True)
            sys.stdout.flush()
            sys.stderr.flush()
            raise SystemExit(3) from None


def forget_compiled(device: torch.device) -> None:
    """As in a fresh process, but for the compile caches."""
    torch._dynamo.reset()
    dynamo_utils.counters.clear()
    dynamo_utils.compilation_time_metrics.clear()
    empty_cache(device)
