"""Messages that are told once, until the compiler is reset."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable

from fxoffload.reset import on_reset
from fxoffload.sizes import format_bytes

_TOLD: set[Hashable] = set()
on_reset(_TOLD.clear)


# Modules whose lines tell a user nothing: this package, torch, and what runs their functions for them.
_INSIDE = frozenset({"fxoffload", "torch", "contextlib", "functools", "threading", "typer", "click"})


def warn(message: str) -> None:
    """Warn at the line of the caller's own code: the innermost one outside of this package and torch."""
    caller = frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame = frame.f_back
    frame = frame or caller  # a thread of this package's, or of autograd's
    known = frame.f_globals
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        known.get("__name__", "<string>"),
        known.setdefault("__warningregistry__", {}),
    )


def is_new(key: Hashable) -> bool:
    """Whether this is the first time that it is asked about ``key``."""
    if key in _TOLD:
        return False
    _TOLD.add(key)
    return True


def warn_once(key: Hashable, message: str) -> None:
    """Warn, the first time for ``key``."""
    if is_new(key):
        warn(message)


def budget_above_memory(budget_bytes: int, memory_bytes: int, device: str) -> None:
    """Tell of a budget that is larger than a device's memory."""
    if budget_bytes > memory_bytes:
        warn_once(
            ("budget above the device's memory", budget_bytes),
            f"expected an activation_budget within the memory of {device}, {format_bytes(memory_bytes)}, found "
            f"{format_bytes(budget_bytes)}: it bounds nothing. activation_budget='auto' is the room for activations",
        )


# What switches activation checkpointing on, by the module of the framework.
_SWITCHES = {
    "trl": "gradient_checkpointing=False in SFTConfig, GRPOConfig and the like",
    "transformers": "gradient_checkpointing=False in TrainingArguments, or model.gradient_checkpointing_disable()",
    "accelerate": "activation_checkpointing: false in accelerate's FSDP settings",
    "verl": "enable_gradient_checkpointing=False in verl's model settings",
    "lightning": "no activation_checkpointing_policy in Lightning's FSDPStrategy",
    "torchtitan": "activation_checkpoint.mode='none' in torchtitan's settings",
}


def without_checkpointing() -> str:
    """How to switch activation checkpointing off in the frameworks that this process has imported."""
    known = [text for module, text in _SWITCHES.items() if module in sys.modules]
    return "; ".join([*known, "no torch.utils.checkpoint, no checkpoint_wrapper"])


def checkpointing_around() -> None:
    """Compiled code runs inside a checkpoint that is not compiled."""
    warn_once(
        "checkpointing",
        "activation checkpointing is on around compiled code: such calls run twice and offload nothing "
        "(fxoffload.stats().calls_kept counts them). Switch it off, and fxoffload chooses what to keep, to offload and "
        f"to recompute: {without_checkpointing()}",
    )


def checkpointing_inside(num_ops: int, costs: str) -> None:
    """It is part of a compiled graph, and obeyed. ``costs``: its cost, in words, or ""."""
    warn_once(
        "checkpointing",
        f"activation checkpointing is on in compiled code: {num_ops} operations are recomputed in the backward, "
        f"whatever a plan would choose, and their results cannot be offloaded. {costs}Use it plain (no context_fn, "
        "options={'checkpoints': 'plan'}), or switch it off, and fxoffload chooses what to keep, to offload and to "
        f"recompute. Switch it off by: {without_checkpointing()}",
    )


def hooks_around(module: str) -> None:
    """Compiled code runs under saved-tensor hooks, which ``module`` defines."""
    if module == "torch.utils.checkpoint":
        return checkpointing_around()
    return warn_once(
        "hooks",
        f"saved-tensor hooks of {module or 'an unknown module'} are active around compiled code. They look at what it "
        "saves, so such calls offload nothing (fxoffload.stats().calls_kept counts them). Leave the hooks out: "
        "activation_offloading=False in TRL's configs, no torch.autograd.graph.save_on_cpu",
    )


def compiled_autograd() -> None:
    """Compiled code runs under compiled autograd."""
    warn_once(
        "compiled autograd",
        "compiled autograd is on. It looks at what compiled code saves, so such calls offload nothing "
        "(fxoffload.stats().calls_kept counts them). Leave torch._dynamo.config.compiled_autograd at False",
    )
