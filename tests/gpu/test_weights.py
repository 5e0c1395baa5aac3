"""Weight streams on a GPU: values, memory as the allocator counts it, fences, and the speed of the link."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxoffload.phases.manager import PhaseManager
from fxoffload.phases.residue import residue
from fxoffload.phases.weight_sync.weights import stream_weights, weights_on_device
from tests.gpu.gpu_support import CYCLES_PER_MS, MIB

pytestmark = pytest.mark.gpu


class Weights(nn.Module):
    """Matrices of 32 MiB, one of 150 MiB, and small vectors between them."""

    def __init__(self, count: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator("cuda").manual_seed(0)

        def values(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device="cuda", dtype=dtype, generator=generator))

        self.large = values(75, 1024, 1024)
        self.layers = nn.ParameterList(p for _ in range(count) for p in (values(4096, 4096), values(4096)))


@pytest.fixture(params=["device", "host"])
def manager(request: pytest.FixtureRequest) -> Iterator[PhaseManager]:
    gc.collect()  # other tests' models, which would go meanwhile
    manager = PhaseManager(Weights(8))
    manager.values = {n: p.detach().cpu() for n, p in manager.models[""].named_parameters()}  # type: ignore[attr-defined]
    if request.param == "host":
        manager.offload("params")
    yield manager
    manager.close()


@pytest.mark.parametrize("bucket", [20 * MIB, 100 * MIB, 1024 * MIB])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_values_and_peak(manager: PhaseManager, bucket: int, dtype: torch.dtype | None) -> None:
    expected: dict[str, Tensor] = manager.values  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stream = stream_weights(manager, bucket, dtype=dtype)
    copies = []
    for name, tensor in stream:
        copies.append((name, tensor.to("cpu")))
        del tensor  # it is the loop's, not the stream's
    largest = max(t.numel() * (dtype or t.dtype).itemsize for t in expected.values())
    assert torch.cuda.max_memory_allocated() - before <= 2 * bucket + largest
    assert torch.cuda.memory_allocated() == before
    assert [name for name, _ in copies] == list(expected)
    for name, tensor in copies:
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_the_consumers_stream_is_waited_for(manager: PhaseManager) -> None:
    """Kernels that read a bucket late still see it, though the next ones were copied meanwhile."""
    expected: dict[str, Tensor] = manager.values  # type: ignore[attr-defined]
    late: list[tuple[str, Tensor]] = []
    for name, tensor in stream_weights(manager, 70 * MIB):
        torch.cuda._sleep(20 * CYCLES_PER_MS)
        late.append((name, tensor.clone()))
    for name, tensor in late:
        assert torch.equal(tensor.cpu(), expected[name]), name


def test_ends_early(manager: PhaseManager) -> None:
    before = torch.cuda.memory_allocated()
    with stream_weights(manager, 70 * MIB) as stream:
        next(stream)
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() == before
    # A tensor that is allocated in its place is not written by a copy that was under way.
    zeros = [torch.zeros(70 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    assert all(int(z.max()) == 0 for z in zeros)


def test_speed_of_the_link() -> None:
    """4 GB from the host image at 85 % of what one pinned copy reaches, or more."""
    manager = PhaseManager(Weights(120))
    manager.offload("params")
    host = torch.empty(1024 * MIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    link = max(_gb_per_s(host.numel(), lambda: device.copy_(host, non_blocking=True)) for _ in range(4))
    streams = [stream_weights(manager, "512MiB") for _ in range(3)]

    def consume(stream: Iterator[tuple[str, Tensor]]) -> None:
        for _ in stream:
            pass

    reached = max(_gb_per_s(stream.nbytes, lambda stream=stream: consume(stream)) for stream in streams)
    print(f"stream_weights: {reached:.1f} GB/s of {link:.1f}")
    assert streams[0].nbytes > 4e9
    assert reached >= 0.85 * link
    manager.close()


def _gb_per_s(nbytes: int, run) -> float:  # type: ignore[no-untyped-def]
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return nbytes / 1e9 / (time.perf_counter() - began)


def test_weights_on_device_and_residue() -> None:
    manager = PhaseManager(Weights(4))
    manager.offload("params")
    names = {f"parameter '{name}'" for name in ("large", "0", "1")}
    left = [one for one in residue(ignore=[]) if any(text.startswith(tuple(names)) for text in one.held_by)]
    assert left == []
    with weights_on_device(manager) as weights:
        assert all(tensor.is_cuda for tensor in weights.values())
        assert any("parameter 'large' of Weights" in one.held_by for one in residue())
    assert weights.load_seconds > 0.0 and weights.offload_seconds > 0.0
    manager.close()


def test_the_time_that_the_consumer_stands_still_is_known() -> None:
    manager = PhaseManager(Weights(8))
    manager.offload("params")
    copies: Any = manager.copies(torch.device("cuda", torch.cuda.current_device()))
    copies.before_copy = lambda stream: torch.cuda._sleep(5 * CYCLES_PER_MS)
    stream = stream_weights(manager, 40 * MIB)
    for _ in stream:
        pass
    copies.before_copy = None
    torch.cuda.synchronize()
    assert stream.delivered_bytes == stream.nbytes
    late = stream.exposed_seconds
    assert late >= 0.004 * len(stream.plan.buckets)
    busy = stream_weights(manager, 40 * MIB)
    for _ in busy:
        torch.cuda._sleep(10 * CYCLES_PER_MS)  # longer than a bucket's copies
    torch.cuda.synchronize()
    assert busy.exposed_seconds < late / 2
    manager.close()
