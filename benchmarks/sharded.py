"""One process per device: FSDP2 shards each layer, and each layer compiles on its own (scenario ``fsdp``)."""

import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.offload import compile_arguments
from benchmarks.schema import Request, Result
from benchmarks.steps import Stepper
from benchmarks.workloads import Stack, build_job


def join(request: Request, device: torch.device) -> None:
    """Meet through a file: no port to find, nothing to resolve. NCCL reads its own environment variables."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{request.rendezvous}",
        rank=request.rank,
        world_size=request.protocol.ranks,
        timeout=datetime.timedelta(seconds=max(60.0, request.protocol.timeout_s)),
        device_id=device if device.type == "cuda" else None,
    )


def build_stepper(request: Request, device: torch.device) -> Stepper:
    """Per layer: checkpoint (its variant only) inside, compile around it, FSDP's hooks outside both.

    With the checkpoint innermost it is part of the compiled graph, and FSDP's hooks do not run again in backward.
    """
    job = build_job(request.case, device, request.rank)
    if not isinstance(job.module, Stack):
        raise ValueError(f"fsdp runs the case stack only; found {request.case.name}")
    mesh = init_device_mesh(device.type, (request.protocol.ranks,))
    arguments = compile_arguments(request.variant)
    decoder = job.module.decoder
    for index, layer in enumerate(list(decoder.layers)):
        block: nn.Module = layer
        if request.variant.kind == "checkpoint":
            block = checkpoint_wrapper(layer)
            decoder.layers[index] = block
        if arguments is not None:
            block.compile(**arguments)
        fully_shard(block, mesh=mesh)
    fully_shard(job.module, mesh=mesh)
    return Stepper(job, job.module, device)


def leave() -> None:
    """Together: a rank that goes early would make the others' last collective fail."""
    dist.barrier()
    close()


def close() -> None:
    """End the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_ranks(request: Request, result: Result) -> None:
    """Every rank's median step and peak: rank 0's own numbers could hide a slower or fuller peer."""
    if result.step_ms is None:
        raise AssertionError("expected timed steps before ranks are gathered")
    mine = (result.step_ms.median, result.memory.peak_bytes if result.memory else 0)
    everyone: list[tuple[float, int]] = [mine] * request.protocol.ranks
    dist.all_gather_object(everyone, mine)
    result.step_ms_by_rank = [step_ms for step_ms, _ in everyone]
    result.peak_bytes_by_rank = [peak for _, peak in everyone]
