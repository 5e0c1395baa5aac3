"""``torch.ops.fxoffload.*``: what happens between two segments, as ops of the outer graphs.

The outer graphs are ordinary FX graphs. These ops have fake implementations, so the graphs can be shape-checked, and
eager ones, so that a graph can be run without the executor. In both, an offloaded value *is* its host copy: a CPU
tensor of the same shape and strides. The executor runs the same nodes with tokens and streams instead
(``fxoffload.runtime.outer_program``); what each op means there:

=================  =====================================================================================================
``offload``        Start the copies to the host, on the offload stream, after all work of the compute stream so far.
``release``        No later op reads the sources. Let the compute stream wait for copies until at most
                   ``in_flight_budget`` bytes are under way, and drop the references to those waited for.
``wait_offload``   The compute stream waits for these copies (before the caller may write to a graph input).
``reload``         These values are needed next, in this order; copies start as the prefetch budget allows.
``prefetch``       Start the reloads that fit into the prefetch budget now.
``wait_reload``    The compute stream waits for these values (and starts their copies if nothing has).
=================  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

_LIBRARY = torch.library.Library("fxoffload", "DEF")


def _define(schema: str, eager: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.define(schema)
    name = schema.split("(")[0]
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxoffload::{name}", fake, lib=_LIBRARY)


def _strided_like(values: list[Tensor], device: torch.device) -> list[Tensor]:
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device) for v in values]


def _copied(values: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of the raw ranges, as the executor makes them: an expanded tensor cannot be written by its strides."""
    copies = _strided_like(values, device)
    for new, old in zip(copies, values, strict=True):
        count = 1 + sum((n - 1) * s for n, s in zip(old.shape, old.stride(), strict=True)) if old.numel() else 0
        new.as_strided((count,), (1,)).copy_(old.as_strided((count,), (1,)))
    return copies


_HOST = torch.device("cpu")

_define(
    "offload(Tensor[] sources) -> Tensor[]",
    lambda sources: _copied(sources, _HOST),
    lambda sources: _strided_like(sources, _HOST),
)
_define("release(Tensor[] copies) -> ()", lambda copies: None, lambda copies: None)
_define("wait_offload(Tensor[] copies) -> ()", lambda copies: None, lambda copies: None)
_define(
    "reload(Tensor[] copies, Device device) -> Tensor[]",
    lambda copies, device: _copied(copies, device),
    lambda copies, device: _strided_like(copies, device),
)
_define("prefetch() -> ()", lambda: None, lambda: None)
_define(
    "wait_reload(Tensor[] reloads) -> Tensor[]",
    lambda reloads: [_copied([r], r.device)[0] for r in reloads],
    lambda reloads: [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=r.device) for r in reloads],
)

offload = torch.ops.fxoffload.offload.default
release = torch.ops.fxoffload.release.default
wait_offload = torch.ops.fxoffload.wait_offload.default
reload = torch.ops.fxoffload.reload.default
prefetch = torch.ops.fxoffload.prefetch.default
wait_reload = torch.ops.fxoffload.wait_reload.default

ALL = (offload, release, wait_offload, reload, prefetch, wait_reload)
# Keep the ops that return nothing when something eliminates dead code.
for _op in (release, wait_offload, prefetch):
    has_side_effect(_op)


def is_op(node: torch.fx.Node, op: Callable[..., Any]) -> bool:
    """Whether ``node`` calls exactly ``op``."""
    return node.op == "call_function" and node.target is op
