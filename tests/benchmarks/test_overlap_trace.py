"""Where the time of work went, from the profiler's events."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import record_function

from benchmarks.rl.measure_exposed import BesideLogprobs
from benchmarks.rl.ours import Fxoffload
from benchmarks.rl.overlap_trace import WORK, summarize_work, trace_work
from benchmarks.schema import Record, Report, Variant
from benchmarks.tables import render
from fxoffload.phases.moving import mover
from fxoffload.runtime.copies import giving_way
from tests.benchmarks.test_phases import SHORT, TINY, measure


def event(name: str, start: float, end: float, *, device: bool = False, thread: int = 1) -> Any:
    kind = DeviceType.CUDA if device else DeviceType.CPU
    return SimpleNamespace(
        name=name, device_type=kind, thread=thread, time_range=SimpleNamespace(start=1e3 * start, end=1e3 * end)
    )


def test_host_and_device_are_told_apart() -> None:
    found = summarize_work(
        [
            event(WORK, 10, 30),
            event("fxoffload::offload(optimizer)", 11, 15),
            event("fxoffload::copies to the host", 16, 40, thread=2),
            event("fxoffload::offload(optimizer)", 11, 15, device=True),
            event("cudaMalloc", 20, 23),
            event("cudaMalloc", 25, 26, thread=2),
            event("cudaEventRecord", 25, 25.5),
            event("cuMemMap", 26, 28, thread=2),
            event("cudaDeviceSynchronize", 30, 50),
            event("gemm", 17, 20, device=True),
            event("gemm", 19, 22, device=True),
            event("ncclDevKernel_AllGather_RING_LL(x)", 21, 25, device=True),
            event("Memcpy DtoH (Device -> Pinned)", 12, 42, device=True),
            event("Memcpy DtoD (Device -> Device)", 12, 13, device=True),
            event("Memset (Device)", 50, 51, device=True),
        ]
    )
    assert (found.host_ms, found.until_first_kernel_ms, found.until_last_kernel_ms) == (20, 7, 12)
    assert (found.kernels_ms, found.collectives_ms, found.device_busy_ms) == (5, 4, 8)
    assert found.copies_ms == {"down": 30, "within": 1}
    assert found.ours_on_host_ms == 4
    assert found.ours_ms == {"fxoffload::copies to the host": 24, "fxoffload::offload(optimizer)": 4}
    assert found.cuda_calls_ms == {"cudaMalloc": 4, "cuMemMap": 2}


def test_work_is_run_once_and_measured() -> None:
    ran = []

    def work() -> None:
        ran.append(1)
        with record_function("fxoffload::something"):
            time.sleep(0.02)

    found = trace_work(work, torch.device("cpu"))
    assert ran == [1]
    assert found.host_ms >= found.ours_on_host_ms >= 20
    assert found.until_first_kernel_ms is None


@pytest.mark.slow
def test_a_run_of_phases_traces_where_asked(tmp_path: Path) -> None:
    asked = dataclasses.replace(SHORT, trace_overlap=True)
    rl, result = measure(tmp_path, "phases", "fxoffload", protocol=asked)
    assert rl.switching is not None
    assert list(rl.switching.traces) == ["alone", "around", "first forward"]
    assert rl.switching.traces["around"].ours_on_host_ms > 0 == rl.switching.traces["alone"].ours_on_host_ms
    assert any("offload(optimizer)" in name for name in rl.switching.traces["around"].ours_ms)
    record = Record("phases", TINY, Variant("fxoffload", "fxoffload"), "ok", "", 1.0, result)
    assert "| first forward" in render(Report("phases", {}, asked, None, [record]))
    rl, _ = measure(tmp_path, "phases", "fxoffload", case=TINY)
    assert rl.switching is not None and rl.switching.traces == {}
    assert rl.switching.exposed is not None and rl.switching.exposed.without == {}


@pytest.mark.slow
def test_a_run_of_phases_leaves_things_out_where_asked(tmp_path: Path) -> None:
    asked = dataclasses.replace(SHORT, ablate_overlap=True)
    rl, result = measure(tmp_path, "phases", "fxoffload", protocol=asked)
    exposed = rl.switching.exposed if rl.switching is not None else None
    assert exposed is not None and list(exposed.without) == ["giving_way", "pace", "both"]
    assert all(len(found.values) == len(exposed.around.values) for found in exposed.without.values())
    assert exposed.begin_offload_s is not None and 0 < exposed.begin_offload_s < exposed.around.median
    assert exposed.begin_onload_s is not None and 0 < exposed.begin_onload_s < exposed.around.median
    record = Record("phases", TINY, Variant("fxoffload", "fxoffload"), "ok", "", 1.0, result)
    assert "| giving_way" in render(Report("phases", {}, asked, None, [record]))


def in_effect() -> tuple[float, float]:
    return giving_way.BURST_BYTES, mover.PACE_S_PER_BYTE


def test_each_round_runs_as_it_is_and_without() -> None:
    seen = []

    class Watched(Fxoffload):
        def begin_offload(self, *groups: str) -> None:
            seen.append(in_effect())
            time.sleep(0.02 * (in_effect() != before))  # what the calls take is told of those as they are

        def begin_onload(self, *groups: str) -> None:
            time.sleep(0.02 * (in_effect() != before))

        def offload(self, *groups: str) -> None: ...
        def onload(self, *groups: str) -> None: ...
        def finish(self) -> None: ...

    job: Any = SimpleNamespace(logprobs=lambda _: None, train_step=lambda: None, forwards_for=lambda _: 1)

    def timed(work: Any) -> float:
        work()
        return 1.0

    before = in_effect()
    asked = dataclasses.replace(SHORT, ablate_overlap=True, trace_overlap=True)
    found = BesideLogprobs(job, Watched({}), asked).measure(timed, 2, lambda _, work: work())
    as_it_is, without = before, [(sys.maxsize, before[1]), (before[0], 0.0), (sys.maxsize, 0.0)]
    assert seen == [as_it_is, *[as_it_is, *without] * 2]  # the first for the trace
    assert found.begin_offload_s is not None and found.begin_offload_s < 0.01
    assert found.begin_onload_s is not None and found.begin_onload_s < 0.01


def test_what_is_left_out_comes_back() -> None:
    before = in_effect()
    seen = {}
    for name, ablation in Fxoffload({}).ablations().items():
        with contextlib.suppress(KeyError), ablation():
            seen[name] = in_effect()
            raise KeyError
        assert in_effect() == before
    assert seen == {"giving_way": (sys.maxsize, before[1]), "pace": (before[0], 0.0), "both": (sys.maxsize, 0.0)}
