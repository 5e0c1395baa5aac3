"""How a tensor is cut over ranks, and which elements of it a rank holds. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a box begins, and its sizes, in each dimension."""


@dataclass(frozen=True)
class TensorCut:
    """One cut of a tensor into as many parts as a process group has ranks.

    Every part is as long as the first one; the last ones are shorter or empty.

    Attributes:
        dim: of the tensor.
        size: number of ranks.
        rank: of this process in the group.
        group: the process group.
    """

    dim: int
    size: int
    rank: int
    group: Any = field(repr=False)


def region(shape: Sequence[int], cuts: Sequence[TensorCut], coordinates: Sequence[int]) -> Box:
    """The part of the rank with these coordinates (one for each cut) after all cuts, made in their order."""
    starts, sizes = [0] * len(shape), list(shape)
    for cut, coordinate in zip(cuts, coordinates, strict=True):
        per_rank = -(-sizes[cut.dim] // cut.size)
        start = min(coordinate * per_rank, sizes[cut.dim])
        starts[cut.dim] += start
        sizes[cut.dim] = min(per_rank, sizes[cut.dim] - start)
    return tuple(starts), tuple(sizes)


def is_even(shape: Sequence[int], cuts: Sequence[TensorCut]) -> bool:
    """Whether all ranks hold equally much."""
    parts = [1] * len(shape)
    for cut in cuts:
        parts[cut.dim] *= cut.size
    return all(extent % n == 0 for extent, n in zip(shape, parts, strict=True))


def boxes(sizes: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that hold the elements ``start:stop`` of a row-major array, in their order."""
    if start >= stop:
        return
    if start == 0 and stop == math.prod(sizes):
        yield (0,) * len(sizes), tuple(sizes)
        return
    inner = tuple(sizes[1:])
    row = math.prod(inner)
    while start < stop:
        index, skipped = divmod(start, row)
        rows = 0 if skipped else (stop - start) // row
        if rows:
            yield (index, *(0 for _ in inner)), (rows, *inner)
            start += rows * row
            continue
        end = min(stop, (index + 1) * row)
        for begins, extents in boxes(inner, skipped, end - index * row):
            yield (index, *begins), (1, *extents)
        start = end


def part(tensor: Tensor, box: Box) -> Tensor:
    """The elements of ``tensor`` in a box."""
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def side_by_side(whole: Tensor, cuts: Sequence[TensorCut]) -> Tensor:
    """A view of a contiguous, evenly cut tensor: first one dimension for each cut, then those of a part."""
    shape: list[int] = []
    cut_at, part_at = {}, []
    for dim, extent in enumerate(whole.shape):
        for i, cut in enumerate(cuts):
            if cut.dim == dim:
                cut_at[i] = len(shape)
                shape.append(cut.size)
                extent //= cut.size
        part_at.append(len(shape))
        shape.append(extent)
    return whole.view(shape).permute([cut_at[i] for i in range(len(cuts))] + part_at)
