"""One process, one device: the model compiled whole (scenarios ``activations`` and ``compile-time``, and sweeps)."""

from __future__ import annotations

import torch

from benchmarks.offload import compile_arguments, compile_module, peer_settings
from benchmarks.schema import Request, Variant
from benchmarks.steps import Stepper
from benchmarks.workloads import Job, Workload, build_job


def build_stepper(request: Request, device: torch.device) -> Stepper:
    """Weights and inputs from the case's seed, the variant applied to the whole model."""
    peer_settings(request.variant).__enter__()  # for the rest of this process, which measures nothing else
    return apply(request, request.variant, build_job(request.case, device), device)


def apply(request: Request, variant: Variant, job: Job, device: torch.device) -> Stepper:
    """The variant applied to a model, which it may have been applied to in another form before.

    With layers compiled on their own, ``checkpoint`` is around the compiled layer, as Hugging Face does it.
    """
    set_checkpointing(job.module, variant.kind == "checkpoint")
    arguments = compile_arguments(variant)
    if request.case.compile == "whole":
        return Stepper(job, compile_module(job.module, variant), device)
    for layer in job.module.decoder.get_submodule("layers").children():
        layer._compiled_call_impl = None  # what ``Module.compile`` sets
        if arguments is not None:
            layer.compile(**arguments)
    return Stepper(job, job.module, device)


def set_checkpointing(module: Workload, on: bool) -> None:
    """Hugging Face's, every layer, non-reentrant."""
    decoder = module.decoder
    if on:
        decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif decoder.is_gradient_checkpointing:
        # transformers renamed it in 5.2x; the old name warns.
        disable = getattr(decoder, "activation_checkpointing_disable", None) or decoder.gradient_checkpointing_disable
        disable()
