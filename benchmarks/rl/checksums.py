"""Whether tensors hold the same bits as before, told on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Checksums = dict[str, tuple[int, int]]


@torch.no_grad()
def checksums(tensors: Mapping[str, Tensor]) -> Checksums:
    """Two 64-bit sums over a tensor's bytes, one weighted by position: swapped or moved bytes show too."""
    words = {name: _words(tensor) for name, tensor in tensors.items()}
    longest = max((w.numel() for w in words.values()), default=0)
    device = next(iter(words.values())).device if words else None
    weights = torch.arange(longest, dtype=torch.int64, device=device) * 2 + 1
    sums = [torch.stack([w.sum(), (w * weights[: w.numel()]).sum()]) for w in words.values()]
    found = torch.stack(sums).tolist() if sums else []
    return {name: (plain, weighted) for name, (plain, weighted) in zip(words, found, strict=True)}


@torch.no_grad()
def change_a_bit(tensors: Mapping[str, Tensor]) -> None:
    """The lowest bit of each tensor's first byte, in place: old content in a host image would show."""
    for tensor in tensors.values():
        if tensor.numel():
            _bytes(tensor)[:1].bitwise_xor_(1)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    """The bytes as 64-bit words where they can be, else widened one by one."""
    flat = _bytes(tensor.detach().contiguous())
    whole = flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0
    return flat.view(torch.int64) if whole else flat.to(torch.int64)
