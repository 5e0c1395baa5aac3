"""The harness's only contact with fxoffload, imported when a variant needs it."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.activations.kinds import runs_eagerly
from benchmarks.arguments import FXOFFLOAD_KINDS, TUPLE_OPTIONS
from benchmarks.schema import Variant


def uses_fxoffload(variant: Variant) -> bool:
    return variant.kind in FXOFFLOAD_KINDS


def compile_arguments(variant: Variant) -> dict[str, Any] | None:
    """Keyword arguments of ``torch.compile`` or ``Module.compile``; None for a variant that is not compiled."""
    if runs_eagerly(variant.kind):
        return None
    if not uses_fxoffload(variant):
        return {}
    import fxoffload as _registers_the_backend  # noqa: F401

    options = {k: tuple(v) if k in TUPLE_OPTIONS else v for k, v in variant.options.items()}
    return {"backend": "fxoffload", "options": options}


def compile_module(module: nn.Module, variant: Variant) -> nn.Module:
    """The callable that a step runs."""
    arguments = compile_arguments(variant)
    if arguments is None:
        return module
    compiled = torch.compile(module, **arguments)
    if not isinstance(compiled, nn.Module):
        raise AssertionError(f"expected torch.compile to return a module, found {type(compiled).__name__}")
    return compiled


def budget_bytes(variant: Variant) -> int | None:
    """The ``activation_budget`` of a variant of fxoffload; None where it has none.

    Raises:
        ValueError: no size, such as a budget relative to a peak that was not measured.
    """
    budget = variant.options.get("activation_budget")
    if budget is None:
        return None
    from fxoffload.sizes import parse_bytes

    return parse_bytes(budget, "activation_budget")


# A process that measures one variant keeps that variant's settings until it ends.
_FOR_GOOD = contextlib.ExitStack()


def apply_settings(variant: Variant) -> None:
    """``peer_settings`` for the rest of the process."""
    _FOR_GOOD.enter_context(peer_settings(variant))


def peer_settings(variant: Variant) -> contextlib.AbstractContextManager[Any]:
    """Around everything that a peer compiles and runs: settings that are the process's, not ``torch.compile``'s."""
    if variant.kind in ("torch_offload", "torch_offload_streams"):
        from benchmarks.activations.torch_offload import offload_everything

        return offload_everything(variant)
    if variant.kind != "torch_budget":
        return contextlib.nullcontext()
    from torch._functorch import config

    return config.patch(**variant.options)


def count_segment_calls() -> int:
    """Segments that a forward and a backward of everything that fxoffload compiled in this process call."""
    import fxoffload

    outer = [half for graph in fxoffload.graphs() for half in (graph.forward, graph.backward) if half is not None]
    return sum(node.op == "call_module" for half in outer for node in half.graph.nodes)


def read_stats(variant: Variant) -> dict[str, float] | None:
    """``fxoffload.stats()`` as numbers; counts by reason become ``name.reason``. It may wait for the device."""
    if not uses_fxoffload(variant):
        return None
    import fxoffload

    stats = fxoffload.stats()
    numbers: dict[str, float] = {}
    for name in (field.name for field in dataclasses.fields(stats)):
        value = getattr(stats, name)
        if isinstance(value, Mapping):
            numbers.update({f"{name}.{reason}": count for reason, count in value.items()})
        else:
            numbers[name] = value
    return numbers


def reset_stats(variant: Variant) -> None:
    if uses_fxoffload(variant):
        import fxoffload

        fxoffload.reset_stats()


def without_copies() -> contextlib.AbstractContextManager[None]:
    """Steps keep everything meanwhile, and compute as much again as with copies."""
    from fxoffload import override_policy

    return override_policy("keep_all")
