"""Masks of S x S that attention in a graph is called with: their bytes, and the kernel they lead to. A finding pass.

    %mask = where(...)  # bf16 (1, 1, 8192, 8192): 128 MiB
    %a = _scaled_dot_product_efficient_attention(%q, %k, %v, %mask, True)  # computes all 8192 x 8192 pairs

Where nothing is padded or packed, causal attention needs none: ``is_causal=True`` takes a kernel that computes half of
the pairs. Graphs do not tell the contents of a mask, so that this pass finds masks, and not needless ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from fxoffload.analysis.labels import LAYER_KEY
from fxoffload.analysis.op_costs import argument_of, attention_sizes, call_of, distinct_bytes, node_kind, op_name
from fxoffload.analysis.value_names import ValueNames
from fxoffload.analysis.values import Storages
from fxoffload.torch_private.symbolic_sizes import hint

_MASK_NAMES = ("attn_bias", "attn_mask", "bias")
_KERNELS = {
    "aten._scaled_dot_product_efficient_attention": "memory-efficient",
    "aten._efficient_attention_forward": "memory-efficient",
    "aten._scaled_dot_product_cudnn_attention": "cuDNN",
    "aten._scaled_dot_product_flash_attention_for_cpu": "CPU (on a GPU: memory-efficient)",
}


@dataclass(frozen=True)
class AttentionMask:
    """One mask, which one or several calls of attention share.

    Attributes:
        producer: the op that makes it; "" for an input of the graph.
        tokens: S.
        kernel: that the calls take, in words.
        layers: of the calls; "" where a call is in none.
        label: what a person calls it (see ``fxoffload.analysis.value_names``).
    """

    name: str
    producer: str
    nbytes: int
    tokens: int
    kernel: str
    layers: tuple[str, ...]
    label: str = ""


class FindAttentionMasks:
    """The graph's masks, in the order of their first call. Those of other shapes than S x S are left out: of sliding
    windows by blocks, of padding alone, of a cache longer than the queries."""

    def __call__(self, gm: fx.GraphModule) -> tuple[AttentionMask, ...]:
        calls = [(n, m) for n in gm.graph.nodes if (m := _square_mask(n)) is not None]
        if not calls:
            return ()
        storages = Storages(gm.graph.nodes)
        shared: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
        for call, mask in calls:
            shared.setdefault(storages.root(mask), []).append((call, mask))
        names = ValueNames(gm.graph, storages)
        return tuple(_describe(uses, storages, names) for uses in shared.values())


def _square_mask(node: fx.Node) -> fx.Node | None:
    """The mask of an attention's forward, where it has one for every pair of as many queries as keys."""
    if node.op != "call_function" or node_kind(node) != "attention":
        return None
    target, args = call_of(node)
    if op_name(target).endswith("_backward"):
        return None
    mask = next((a for n in _MASK_NAMES if isinstance(a := argument_of(target, args, n, node.kwargs), fx.Node)), None)
    value = mask.meta.get("val") if mask is not None else None
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    sizes = attention_sizes(node)
    rows, columns = (hint(s) for s in value.shape[-2:])
    if sizes is None or sizes[0] != sizes[1] or sizes[0] < 2 or (rows, columns) != sizes:
        return None
    # Expanded over the queries: it is a mask of padding, of S elements.
    return mask if 0 not in value.stride()[-2:] else None


def _describe(uses: list[tuple[fx.Node, fx.Node]], storages: Storages, names: ValueNames) -> AttentionMask:
    call, mask = uses[0]
    made = storages.members(mask)[0]
    target = op_name(call_of(call)[0])
    return AttentionMask(
        name=made.name,
        producer=str(made.target) if made.op == "call_function" else "",
        nbytes=max(distinct_bytes(m) or 0 for m in storages.members(mask)),
        tokens=hint(mask.meta["val"].shape[-1]) or 0,
        kernel=_KERNELS.get(target, target),
        layers=tuple(str(c.meta.get(LAYER_KEY) or "") for c, _ in uses),
        label=names.of(made),
    )
