"""Strides of saved values that came back through saved-tensor hooks.

A hook hands back equal numbers, not equal strides: ``save_on_cpu(pin_memory=True)`` returns every tensor contiguous.
Compiled code is written for the strides that it saved (Inductor asserts them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from fxoffload.torch_private.symbolic_sizes import hint, product, quotient


@dataclass
class HookWatch:
    """Whether a forward of a graph ever ran under saved-tensor hooks; only then its backward looks at strides."""

    seen: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """How compiled code expects a value to lie in memory, for every size that it may have.

    Attributes:
        order: dimensions from the innermost to the outermost; those that are expanded (stride 0) are left out.
        gaps: per dimension of ``order``, its stride over what a dense one would have (3 for a third of a fused
            projection).
        pitches: per dimension of ``order``, its stride itself where that is no multiple of a dense one (the rows of a
            product that Inductor pads), else 0. Empty: 0 for all.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    dim: int
    pitches: tuple[int, ...] = ()

    @classmethod
    def of(cls, shape: Sequence[Any], strides: Sequence[Any]) -> Layout | None:
        """``shape``, ``strides``: ints or SymInts.

        None for an empty value, and where a size has no hint. Also for a slice of a dynamic dimension, and windows that
        overlap.
        """
        hints = [hint(s) for s in strides]
        if None in hints or any(isinstance(n, int) and n == 0 for n in shape):
            return None
        order = sorted((i for i, s in enumerate(hints) if s), key=lambda i: (hints[i], -i))  # type: ignore[operator]
        gaps: list[int] = []
        pitches: list[int] = []
        step: Any = product(1, 1)
        for i in order:
            if isinstance(shape[i], int) and shape[i] == 1:
                gaps.append(1)
                pitches.append(0)
                continue
            gap, stride = quotient(strides[i], step), strides[i]
            if gap is None and not (isinstance(stride, int) and step.is_Integer and stride > step):
                return None
            gaps.append(gap or 1)
            pitches.append(0 if gap else stride)
            step = product(stride, shape[i])
        return cls(tuple(order), tuple(gaps), len(shape), tuple(pitches) if any(pitches) else ())

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Strides of a value of this shape, in elements."""
        strides, step = [0] * self.dim, 1
        pitches = self.pitches or (0,) * len(self.order)
        for i, gap, pitch in zip(self.order, self.gaps, pitches, strict=True):
            strides[i] = pitch or step * gap
            step = strides[i] * max(int(shape[i]), 1)
        return tuple(strides)

    def restore(self, value: Tensor) -> Tensor:
        """``value``, or a copy of it in this layout."""
        if value.dim() != self.dim:
            return value
        strides = self.strides(value.shape)
        if all(n == 1 or a == b for n, a, b in zip(value.shape, value.stride(), strides, strict=True)):
            return value
        # Expanded dimensions hold one element; the copy is made of that, and expanded again.
        single = value[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)] if 0 in strides else value
        copy = torch.empty_strided(single.shape, strides, dtype=value.dtype, device=value.device).copy_(single)
        return copy.as_strided(value.shape, strides)


def layout_of(node: fx.Node) -> Layout | None:
    """The layout of a placeholder's value; None where it is no strided tensor or ``Layout.of`` knows none."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return Layout.of(value.shape, value.stride())
