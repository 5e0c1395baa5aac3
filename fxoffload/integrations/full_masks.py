"""Batches without an ``attention_mask`` that masks nothing, so that a compiled model takes the causal kernel.

A compiled graph cannot ask whether anything is padded, so that it builds a mask of S x S wherever an ``attention_mask``
is given. Whether one is needed has to be decided before the compiled call, best where batches are made, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_MASK = "attention_mask"


def drop_full_mask(batch: Mapping[str, Any], *, right_padding: bool = False) -> dict[str, Any]:
    """The batch without its ``attention_mask`` where that masks nothing; else as it is.

    Batches with a mask and batches without compile into two graphs. A mask on the GPU is read from there, which waits
    for the GPU: call it on batches that are still on the host, or let ``MaskDroppingCollator`` do so.

    Args:
        batch: the keyword arguments of a model. A mask that is not of shape (batch, tokens) stays.
        right_padding: drop a mask too that only masks tokens after the last one of each row. In causal attention no
            token sees a later one, so that logits and gradients of real tokens are the same without it; logits of the
            padding are others. Only for causal models, with labels of -100 on the padding, and not for losses that read
            the mask themselves (the load balancing of mixture-of-experts models does).
    """
    mask = batch.get(_MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not _masks_nothing(mask, right_padding=right_padding):
        return dict(batch)
    return {name: value for name, value in batch.items() if name != _MASK}


class MaskDroppingCollator:
    """A data collator whose batches have no ``attention_mask`` that masks nothing (see ``drop_full_mask``).

        Trainer(model, args, data_collator=MaskDroppingCollator(DataCollatorWithPadding(tokenizer)))

    Padding to ``pad_to_multiple_of`` or to a fixed length leaves few full batches: ``right_padding=True`` is for those.
    """

    def __init__(self, collator: Callable[[Any], Mapping[str, Any]], *, right_padding: bool = False) -> None:
        self.collator = collator
        self.right_padding = right_padding

    def __call__(self, rows: Any) -> dict[str, Any]:
        return drop_full_mask(self.collator(rows), right_padding=self.right_padding)


def _masks_nothing(mask: Tensor, *, right_padding: bool) -> bool:
    kept = mask.bool()
    if not right_padding:
        return bool(kept.all())
    # Kept tokens come first: none is kept after one that is not. A row without any would have nothing to attend to.
    return bool(kept[:, :1].all() and (kept[:, 1:] <= kept[:, :-1]).all())
