"""Who receives weights: a stand-in for an inference engine that copies each tensor on the device into one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.limits import empty_cache
from benchmarks.rl.checksums import Checksums, checksums
from benchmarks.rl.job import RlJob
from benchmarks.rl.machine_memory import Stopwatch
from benchmarks.rl.ours import Fxoffload
from benchmarks.rl.process import spread
from benchmarks.rl.records import Streamed
from benchmarks.steps import start_memory_window
from fxoffload.sizes import parse_bytes

Weights = Iterable[tuple[str, Tensor]]


class WeightReader:
    """Knows what each full weight must be: its checksum, taken from the resident model."""

    def __init__(self, job: RlJob) -> None:
        self.job = job
        self.expected: Checksums = {}
        self.num_bytes = self.largest = 0
        job.reshard()
        for name, parameter in job.model.named_parameters():
            weight = full(parameter.detach())
            self.expected |= checksums({name: weight})
            self.num_bytes += weight.nbytes
            self.largest = max(self.largest, weight.nbytes)
        self._place = torch.empty(self.largest, dtype=torch.uint8, device=job.device)

    def read(self, weights: Weights) -> int:
        """How many there were."""
        count = 0
        for _, weight in weights:
            flat = weight.detach().contiguous().view(-1).view(torch.uint8)
            self._place[: flat.numel()].copy_(flat)
            count += 1
        return count

    def equal(self, weights: Weights) -> bool:
        """Whether every parameter comes, once at least, with the bits that it had."""
        found: Checksums = {}
        for name, weight in weights:
            found |= checksums({name: weight})
        return all(found.get(name) == value for name, value in self.expected.items())

    def release(self) -> None:
        self._place = torch.empty(0)
        empty_cache(self.job.device)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def measure(reader: WeightReader, once: Callable[[], Weights], cycles: int, check: bool = True) -> Streamed:
    """One reading whose bits are checked, then ``cycles`` timed ones; the peak is that of the timed ones."""
    job = reader.job
    equal = reader.equal(once()) if check else None
    empty_cache(job.device)
    before = start_memory_window(job.device)
    seconds: list[float] = []
    count = 0
    for _ in range(cycles):
        job.barrier()
        watch = Stopwatch(job.device)
        count = reader.read(once())
        seconds.append(watch.seconds())
    on_gpu = job.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(job.device) - before if on_gpu else None
    times = spread(seconds)
    rate = reader.num_bytes / job.ranks / 1e9 / times.median  # what this rank's link carried
    return Streamed(count, reader.num_bytes, times, rate, reader.largest, peak_bytes=peak, equal=equal)


def from_host(reader: WeightReader, strategy: Fxoffload, options: dict[str, Any], cycles: int) -> Streamed:
    """``stream_weights`` with its promise: two buckets and the largest tensor."""
    found = measure(reader, lambda: strategy.stream(**options), cycles)
    bucket = options.get("bucket_bytes")
    if bucket is not None:
        found.bucket_bytes = parse_bytes(bucket, "bucket_bytes")
        found.promised_bytes = 2 * found.bucket_bytes + found.largest_bytes
    return found
