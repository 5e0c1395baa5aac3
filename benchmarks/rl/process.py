"""One measuring process of these scenarios: the group, the baseline of free memory, the job, then the scenario."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks import ranks
from benchmarks.link import measure_link
from benchmarks.measure import warm_up_device
from benchmarks.phases import Phases
from benchmarks.quartiles import summarize
from benchmarks.rl.job import RlJob, warm_up_group
from benchmarks.rl.machine_memory import free_bytes
from benchmarks.rl.records import RlResult, Spread
from benchmarks.rl.strategy import Strategy
from benchmarks.schema import Request, Result


class RlProcess:
    """What every scenario needs before it measures. ``free_before`` is the driver's free memory before any parameter,
    with the context, the communicators and cuBLAS in place."""

    def __init__(self, request: Request, device: torch.device, result: Result) -> None:
        # Module.to is for plain models.
        plain_model = request.variant.kind == "module_to"
        case = dataclasses.replace(request.case, parallel="no") if plain_model else request.case
        self.request = dataclasses.replace(request, case=case)
        self.device, self.result = device, result
        self.rl = result.rl = RlResult()
        self.free_before: int | None = None
        self.job: RlJob
        self.strategy: Strategy

    def prepare(self, phases: Phases) -> None:
        phases.required("process group", self._join)
        phases.required("warm-up", self._warm_up)

    def build(self, strategy: Strategy) -> None:
        request = self.request
        self.strategy = strategy
        torch.manual_seed(request.case.seed)
        self.job = RlJob(request.case, self.device, request.rank, request.protocol.ranks, strategy.allocating)
        self.result.parameter_bytes = self.job.num_bytes("params")
        self.job.barrier()

    def measure_link(self) -> None:
        """At the end, so that its buffers take no room before, and on all ranks at once."""
        self.job.barrier()
        self.result.link = measure_link(self.device, self.request.protocol)

    def leave(self) -> None:
        self.strategy.close()
        self.job.barrier()
        ranks.leave()

    def link_rate(self, direction: str) -> float | None:
        return self.result.link[f"{direction}_gb_per_s"] if self.result.link else None

    def _join(self) -> None:
        ranks.join(self.request, self.device)

    def _warm_up(self) -> None:
        warm_up_device(self.device)
        warm_up_group(self.device, dist.get_world_size())
        self.free_before = free_bytes(self.device)


def spread(values: Sequence[float]) -> Spread:
    summary = summarize(values)
    return Spread(summary.median, summary.q1, summary.q3, list(values))
