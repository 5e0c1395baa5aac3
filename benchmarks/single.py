"""One process, one device: the model compiled whole or eager (``activations``, ``compile-time``, and sweeps)."""

from __future__ import annotations

import torch

from benchmarks.activations.around import around_step
from benchmarks.activations.kinds import is_alone, is_checkpointed, is_sharded
from benchmarks.job import Job, Workload
from benchmarks.offload import apply_settings, compile_arguments, compile_module
from benchmarks.schema import Request, Variant
from benchmarks.steps import Stepper
from benchmarks.stock.models import is_stock
from benchmarks.workloads import build_job, decoder_layers


def build_stepper(request: Request, device: torch.device) -> Stepper:
    """Weights and inputs from the case's seed, the variant applied to the whole model."""
    apply_settings(request.variant)
    if is_sharded(request.variant.kind):
        from benchmarks.activations import verl

        return verl.build_stepper(request, device)
    if request.variant.kind == "titan":
        from benchmarks.activations import titan

        return titan.build_stepper(request, device)
    return _apply(request, request.variant, build_job(request.case, device), device)


def apply(request: Request, variant: Variant, job: Job, device: torch.device) -> Stepper:
    """The variant applied to a model, which others may have been applied to before (sweeps).

    Raises:
        ValueError: the variant cannot be taken back from a model.
    """
    if is_alone(variant.kind):
        raise ValueError(f"{variant.kind} changes the model for good: it runs in activations, fsdp and max-seq only")
    if is_stock(request.case):
        from benchmarks.stock.apply import apply_stock

        return apply_stock(request, variant, job, device)
    return _apply(request, variant, job, device)


def _apply(request: Request, variant: Variant, job: Job, device: torch.device) -> Stepper:
    """With layers compiled on their own, ``checkpoint`` is around the compiled layer, as Hugging Face does it."""
    set_checkpointing(job.module, is_checkpointed(variant.kind))
    arguments = compile_arguments(variant)
    around = around_step(variant, job, device)
    if request.case.compile == "whole":
        return Stepper(job, compile_module(job.module, variant), device, around)
    for layer in decoder_layers(job.module):
        layer._compiled_call_impl = None  # what ``Module.compile`` sets
        if arguments is not None:
            layer.compile(**arguments)
    return Stepper(job, job.module, device, around)


def set_checkpointing(module: Workload, on: bool) -> None:
    """Hugging Face's, every layer, non-reentrant."""
    decoder = module.decoder
    if on:
        decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif decoder.is_gradient_checkpointing:
        # transformers renamed it in 5.2x; the old name warns.
        disable = getattr(decoder, "activation_checkpointing_disable", None) or decoder.gradient_checkpointing_disable
        disable()
