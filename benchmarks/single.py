"""One process, one device: the model compiled whole (scenarios ``activations`` and ``compile-time``)."""

import torch

from benchmarks.offload import compile_module
from benchmarks.schema import Request
from benchmarks.steps import Stepper
from benchmarks.workloads import build_job


def build_stepper(request: Request, device: torch.device) -> Stepper:
    """Weights and inputs from the case's seed, the variant applied to the whole model."""
    job = build_job(request.case, device)
    if request.variant.kind == "checkpoint":
        job.module.decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Stepper(job, compile_module(job.module, request.variant), device)
