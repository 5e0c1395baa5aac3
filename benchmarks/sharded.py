"""One process per device: FSDP2 shards each layer, and each layer compiles on its own (scenarios ``fsdp`` and
``fsdp-lengths``).

With ``tensor_parallel=2`` pairs of ranks share each layer's projections too: FSDP2 over the one dimension of the mesh,
tensor parallelism over the other.
"""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from benchmarks.activations import verl
from benchmarks.activations.around import around_step
from benchmarks.activations.kinds import is_checkpointed, is_sharded
from benchmarks.hf_models import has_head
from benchmarks.offload import apply_settings, compile_arguments
from benchmarks.schema import Request
from benchmarks.steps import Stepper
from benchmarks.workloads import build_job, decoder_layers

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def build_stepper(request: Request, device: torch.device, *, dynamic: bool = False) -> Stepper:
    """Per layer: checkpoint (its variants only) inside, compile around it, FSDP's hooks outside both.

    With the checkpoint innermost it is part of the compiled graph, and FSDP's hooks do not run again in backward.

    Args:
        dynamic: layers are compiled with dynamic shapes.

    Raises:
        ValueError: a case or a variant that this scenario has no way to run, or ranks that cannot be paired.
    """
    variant, parallel = request.variant, request.protocol.tensor_parallel
    replicas = _count_replicas(request)
    _check(request)
    job = build_job(request.case, device, request.rank // parallel)
    layers = decoder_layers(job.module)
    mesh = init_device_mesh(device.type, (replicas, parallel), mesh_dim_names=("fsdp", "tensor"))
    if parallel > 1:
        for layer in layers:
            parallelize_module(layer, mesh["tensor"], _projections())
    if is_sharded(variant.kind):
        return verl.shard(request, job, device, mesh["fsdp"])
    apply_settings(variant)
    arguments = compile_arguments(variant)
    for index, layer in enumerate(list(layers)):
        block: nn.Module = layer
        if is_checkpointed(variant.kind):
            block = checkpoint_wrapper(layer)
            layers[index] = block
        if arguments is not None:
            block.compile(**arguments, **({"dynamic": True} if dynamic else {}))
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(job.module, mesh=mesh["fsdp"])
    return Stepper(job, job.module, device, around_step(variant, job, device))


def _count_replicas(request: Request) -> int:
    """How many groups of ranks see different inputs.

    Raises:
        ValueError: the ranks do not divide into groups of ``tensor_parallel``.
    """
    ranks, parallel = request.protocol.ranks, request.protocol.tensor_parallel
    if parallel < 1 or ranks % parallel:
        raise ValueError(f"expected ranks to be a multiple of tensor_parallel, found ranks={ranks} and {parallel}")
    return ranks // parallel


def _check(request: Request) -> None:
    case, parallel = request.case, request.protocol.tensor_parallel
    if has_head(case) or case.experts:
        raise ValueError(f"fsdp runs the case stack only; found {case.name}")
    if case.heads % parallel or case.kv_heads % parallel:
        raise ValueError(f"tensor_parallel={parallel} does not divide {case.heads} and {case.kv_heads} heads")
    if request.variant.kind == "titan":
        raise ValueError("titan compiles a whole model on one GPU: it runs in scenario activations only")


def _projections() -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
    return styles | {name: RowwiseParallel() for name in ROWS}
