"""What each rank's device and the way between the ranks give without a model: a slow peer slows all ranks."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.link import matmul_rate
from benchmarks.ranks import gather_and_scatter
from benchmarks.schema import RankMachine, Request

GATHERED_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
ROUNDS = 5


def measure_ranks(request: Request, device: torch.device) -> list[RankMachine]:
    """Of all ranks, in their order. All of them call it; a fake process group has no one to ask."""
    if request.protocol.process_group == "fake":
        return []
    mine = RankMachine(_all_gather_rate(request, device), matmul_rate(device) if device.type == "cuda" else None)
    found: list[RankMachine] = [mine] * request.protocol.num_processes
    dist.all_gather_object(found, mine)
    return found


def _all_gather_rate(request: Request, device: torch.device) -> float:
    """Gigabytes per second of the gathered bytes, once all ranks are there."""
    gather, _ = gather_and_scatter()
    share = GATHERED_BYTES[device.type] // request.protocol.num_processes
    own = torch.ones(share, dtype=torch.uint8, device=device)
    everything = torch.empty(share * request.protocol.num_processes, dtype=torch.uint8, device=device)
    times = [_ms(lambda: gather(everything, own), device) for _ in range(1 + ROUNDS)]
    return everything.nbytes / statistics.median(times[1:]) / 1e6


def _ms(work: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begin)
