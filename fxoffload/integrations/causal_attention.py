"""Attention of Hugging Face models without S x S masks: ``attn_implementation="fxoffload_causal_sdpa"``.

Under ``torch.compile`` transformers' own "sdpa" builds a mask of S x S even where there is no padding. With torch 2.11
it always does, with 2.13 for sliding windows and with ``use_cache=False``, where it takes all positions for packed
ones. A mask leads to the memory-efficient kernel, which computes all pairs of tokens. Without one, the causal kernel
computes half of them. This implementation builds the mask only where the result needs it:

| attention_mask | kernel |
|---|---|
| None, whole causal attention | the causal kernel |
| None, a window at least as long as the sequence | the causal kernel |
| None, a shorter window of W tokens | the causal kernel on the first W queries, then blocks of W queries and 2 W keys |
| None, position_ids that the caller made (packed sequences) | as "sdpa": a mask, under ``torch.compile`` always |
| given, eager | as "sdpa": the causal kernel where nothing is padded |
| given, under ``torch.compile`` | a mask: a graph cannot ask whether anything is padded; ``drop_full_mask`` can |

All else (bidirectional and cross attention, grouped queries, dropout, caches) is transformers' "sdpa", which is called
underneath. The name contains "sdpa" because transformers then refuses the models that cannot run SDPA, such as gpt-oss,
whose sinks SDPA does not have.

Importing ``fxoffload.integrations.transformers``, or this module, registers the name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from fxoffload.torch_private.dynamo_positions import are_consecutive
from fxoffload.torch_private.transformers import forget_consecutive_positions

CAUSAL_ATTENTION = "fxoffload_causal_sdpa"

# Arguments of transformers' attention functions that change the result, and that SDPA cannot take.
_BEYOND_SDPA = ("s_aux", "sinks", "indices", "block_indices", "softcap")


def causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask that ``causal_attention`` is called with; transformers' ``sdpa_mask`` has the arguments.

    Returns:
        None where the kernel needs no mask. For a window of W tokens the mask of one block of W x 2 W (see
        ``window_mask``). Else transformers' mask of q_length x kv_length.
    """
    if attention_mask is None and not isinstance(q_offset, Tensor):
        if allow_is_bidirectional_skip and (local_size is None or kv_length <= local_size):
            return None
        if allow_is_causal_skip and _sees_all_before_it(q_length, kv_length, q_offset, kv_offset):
            if local_size is None or (kv_length <= local_size and kv_offset == 0):
                return None
            if _is_window(config, local_size) and q_length == kv_length and local_size > 1:
                return window_mask(local_size, device)
    # transformers also goes without a mask where a cache is longer than the queries fill, and leaves it to the
    # attention to cut it. Then a model that drops queries could not be told from that: here the mask is built.
    skip = allow_is_causal_skip and bool(q_length == 1 or q_length == kv_length)
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,  # pyright: ignore[reportArgumentType]  (a tensor for static caches)
        kv_offset,
        mask_function,
        attention_mask,
        local_size,
        allow_is_causal_skip=skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        config=config,
        device=device,
        **kwargs,
    )


def window_mask(window: int, device: torch.device | str) -> Tensor:
    """The mask (1, 1, W, 2 W) of any W queries in a row, on the W keys before the first of them and their own W.

    Query i is key W + i, and sees itself and the W - 1 keys before it.
    """
    query = torch.arange(window, device=device)[:, None]
    key = torch.arange(2 * window, device=device)[None, :]
    return ((key > query) & (key <= query + window))[None, None]


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' ``sdpa_attention_forward``, on blocks where ``causal_mask`` made the mask of one block.

    Raises:
        ValueError: an argument of the model asks for a feature that SDPA does not have.
    """
    for name in _BEYOND_SDPA:
        if kwargs.get(name) is not None:
            raise ValueError(
                f'attn_implementation="{CAUSAL_ATTENTION}" expected attention that SDPA has, found {name} from '
                f"{type(module).__name__}; use the default attn_implementation of this model"
            )

    def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool | None) -> Tensor:
        return sdpa_attention_forward(
            module, queries, keys, values, mask, dropout, scaling, causal, position_bias=position_bias, **kwargs
        )[0]

    tokens, keys = query.shape[2], key.shape[2]
    if attention_mask is not None and _is_of_one_block(attention_mask, tokens):
        if position_bias is not None:
            raise ValueError(
                f'attn_implementation="{CAUSAL_ATTENTION}" expected a sliding window without a position bias, '
                f'found both in {type(module).__name__}; use attn_implementation="sdpa"'
            )
        return _by_blocks(attend, query, key, value, attention_mask), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and tokens > 1 and tokens != keys:
        raise ValueError(
            f'attn_implementation="{CAUSAL_ATTENTION}" expected as many queries as keys in causal attention without a '
            f"mask, found {tokens} and {keys} in {type(module).__name__}: which keys each query sees is not known. "
            'Use attn_implementation="sdpa"'
        )
    return attend(query, key, value, attention_mask, is_causal), None


# -- the decision ------------------------------------------------------------------------------------------------------


def _sees_all_before_it(q_length: int, kv_length: int, q_offset: int, kv_offset: int) -> bool:
    """Whether the kernel's own causality is the mask: one query at the end, or as many queries as keys.

    The kernel aligns the first query with the first key, so that other lengths would be shifted.
    """
    if q_length == 1:
        return q_offset + 1 == kv_offset + kv_length
    return q_length == kv_length and q_offset == kv_offset


def _is_window(config: Any, local_size: int) -> bool:
    """Whether a local size is a sliding window. Chunked attention (Llama 4) has one, too, and other masks."""
    chunk = getattr(config, "attention_chunk_size", None)
    return chunk is None and getattr(config, "sliding_window", None) == local_size


# -- windows -----------------------------------------------------------------------------------------------------------


def _is_of_one_block(mask: Tensor, tokens: int) -> bool:
    """Whether ``window_mask`` made it: only such a mask has twice as many keys as queries, and fewer queries than
    there are."""
    rows, columns = mask.shape[-2:]
    return 1 < rows < tokens and columns == 2 * rows


def _by_blocks(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool | None], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
) -> Tensor:
    """Attention with a window of W tokens: (batch, tokens, heads, width), as transformers returns it.

    The first W queries are plain causal. All others, in blocks of W, see their own W keys and the W before them. They
    are S x 2 W pairs rather than S x S, with a mask of W x 2 W.
    """
    window, tokens, batch = mask.shape[-2], query.shape[2], query.shape[0]
    found = [attend(query[:, :, :window], key[:, :, :window], value[:, :, :window], None, True)]
    blocks = (tokens - window) // window
    if blocks > 0:
        end = (blocks + 1) * window
        output = attend(
            _stack(query[:, :, window:end], blocks),
            torch.cat([_stack(key[:, :, : end - window], blocks), _stack(key[:, :, window:end], blocks)], dim=2),
            torch.cat([_stack(value[:, :, : end - window], blocks), _stack(value[:, :, window:end], blocks)], dim=2),
            mask,
            False,
        )
        found.append(output.reshape(batch, blocks * window, *output.shape[2:]))
    rest = (tokens - window) % window
    if rest == 1:
        # A number, also where lengths vary: transformers would give SDPA ``q_length > 1`` for ``is_causal``, a SymBool.
        rest = 1
    if rest > 0:
        first = tokens - rest - window
        found.append(
            attend(
                query[:, :, tokens - rest :],
                key[:, :, first:],
                value[:, :, first:],
                mask[..., :rest, : window + rest],
                False,
            )
        )
    return torch.cat(found, dim=1)


def _stack(states: Tensor, blocks: int) -> Tensor:
    """(batch, heads, blocks x W, width) as (batch x blocks, heads, W, width)."""
    batch, heads, tokens, width = states.shape
    split = states.reshape(batch, heads, blocks, tokens // blocks, width)
    return split.transpose(1, 2).reshape(batch * blocks, heads, tokens // blocks, width)


AttentionInterface.register(CAUSAL_ATTENTION, causal_attention)
AttentionMaskInterface.register(CAUSAL_ATTENTION, causal_mask)
forget_consecutive_positions(CAUSAL_ATTENTION, are_consecutive)
