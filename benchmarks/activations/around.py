"""Peers that are saved-tensor hooks around an eager step: torch's ``save_on_cpu`` and TRL's ``OffloadActivations``."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from benchmarks.activations.available import NotAvailable
from benchmarks.activations.load import load_module
from benchmarks.job import Job
from benchmarks.schema import Variant

Around = Callable[[], contextlib.AbstractContextManager[Any]]


def around_step(variant: Variant, job: Job, device: torch.device) -> Around:
    """What each step (forward and backward) runs in; nothing for most variants."""
    if variant.kind == "save_on_cpu":
        # Pinning needs a device that would profit from it.
        pin = bool(variant.options.get("pin_memory", device.type == "cuda"))
        return lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin)
    if variant.kind in ("trl", "trl_checkpoint"):
        manager = _trl_manager(variant, job, device)
        return lambda: manager
    return contextlib.nullcontext


def _trl_manager(variant: Variant, job: Job, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The one manager that TRL's trainers make for a model; it leaves out the language model's head, as there."""
    options = dict(variant.options)
    module = load_module("trl", "models.activation_offloading", options.pop("path", ""), _accelerate())
    # accelerate's logger raises unless a trainer has initialized accelerate's state.
    module.__dict__["logger"] = logging.getLogger("trl")
    if device.type == "cpu":
        raise NotAvailable("TRL's OffloadActivations offloads CUDA, XPU and NPU tensors only; the case is on the CPU")
    return module.get_act_offloading_ctx_manager(job.module.decoder, warn_if_no_head=False, **options)


def _accelerate() -> dict[str, ModuleType]:
    """The two names that TRL's file imports from accelerate, where accelerate is not installed."""
    if importlib.util.find_spec("accelerate") is not None:
        return {}
    from packaging.version import parse

    package, loggers, utils, versions = (
        ModuleType(name)
        for name in ("accelerate", "accelerate.logging", "accelerate.utils", "accelerate.utils.versions")
    )
    compare = {">=": lambda a, b: a >= b, ">": lambda a, b: a > b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b}
    loggers.__dict__["get_logger"] = logging.getLogger
    versions.__dict__["is_torch_version"] = lambda sign, version: compare[sign](
        parse(torch.__version__), parse(version)
    )
    return {module.__name__: module for module in (package, loggers, utils, versions)}
