"""Reads single tensors out of the host image."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fxoffload.torch_private.storages import negated


def read_tensor(plain: Tensor, pieces: Iterable[tuple[int, Tensor]]) -> Tensor:
    """A copy of a tensor, with its shape and strides, in memory of its own on the CPU.

    Args:
        plain: whose shape, strides and offset say which bytes of its storage it has.
        pieces: (offset, bytes) of that storage.
    """
    size, start = plain.element_size(), int(plain.storage_offset()) * plain.element_size()
    reach = sum((n - 1) * step for n, step in zip(plain.shape, plain.stride(), strict=True))
    stop = start + (reach + 1) * size if plain.numel() else start
    with torch.inference_mode(False):
        found = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        for at, host in within(pieces, start, stop):
            found[at : at + host.numel()] = host
        return with_bits_of(plain, torch.as_strided(found.view(plain.dtype), plain.shape, plain.stride()))


def within(pieces: Iterable[tuple[int, Tensor]], start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """The parts of (offset, bytes) that lie in ``start:stop``, with their offsets there."""
    for at, host in pieces:
        begin, end = max(at, start), min(at + host.numel(), stop)
        if begin < end:
            yield begin - start, host[begin - at : end - at]


def with_bits_of(tensor: Tensor, copy: Tensor) -> Tensor:
    """A copy of a tensor's bytes as the values that they stand for: ``conj()`` and ``imag`` may have set a bit only."""
    if tensor.is_conj():
        copy = copy.conj()
    return negated(copy) if tensor.is_neg() else copy
