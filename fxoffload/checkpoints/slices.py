"""Where one expert's matrix lies in a stored tensor, as an offset and strides.

Every parameter of an expert is taken as a matrix [R, C] in the layout of one tensor per expert: a vector has one
column, a number is 1 x 1. Units are elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxoffload.checkpoints.errors import BrokenCheckpointError, UnsupportedCheckpointError
from fxoffload.checkpoints.expert_keys import Stored
from fxoffload.checkpoints.families import Form, Projection
from fxoffload.checkpoints.layouts import Layout, LayoutBlock

# The projections that have a tensor of their own in a layout.
STORED: dict[Layout, tuple[Stored, ...]] = {
    "experts": ("gate", "up", "down"),
    "stacked": ("gate", "up", "down"),
    "fused": ("gate_up", "down"),
}


@dataclass(frozen=True)
class Slice:
    """Element (r, c) is at ``offset + r * row_stride + c * column_stride`` from the start of the expert's part."""

    rows: int
    columns: int
    offset: int
    row_stride: int
    column_stride: int

    @property
    def contiguous(self) -> bool:
        columns_follow = self.columns == 1 or self.column_stride == 1
        return columns_follow and (self.rows == 1 or self.row_stride == self.columns)


def holder(layout: Layout, projection: Projection) -> Stored:
    """The stored projection that holds ``projection``."""
    return "gate_up" if layout == "fused" and projection != "down" else projection


def part_shape(shape: tuple[int, ...], stored: Stored, form: Form | None) -> tuple[int, ...]:
    """The shape of one expert's part of a tensor, from the expert's ``shape`` in the layout of one tensor per expert.

    ``stored`` is ``gate_up`` for two of these side by side; ``form`` is None where nothing is fused.
    """
    if form is None:
        return shape
    if stored == "gate_up":
        if not shape:
            raise UnsupportedCheckpointError(
                "expected gate and up with a row at least, found a single number per expert for each, which has no "
                "fused layout; convert to stacked instead"
            )
        shape = (2 * shape[0], *shape[1:])
    return shape[::-1] if form != "concatenated" else shape


def expert_shape(block: LayoutBlock, projection: Projection, parameter: str) -> tuple[int, ...] | None:
    """The shape of one expert's ``parameter`` in the layout of one tensor per expert; None where there is none."""
    stored = holder(block.layout, projection)
    tensors = block.tensors.get((stored, parameter))
    if not tensors:
        return None
    tensor = next(iter(tensors.values()))
    if block.layout == "experts":
        return tensor.shape
    shape = tensor.shape[1:]
    if block.form not in (None, "concatenated"):
        shape = shape[::-1]
    if stored == "gate_up":
        if not shape or shape[0] % 2:
            raise BrokenCheckpointError(
                f"{tensor.name}: expected as many rows for gate as for up, found shape {list(tensor.shape)}; fetch the "
                "shard again"
            )
        shape = (shape[0] // 2, *shape[1:])
    return shape


def slice_of(shape: tuple[int, ...], projection: Projection, form: Form | None) -> Slice:
    """Where ``projection`` of one expert, [R, C] by itself, lies in the expert's part of a stored tensor."""
    if len(shape) > 2 and form not in (None, "concatenated"):
        raise UnsupportedCheckpointError(
            f"expected at most two dimensions of an expert's {projection} to transpose, found {list(shape)}; convert a "
            "checkpoint in the layout experts or stacked, to one of these"
        )
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    second = projection == "up"
    if form is None or (form == "concatenated" and projection == "down"):
        return Slice(rows, columns, 0, columns, 1)
    if form == "concatenated":
        return Slice(rows, columns, second * rows * columns, columns, 1)
    if projection == "down":
        return Slice(rows, columns, 0, 1, rows)
    if form == "transposed":
        return Slice(rows, columns, second * rows, 1, 2 * rows)
    return Slice(rows, columns, int(second), 2, 2 * rows)
