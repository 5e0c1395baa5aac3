"""Copies to and from the host do not hold up small copies of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.rl.measure_small_copies import measure_small_copies
from fxoffload.runtime.copies.giving_way import BURST_BYTES, GivingWay
from fxoffload.runtime.copies.streams import CudaCopies

pytestmark = pytest.mark.gpu

NBYTES = 1 << 30


@pytest.fixture(scope="module")
def pinned() -> Iterator[torch.Tensor]:
    yield torch.randint(0, 255, (NBYTES,), dtype=torch.uint8).pin_memory()


@pytest.fixture(scope="module")
def on_device() -> Iterator[torch.Tensor]:
    yield torch.randint(0, 255, (NBYTES,), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("part_bytes", [NBYTES, 24 << 20, 5 << 20])
@pytest.mark.parametrize("down", [False, True])
def test_a_small_copy_does_not_wait_for_what_is_queued(
    pinned: torch.Tensor, on_device: torch.Tensor, down: bool, part_bytes: int
) -> None:
    target, source = (pinned, on_device) if down else (on_device, pinned)
    parts = list(zip(target.split(part_bytes), source.split(part_bytes), strict=True))
    host, device = torch.ones(1024).pin_memory(), torch.ones(1024, device="cuda")
    way = GivingWay(torch.device("cuda", torch.cuda.current_device()))

    def ms_of_a_small_copy(gives_way: bool) -> float:
        """On the current stream, half a millisecond after the others have begun."""
        torch.cuda.synchronize()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(way.stream):
            way.copy(parts, gives_way=gives_way)
        torch.cuda._sleep(1_000_000)
        before.record()
        (host if down else device).copy_(device if down else host, non_blocking=True)
        after.record()
        torch.cuda.synchronize()
        return before.elapsed_time(after)

    for gives_way in (False, True):
        ms_of_a_small_copy(gives_way)
    # A GiB takes 20 ms.
    assert min(ms_of_a_small_copy(gives_way=False) for _ in range(3)) > 8.0, "the test would see nothing"
    assert min(ms_of_a_small_copy(gives_way=True) for _ in range(5)) < 1.0


@pytest.mark.parametrize("nbytes", [1, BURST_BYTES, BURST_BYTES + 1, 5 * BURST_BYTES - 7])
@pytest.mark.parametrize("parts", [1, 3])
def test_what_comes_in_bursts_is_whole_and_in_order(
    pinned: torch.Tensor, on_device: torch.Tensor, nbytes: int, parts: int
) -> None:
    """To the host, after a kernel that is late, and back to the device, with nothing but events to wait for."""
    copies = CudaCopies(torch.device("cuda", torch.cuda.current_device()))
    source = torch.zeros(parts * nbytes, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    back = torch.zeros(parts * nbytes, dtype=torch.uint8).pin_memory()
    torch.cuda._sleep(20_000_000)
    source.copy_(on_device[: parts * nbytes])
    copies.offload_waits_for_compute()
    with copies.offloading():
        event = copies.offload(list(zip(back.split(nbytes), source.split(nbytes), strict=True)))
    copies.reload_stream.wait_event(event)  # type: ignore[arg-type]
    with copies.reloading():
        event = copies.reload(list(zip(target.split(nbytes), back.split(nbytes), strict=True)))
    torch.cuda.current_stream().wait_event(event)  # type: ignore[arg-type]
    assert torch.equal(target, on_device[: parts * nbytes])
    assert torch.equal(back, on_device[: parts * nbytes].cpu())


@pytest.mark.parametrize("bursts", [1, 2, 3])
def test_what_is_put_behind_comes_behind(on_device: torch.Tensor, bursts: int) -> None:
    """Also where the last burst is the other stream's, and that one is late."""
    way = GivingWay(torch.device("cuda", torch.cuda.current_device()))
    nbytes = bursts * BURST_BYTES
    back = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    for stream in way.both:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(40_000_000)
    with torch.cuda.stream(way.stream):
        way.copy([(back, on_device[:nbytes])], gives_way=True)
    event = torch.cuda.Event()
    event.record(way.stream)
    event.synchronize()
    found = back.clone()
    torch.cuda.synchronize()
    assert torch.equal(found, on_device[:nbytes].cpu())


def test_the_caller_gets_its_stream_back(pinned: torch.Tensor, on_device: torch.Tensor) -> None:
    way = GivingWay(torch.device("cuda", torch.cuda.current_device()))
    for n in (1, BURST_BYTES + 1, 2 * BURST_BYTES + 1):
        with torch.cuda.stream(way.stream):
            way.copy([(on_device[:n], pinned[:n])], gives_way=True)
            assert torch.cuda.current_stream() == way.stream
            with pytest.raises(RuntimeError, match="size"):
                way.copy([(on_device[:n], pinned[:n]), (on_device[:2], pinned[:3])], gives_way=True)
            assert torch.cuda.current_stream() == way.stream
    torch.cuda.synchronize()


@pytest.mark.parametrize("reads", [False, True])
def test_a_host_that_reads_from_the_device_is_noticed(reads: bool) -> None:
    copies = CudaCopies(torch.device("cuda", torch.cuda.current_device()))
    count = torch.ones((), device="cuda")
    for _ in range(20):
        torch.cuda._sleep(4_000_000)  # two milliseconds of a layer
        copies.offload_waits_for_compute()
        if reads:
            count.item()
    assert copies.host_waits() is reads
    torch.cuda.synchronize()


def test_a_capture_is_not_asked_whether_it_is_done() -> None:
    """Nor is it what the next look asks about."""
    copies = CudaCopies(torch.device("cuda", torch.cuda.current_device()))
    copies.offload_waits_for_compute()
    graph, x = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x += 1
        for _ in range(3):
            copies.offload_waits_for_compute()
        torch.cuda.current_stream().wait_stream(copies.offload_stream)
    copies.offload_waits_for_compute()
    copies.offload_waits_for_compute()
    graph.replay()
    torch.cuda.synchronize()
    assert x[0].item() == 2.0


def test_the_benchmark_sees_small_copies_wait() -> None:
    rows = {(row["down"], row["small_copies"]): row for row in measure_small_copies(torch.device("cuda"))}
    assert len(rows) == 4
    for down in (False, True):
        assert rows[down, "one stream"]["longest_wait_ms"] > 10 * rows[down, "two in turn"]["waits_ms"]


def test_a_paced_call_waits_until_the_device_has_begun_the_one_before() -> None:
    copies = CudaCopies(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    ended = []
    for _ in range(4):
        copies.pace()
        assert not ended or not ended[-1].query(), "the device does not run dry"
        assert len(ended) < 2 or ended[-2].query()
        torch.cuda._sleep(60_000_000)
        ended.append(torch.cuda.Event())
        ended[-1].record()
    torch.cuda.synchronize()


def test_nothing_is_waited_for_in_a_capture() -> None:
    copies = CudaCopies(torch.device("cuda", torch.cuda.current_device()))
    value, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    copies.pace()
    with torch.cuda.graph(graph):
        for _ in range(3):
            copies.pace()
            value += 1
    copies.pace()
    graph.replay()
    assert value.sum().item() == 24.0
