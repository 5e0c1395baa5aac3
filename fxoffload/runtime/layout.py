"""Strides of saved values that came back through somebody's saved-tensor hooks.

A hook hands back equal numbers, not equal strides: ``save_on_cpu(pin_memory=True)`` returns every tensor contiguous.
Compiled code is written for the strides that it saved (Inductor asserts them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch import Tensor

from fxoffload._torch_compat import hint


@dataclass
class HookWatch:
    """Whether a forward of a graph ever ran under saved-tensor hooks; only then its backward looks at strides."""

    seen: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """How compiled code expects a value to lie in memory, whatever its dynamic sizes.

    Attributes:
        order: dimensions from the innermost to the outermost; those that are expanded (stride 0) are left out.
        gaps: per dimension of ``order``, its stride over what a dense one would have (3 for a third of a fused
            projection).
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    dim: int

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int]) -> Layout | None:
        """None where elements overlap in another way than by expansion."""
        order = sorted((i for i, s in enumerate(strides) if s), key=lambda i: (strides[i], -i))
        gaps, step = [], 1
        for i in order:
            if shape[i] == 1:
                gaps.append(1)
                continue
            if strides[i] % step:
                return None
            gaps.append(strides[i] // step)
            step = strides[i] * shape[i]
        return cls(tuple(order), tuple(gaps), len(shape))

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Strides of a value of this shape, in elements."""
        strides, step = [0] * self.dim, 1
        for i, gap in zip(self.order, self.gaps, strict=True):
            strides[i] = step * gap
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
    """The layout of a placeholder's value; None where it is no strided tensor or a size has no hint."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    shape, strides = [hint(n) for n in value.shape], [hint(s) for s in value.stride()]
    if None in shape or None in strides:
        return None
    return Layout.of(shape, strides)  # type: ignore[arg-type]
