"""One process per device: how they meet, exchange and part."""

import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.collective_times import once_all_there, usual_sum
from benchmarks.schema import Collective, Request, Result


def join(request: Request, device: torch.device) -> None:
    """Meet through a file: no port to find, nothing to resolve. NCCL reads its own environment variables."""
    group = request.protocol.process_group
    if group == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.protocol.ranks)
        return
    nccl = device.type == "cuda" and group != "gloo"
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        init_method=f"file://{request.rendezvous}",
        rank=request.rank,
        world_size=request.protocol.ranks,
        timeout=datetime.timedelta(seconds=max(60.0, request.protocol.timeout_s)),
        device_id=device if nccl else None,
    )


def gather_and_scatter() -> tuple[Callable[[Tensor, Tensor], object], Callable[[Tensor, Tensor], object]]:
    """All-gather and reduce-scatter of whole tensors, called with output and input. torch 2.13 has new names for them,
    and deprecates the old ones."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather, getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def leave() -> None:
    """Together: a rank that goes early would make the others' last collective fail."""
    dist.barrier()
    close()


def close() -> None:
    """End the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_ranks(request: Request, result: Result) -> None:
    """Every rank's median step and peak: rank 0's own numbers could hide a slower or fuller peer. And its collectives,
    whose kernels wait where a rank comes early."""
    if result.step_ms is None:
        raise AssertionError("expected timed steps before ranks are gathered")
    own = (result.step_ms.median, result.memory.peak_bytes if result.memory else 0)
    everyone: list[tuple[float, int]] = [own] * request.protocol.num_processes
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own)
    result.step_ms_by_rank = [step_ms for step_ms, _ in everyone]
    result.peak_bytes_by_rank = [peak for _, peak in everyone]
    # With tensor parallelism a rank has others' collectives besides its own; and only NCCL's are traced.
    if request.protocol.tensor_parallel == 1 and not request.protocol.process_group:
        for mine in (result.collectives, result.collectives_without, *result.collectives_idle.values()):
            traced: list[dict[str, Collective]] = [mine] * request.protocol.ranks
            dist.all_gather_object(traced, mine)
            for kind, each_ms in once_all_there(traced).items():
                found = mine[kind]
                found.each_all_there_ms, found.all_there_ms = each_ms, usual_sum(each_ms, found.count)
