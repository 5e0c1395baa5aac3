"""One process, one device: the model compiled whole (scenarios ``activations`` and ``compile-time``, and sweeps)."""

from __future__ import annotations

import torch

from benchmarks.offload import compile_module, peer_settings
from benchmarks.schema import Request, Variant
from benchmarks.steps import Stepper
from benchmarks.workloads import Job, Workload, build_job


def build_stepper(request: Request, device: torch.device) -> Stepper:
    """Weights and inputs from the case's seed, the variant applied to the whole model."""
    peer_settings(request.variant).__enter__()  # for the rest of this process, which measures nothing else
    return apply(request.variant, build_job(request.case, device), device)


def apply(variant: Variant, job: Job, device: torch.device) -> Stepper:
    """The variant applied to a whole model, which it may have been applied to in another form before."""
    set_checkpointing(job.module, variant.kind == "checkpoint")
    return Stepper(job, compile_module(job.module, variant), device)


def set_checkpointing(module: Workload, on: bool) -> None:
    """Hugging Face's, every layer, non-reentrant."""
    decoder = module.decoder
    if on:
        decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif decoder.is_gradient_checkpointing:
        # transformers renamed it in 5.2x; the old name warns.
        disable = getattr(decoder, "activation_checkpointing_disable", None) or decoder.gradient_checkpointing_disable
        disable()
