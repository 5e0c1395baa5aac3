"""The link's own rates, measured in a process of their own: what the copies are compared with."""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.schema import Protocol

ROUNDS = 5
MATMUL_SIZE = 8192
MATMUL_REPEATS = 10


def measure_link(device: torch.device, protocol: Protocol) -> dict[str, float]:
    """Gigabytes per second each way, both ways at once (per direction and together), and a bf16 matmul rate."""
    if device.type != "cuda":
        return _measure_memcpy(protocol)
    size = protocol.link_mib << 20
    host = [torch.ones(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def down() -> None:
        host[0].copy_(there[0], non_blocking=True)

    def up() -> None:
        there[1].copy_(host[1], non_blocking=True)

    rates: dict[str, float] = {"copy_bytes": size, "copies": protocol.link_copies}
    _copy_ms([(down, streams[0]), (up, streams[1])], 3)
    total = size * protocol.link_copies
    rates["d2h_gb_per_s"] = _median_rate(total, [(down, streams[0])], protocol)[0]
    rates["h2d_gb_per_s"] = _median_rate(total, [(up, streams[1])], protocol)[0]
    duplex = _median_rate(total, [(down, streams[0]), (up, streams[1])], protocol)
    rates["duplex_d2h_gb_per_s"], rates["duplex_h2d_gb_per_s"] = duplex
    rates["duplex_gb_per_s"] = sum(duplex)
    rates["matmul_bf16_tflop_per_s"] = matmul_rate(device)
    return rates


def _median_rate(
    total_bytes: int, work: list[tuple[Callable[[], None], torch.cuda.Stream]], protocol: Protocol
) -> list[float]:
    rounds = [_copy_ms(work, protocol.link_copies) for _ in range(ROUNDS)]
    return [total_bytes / statistics.median(times) / 1e6 for times in zip(*rounds, strict=True)]


def _copy_ms(work: list[tuple[Callable[[], None], torch.cuda.Stream]], copies: int) -> list[float]:
    """Each stream's own time, from events around its copies, queued alternately so that both directions overlap."""
    torch.cuda.synchronize()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in work]
    for (_, stream), (start, _) in zip(work, marks, strict=True):
        start.record(stream)
    for _ in range(copies):
        for copy, stream in work:
            with torch.cuda.stream(stream):
                copy()
    for (_, stream), (_, end) in zip(work, marks, strict=True):
        end.record(stream)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def matmul_rate(device: torch.device) -> float:
    """TFLOP/s of a large bf16 matrix product on a GPU."""
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    left, right, product = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    for _ in range(3):
        torch.mm(left, right, out=product)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(MATMUL_REPEATS):
        torch.mm(left, right, out=product)
    end.record()
    torch.cuda.synchronize()
    return 2 * MATMUL_SIZE**3 * MATMUL_REPEATS / start.elapsed_time(end) / 1e9


def _measure_memcpy(protocol: Protocol) -> dict[str, float]:
    """The rehearsal's "link" is an ordinary memory copy."""
    size = protocol.link_mib << 20
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    target.copy_(source)
    start = time.perf_counter()
    for _ in range(protocol.link_copies):
        target.copy_(source)
    rate = size * protocol.link_copies / (time.perf_counter() - start) / 1e9
    return {"copy_bytes": size, "copies": protocol.link_copies, "d2h_gb_per_s": rate, "h2d_gb_per_s": rate}
