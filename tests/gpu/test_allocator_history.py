"""The record of the caching allocator's events: peaks below what the process has had before."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from fxoffload.runtime.profiler.allocator_history import cuda_history
from fxoffload.runtime.profiler.allocator_trace import cuda_memory
from fxoffload.torch_private.cuda import records_allocator_events
from tests.gpu.gpu_support import MIB, allocated_above

pytestmark = pytest.mark.gpu

HIGH = 1 << 30
# A block may be larger than the request, by less than this.
LARGER = MIB


@pytest.fixture(autouse=True)
def nobody_records() -> Iterator[None]:
    assert not records_allocator_events()
    torch.cuda.empty_cache()
    yield
    torch.cuda.memory._record_memory_history(None)


def use(nbytes: int) -> None:
    """Some blocks of different sizes, at most this many bytes at a time; then none."""
    held = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in (nbytes // 2, 1, 700_001, 3 * MIB + 5)]
    del held[0]
    held.append(torch.empty(nbytes // 4, dtype=torch.uint8, device="cuda"))


def test_peaks_below_what_the_process_has_had() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory, begin = cuda_memory(device), cuda_history(device)
    assert memory is not None and begin is not None
    torch.empty(HIGH, dtype=torch.uint8, device=device)
    sizes = (40 * MIB, 300 * MIB, 8 * MIB)
    history = begin()
    assert history is not None and records_allocator_events()
    reads = [memory()]
    for nbytes in sizes:
        use(nbytes)
        reads.append(memory())
    began = time.perf_counter()
    history.end()
    print(f"read in {1e3 * (time.perf_counter() - began):.1f} ms")
    assert not records_allocator_events()
    assert torch.cuda.max_memory_allocated() >= HIGH, "the user's counter was reset"
    for first, last, nbytes in zip(reads, reads[1:], sizes, strict=False):
        found = history.peak_between(first, last)
        assert found is not None
        seen, real = found - first.allocated, allocated_above(lambda n=nbytes: use(n))
        print(f"{seen / MIB:.2f} of {real / MIB:.2f} MiB")
        assert real - 4 * LARGER <= seen <= real + 4096


def test_a_backward_on_another_thread_is_in_the_record() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory, begin = cuda_memory(device), cuda_history(device)
    assert memory is not None and begin is not None
    torch.empty(HIGH, dtype=torch.uint8, device=device)
    x = torch.randn(16 * MIB, device=device, requires_grad=True)
    history = begin()
    assert history is not None
    first = memory()
    x.exp().sin().sum().backward()
    last = memory()
    history.end()
    found = history.peak_between(first, last)
    x.grad = None
    real = allocated_above(lambda: x.exp().sin().sum().backward())
    assert found is not None and real - 4 * LARGER <= found - first.allocated <= real + 4096


def test_a_record_that_somebody_keeps_is_theirs() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    begin = cuda_history(device)
    assert begin is not None
    torch.cuda.memory._record_memory_history(max_entries=1000)
    assert begin() is None
    torch.empty(5 * MIB, dtype=torch.uint8, device=device)
    (traces,) = [t for t in torch.cuda.memory._snapshot()["device_traces"] if t]
    assert any(e["size"] == 5 * MIB for e in traces)
    torch.cuda.memory._record_memory_history(None)
    history = begin()
    assert history is not None
    torch.cuda.memory._record_memory_history(max_entries=1000)  # meanwhile
    torch.empty(5 * MIB, dtype=torch.uint8, device=device)
    history.end()
    assert records_allocator_events()
