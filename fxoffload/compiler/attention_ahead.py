"""Attention with dropout in plans ahead: on a CPU it would save its scores, which a GPU's kernels do not.

Models are traced on the CPU, whose flash kernel takes no dropout, so that torch computes such attention op by op.
GPT-2's step (12 layers, 16 x 1,024 tokens) was predicted to take 29.5 GiB so. It takes 9.2 or 10.7 on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend_as_on_gpu(gm: fx.GraphModule) -> None:
    """Have attention in Dynamo's graph, and in its regions, traced as one kernel where it has dropout."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        found = module.graph.find_nodes(op="call_function", target=scaled_dot_product_attention)
        for node in found:
            node.target = _attention
        if found:
            module.recompile()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """``scaled_dot_product_attention``. The kernel is never run: on fake tensors it takes dropout."""
    if not dropout_p or kwargs.get("enable_gqa") or not _is_taken(query, key, value, attn_mask):
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    found, _ = _FLASH(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=kwargs.get("scale"))
    return found


def _is_taken(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    """Whether the CPU's flash kernel takes these shapes."""
    shapes = [t.shape for t in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes) or len({(s[0], s[1], s[3]) for s in shapes}) > 1:
        return False
    return attn_mask is None or (attn_mask.dim() in (2, 4) and not attn_mask.requires_grad)
