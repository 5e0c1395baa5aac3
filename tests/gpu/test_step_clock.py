"""The clock of a graph on a device: against events of our own, without waiting for the device, and bytes by algebra."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxoffload.runtime.profiler.allocator_trace import cuda_memory
from fxoffload.runtime.profiler.call_recorder import Recorder
from fxoffload.runtime.profiler.step_clock import StepClock
from fxoffload.runtime.profiler.stream_events import PooledEvents, cuda_events
from fxoffload.step.readings import PHASES, Phase
from fxoffload.step.segment_names import TURN
from tests.gpu.gpu_support import MIB, sleep

pytestmark = pytest.mark.gpu

SIZE = 4096
# Matmuls of each segment; about 0.2 ms each on an H200.
COUNTS = {"a": 10, "b": 30}
# The launches of one step take less: the device finds all of them waiting.
HOLD_MS = 20.0

Work = Callable[[str], object]


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def matmuls(device: torch.device) -> Callable[[int], None]:
    factors = [torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device=device) for _ in range(2)]
    product = torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device=device)

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(*factors, out=product)

    run(500)  # libraries are loaded, and the clocks are up
    torch.cuda.synchronize()
    return run


def _clock(device: torch.device, count: int) -> tuple[StepClock, PooledEvents[Any]]:
    events = cuda_events(device)
    return StepClock(skip=0, count=count, events=events, memory=cuda_memory(device)), events


def _call(recorder: Recorder | None, work: Work, between: Callable[[], object] | None = None) -> None:
    for name in COUNTS:
        if between is not None:
            between()
        if recorder is not None:
            recorder.before(name)
        work(name)
        if recorder is not None:
            recorder.after(name)
    if recorder is not None:
        recorder.end()


def _step(clock: StepClock, work: Work, between: Callable[[], object] | None = None) -> None:
    """A forward and a backward that do the same."""
    clock.ready()  # which reads
    step = clock.begin_step()
    for phase in PHASES:
        _call(None if step is None else step.begin(phase), work, between)
    if step is not None:
        step.end()


class Timed:
    """The matmuls of a segment, between two events of our own: the same kernels, at the same clocks."""

    def __init__(self, matmuls: Callable[[int], None]) -> None:
        self._matmuls = matmuls
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in COUNTS}

    def __call__(self, name: str) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._matmuls(COUNTS[name])
        end.record()
        self._events[name].append((start, end))

    def ms(self) -> dict[Phase, dict[str, float]]:
        """Medians. Every second call is of the backward."""
        times = {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in self._events.items()}
        return {p: {n: statistics.median(ms[i::2]) for n, ms in times.items()} for i, p in enumerate(PHASES)}


def test_it_agrees_with_events_around_the_same_loop(device: torch.device, matmuls: Callable[[int], None]) -> None:
    clock, _ = _clock(device, 5)
    timed = Timed(matmuls)
    for _ in range(5):
        sleep(HOLD_MS)
        _step(clock, timed)
        torch.cuda.synchronize()
    assert clock.ready()
    expected, step_ms = timed.ms(), clock.readings().step_ms()
    for phase, measured in clock.readings().segment_ms().items():
        assert measured == pytest.approx(expected[phase], rel=0.03), phase
        assert measured["b"] / measured["a"] == pytest.approx(COUNTS["b"] / COUNTS["a"], rel=0.15), phase
        assert step_ms[phase] == pytest.approx(sum(measured.values()), rel=0.05), phase


def test_waits_for_another_stream_are_in_the_phase_only(device: torch.device, matmuls: Callable[[int], None]) -> None:
    clock, _ = _clock(device, 1)
    timed = Timed(matmuls)
    other = torch.cuda.Stream(device)

    def wait() -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            sleep(20.0)
        torch.cuda.current_stream().wait_stream(other)

    _step(clock, timed, wait)
    torch.cuda.synchronize()
    expected = timed.ms()
    for phase, measured in clock.readings().segment_ms().items():
        assert measured == pytest.approx(expected[phase], rel=0.03), phase
        # Two sleeps, on a device whose clock may be faster than CYCLES_PER_MS says.
        assert clock.readings().step_ms()[phase] > sum(measured.values()) + 2 * 10.0, phase


def test_it_never_waits_for_the_device(device: torch.device, matmuls: Callable[[int], None]) -> None:
    clock, events = _clock(device, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sleep(500.0)
        for _ in range(3):
            _step(clock, lambda name: matmuls(1))
        assert not clock.measuring
        assert not clock.ready(), "the device is asleep still"
        assert clock.readings().step_ms() == {}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made = events.num_made
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert clock.ready()
        assert clock.readings().segment_ms()["backward"]["b"] > 0
        _step(clock, lambda name: matmuls(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert events.num_made == made


def test_events_are_used_again(device: torch.device, matmuls: Callable[[int], None]) -> None:
    clock, events = _clock(device, 5)
    made = []
    for _ in range(5):
        sleep(HOLD_MS)  # no call is finished while its step is launched
        _step(clock, lambda name: matmuls(1))
        torch.cuda.synchronize()
        made.append(events.num_made)
    assert made == [made[0]] * 5
    assert clock.ready()


def test_the_code_between_forward_and_backward_is_a_segment(
    device: torch.device, matmuls: Callable[[int], None]
) -> None:
    clock = StepClock(skip=0, count=1, events=cuda_events(device), memory=cuda_memory(device), num_begun=lambda: 1)
    timed = Timed(matmuls)
    step = clock.begin_step()
    assert step is not None
    sleep(HOLD_MS)
    _call(step.begin("forward"), timed)
    timed("b")
    _call(step.begin("backward"), timed)
    step.end()
    torch.cuda.synchronize()
    assert clock.ready()
    forward = clock.readings().segment_ms()["forward"]
    assert forward[TURN] == pytest.approx(forward["b"], rel=0.1)
    assert clock.readings().step_ms()["forward"] == pytest.approx(sum(forward.values()), rel=0.05)


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def test_bytes_are_what_the_algebra_says(device: torch.device) -> None:
    clock, _ = _clock(device, 1)
    saved: list[Tensor] = []

    def forward_work(name: str) -> None:
        saved.append(_allocate({"a": 16, "b": 32}[name] * MIB, device))
        if name == "a":
            _allocate(64 * MIB, device)

    def backward_work(name: str) -> None:
        if name == "a":
            _allocate(100 * MIB, device)
        else:
            saved.clear()

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated(device)
    step = clock.begin_step()
    assert step is not None
    _call(step.begin("forward"), forward_work)
    _call(step.begin("backward"), backward_work)
    step.end()
    torch.cuda.synchronize()
    assert clock.ready()
    found = clock.readings()
    assert found.live_before() == {"forward": {"a": 0, "b": 16 * MIB}, "backward": {"a": 48 * MIB, "b": 48 * MIB}}
    assert found.live_after() == {"forward": {"a": 16 * MIB, "b": 48 * MIB}, "backward": {"a": 48 * MIB, "b": 0}}
    assert found.segment_peaks() == {"forward": {"a": 80 * MIB, "b": None}, "backward": {"a": 148 * MIB, "b": None}}
    assert found.temp_bytes()["backward"]["a"] == 100 * MIB
    assert found.peak_bytes() == 148 * MIB
    # The user's counter is as it would be without the clock.
    assert torch.cuda.max_memory_allocated(device) - base == 148 * MIB
