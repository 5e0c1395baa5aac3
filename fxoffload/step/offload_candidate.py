"""What the executor knows of each storage that a forward may offload."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OffloadCandidate:
    """One storage that a forward may offload.

    Attributes:
        name: of its first saved value.
        sources: how many saved values share it.
        is_input: it belongs to a graph input.
        rank: place in the order in which the backward first reads saved values; set when the backward is compiled.
        paces_forward: whether the segment that makes it is a layer, so that it counts for the in-flight window. Values
            outside the layers (a language model's logits) are one large lump and would set it far too wide.
        paces_backward: the same for the segment that first reads it, and the prefetch window.
        unread: whether the backward does not read it: the partitioner saved it for nothing, and it is dropped.
    """

    name: str
    sources: int
    is_input: bool
    rank: int = 0
    paces_forward: bool = True
    paces_backward: bool = True
    unread: bool = False


# A range starts at a multiple of this many bytes of its storage, so that reloaded tensors are as aligned as saved ones.
RANGE_ALIGNMENT = 64
