"""Costs measured before the first step on a GPU: true, and nothing that a user can see is another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload.compiler.measuring import LONGEST_S
from fxoffload.machine import op_times
from fxoffload.machine.meters import CudaMeter
from tests.gpu.gpu_support import MIB, allocated_above, build, differing, fresh_input, gradients

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"min_bytes": 1 << 16, "max_slowdown": 0.5}


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The profile that is kept, but no times of operators."""
    monkeypatch.setattr(op_times, "path_of", lambda identity: tmp_path / "ops.json")
    op_times._known.clear()
    torch.compiler.reset()
    fxoffload.reset_stats()
    yield
    op_times._known.clear()


def meter() -> CudaMeter:
    return CudaMeter(torch.device("cuda", torch.cuda.current_device()))


def counters() -> dict[str, int]:
    """What users read of the allocator."""
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max allocated": torch.cuda.max_memory_allocated(),
        "max reserved": torch.cuda.max_memory_reserved(),
    }


def work(nbytes: int) -> None:
    """Allocates in a pool, draws random numbers, multiplies."""
    x = torch.randn(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    torch.mm(x[: 1 << 20].view(1024, 1024), x[: 1 << 20].view(1024, 1024))


@pytest.mark.parametrize(("peak_mib", "num_blocks"), [(0, 0), (1, 1), (40, 1), (300, 1), (90, 7)])
def test_the_allocator_says_what_it_said(peak_mib: int, num_blocks: int) -> None:
    """Whether the peak was as high as the allocated bytes, or higher by a block that is cached since."""
    work(2 * MIB)  # cuBLAS's workspace, and cublasLt's
    a = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
    torch.addmm(a[0], a, a)
    del a
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    # As when a model's parameters were converted to another dtype.
    passing = [torch.empty(peak_mib * MIB, dtype=torch.uint8, device="cuda") for _ in range(num_blocks)]
    del passing
    torch.cuda.manual_seed(5)
    before, state = counters(), torch.cuda.get_rng_state()
    measures = meter()
    with measures.undisturbed():
        assert measures.room_bytes() > 1024 * MIB
        measures.once_ms(lambda: work(1024 * MIB))
    assert counters() == before
    assert torch.equal(torch.cuda.get_rng_state(), state)
    del held


def test_the_allocator_says_what_it_said_where_small_blocks_are_cached_between_others() -> None:
    """As gradients of norms are, once an optimizer has made its state after them."""
    work(2 * MIB)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    blocks = [torch.empty(200 << 10, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del blocks[::2]
    before = counters()
    assert before["max allocated"] - before["allocated"] >= 32 * (200 << 10)
    measures = meter()
    with measures.undisturbed():
        assert measures.room_bytes() > 1024 * MIB
        measures.once_ms(lambda: work(1024 * MIB))
    assert counters() == before


def test_no_more_is_run_than_can_be_hidden() -> None:
    """The peak is of memory that went back to the driver."""
    work(2 * MIB)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    before = counters()
    measures = meter()
    with measures.undisturbed():
        room = measures.room_bytes()
        assert 512 * MIB < room < 1024 * MIB
        measures.once_ms(lambda: work(room))
    assert counters() == before


def test_times_and_peaks_are_right() -> None:
    a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    measures = meter()
    with measures.undisturbed():
        ms = measures.ms(lambda: torch.mm(a, b, out=out))
        # The sum and the product, 32 MiB each.
        peak = measures.peak_bytes(lambda: (a + b).mul(2))
    tflop_per_s = 2 * 4096**3 / ms / 1e9
    assert 200 < tflop_per_s < 1000
    assert peak == 64 * MIB


def test_a_step_is_predicted_from_its_segments() -> None:
    model = build(depth=8)
    compiled = torch.compile(model, backend="fxoffload", options=OPTIONS)
    first_peak = allocated_above(lambda: compiled(fresh_input(0)).backward())
    stats, plan = fxoffload.stats(), fxoffload.plans()[-1]
    assert not stats.costs_estimated
    assert stats.num_ops_measured > 0 and stats.num_segments_measured > 3
    assert stats.measuring_ms < 1e3 * LONGEST_S + 2e3  # kernels are tuned meanwhile
    assert plan.basis == "segments" and plan.calibrated is None
    model.zero_grad()
    x = fresh_input(1)  # the caller's memory
    # Of so small a step, what blocks are larger than requests is 5 %.
    peak = allocated_above(lambda: compiled(x).backward(), "requested_bytes")
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
    assert first_peak <= peak + 320 * MIB  # kernels that are tuned, and no made-up run


def test_operators_are_found_again() -> None:
    for measured in (True, False):
        torch.compiler.reset()
        op_times._known.clear()
        fxoffload.reset_stats()
        compiled = torch.compile(build(depth=2), backend="fxoffload", options=OPTIONS)
        compiled(fresh_input(0)).backward()
        assert (fxoffload.stats().num_ops_measured > 0) == measured


def test_measuring_changes_no_bit() -> None:
    model = build(depth=4)
    found = []
    for disable in (("measured_costs",), ()):
        torch.compiler.reset()
        options = {**OPTIONS, "recompute": "default", "disable": disable}
        compiled = torch.compile(model, backend="fxoffload", options=options)
        torch.use_deterministic_algorithms(True)
        try:
            found.append(gradients(model, lambda compiled=compiled: compiled(fresh_input(3))))
        finally:
            torch.use_deterministic_algorithms(False)
    assert differing(*found) == 0


def test_a_device_that_is_full_is_estimated() -> None:
    model = build(depth=4)
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(free - 1536 * MIB, dtype=torch.uint8, device="cuda")
    compiled = torch.compile(model, backend="fxoffload", options=OPTIONS)
    compiled(fresh_input(0)).backward()
    assert fxoffload.plans()[-1].basis in ("estimated", "operators", "segments")
    stats = fxoffload.stats()
    assert stats.num_segments_measured > 0 or stats.costs_estimated
    del held
