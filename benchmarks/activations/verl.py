"""verl's activation offloading: eager layers under FSDP2 on one rank, each layer's saved tensors one group.

verl finds the layers by FSDP's wrappers, so the model is wrapped as verl's ``apply_fsdp2`` does: decoder layers and
root (not the embedding, which verl's offloading passes over). On one rank FSDP2 still gathers (copies) each layer's
parameters before use: ``eager_fsdp`` is the same without offloading.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks import ranks
from benchmarks.activations.available import NotAvailable
from benchmarks.activations.load import load_module
from benchmarks.activations.verl_packages import bare_packages
from benchmarks.job import Job
from benchmarks.schema import Request
from benchmarks.steps import Stepper
from benchmarks.workloads import build_job, decoder_layers

# Below that, verl's function logs a warning and offloads nothing.
LEAST_LAYERS = 3


def build_stepper(request: Request, device: torch.device) -> Stepper:
    """The case under FSDP2 on this one rank; with verl's offloading for the variants of that name."""
    return join_and_shard(request, build_job(request.case, device), device)


def join_and_shard(request: Request, job: Job, device: torch.device) -> Stepper:
    """The same with a job that exists; the process group is left to be closed (``ranks.close``)."""
    ranks.join(request, device)
    return shard(request, job, device, init_device_mesh(device.type, (1,)))


def shard(request: Request, job: Job, device: torch.device, mesh: DeviceMesh) -> Stepper:
    """The same over the ranks of ``mesh``, which have met."""
    kind = request.variant.kind
    offload = None if kind == "eager_fsdp" else _load(request, device)
    for layer in decoder_layers(job.module):
        fully_shard(layer, mesh=mesh)
    fully_shard(job.module, mesh=mesh)
    if offload is not None:
        offload.enable_activation_offloading(job.module, "fsdp2", enable_ckpt=kind == "verl_checkpoint")
        _check(job.module, decoder_layers(job.module))
    return Stepper(job, job.module, device)


def _load(request: Request, device: torch.device) -> ModuleType:
    if request.case.layers < LEAST_LAYERS:
        raise NotAvailable(
            f"verl offloads nothing in fewer than {LEAST_LAYERS} layers; give layers={LEAST_LAYERS} or more, "
            f"found {request.case.layers}"
        )
    path = str(request.variant.options.get("path", ""))
    stand_ins = {"fsdp_utils": {"FSDPModule": FSDPModule}}  # the one name that the file takes from there
    with bare_packages(Path(path), stand_ins) if path else contextlib.nullcontext():
        module = load_module("verl", "utils.activation_offload", path)
    if device.type == "cpu":
        # A rehearsal: there is nothing to pin for.
        handler = module.SynchronizedGroupOffloadHandler
        handler.offload = staticmethod(functools.partial(handler.offload, pin_memory=False))
    return module


def _check(module: nn.Module, layers: nn.ModuleList) -> None:
    """verl replaces the ``forward`` of the found module, on the instance."""
    wrapped = [name for name, child in module.named_modules() if "forward" in vars(child)]
    if len(wrapped) != len(layers):
        raise RuntimeError(
            f"expected verl to wrap the {len(layers)} decoder layers, found {len(wrapped)}: {', '.join(wrapped[:4])}"
        )
