"""Decide: every tensor of the output, and which bytes of the source it is made of. Nothing is read or written.

Most of a conversion is bytes moved as they are: an expert's matrix is a row of bytes in all layouts but the transposed
forms of the fused one, whose elements change places.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fxoffload.checkpoints.errors import BrokenCheckpointError, LayoutError, UnsupportedCheckpointError
from fxoffload.checkpoints.expert_keys import Stored, merged_name, single_name
from fxoffload.checkpoints.families import PROJECTIONS, Form, Projection
from fxoffload.checkpoints.header import DTYPE_BITS, StoredTensor, num_bytes_of
from fxoffload.checkpoints.layouts import Block, Experts, Layout
from fxoffload.checkpoints.slices import Slice, expert_shape, holder, part_shape, slice_of, stored_projections


@dataclass(frozen=True)
class Copy:
    """``num_bytes`` from ``offset`` of the file at ``path`` to ``target`` bytes into the output tensor."""

    path: Path
    offset: int
    num_bytes: int
    target: int


@dataclass(frozen=True)
class Piece:
    """One expert's matrix: read ``num_bytes`` at ``offset`` of ``path``; ``taken`` lies there, and goes to ``put``."""

    path: Path
    offset: int
    num_bytes: int
    taken: Slice
    put: Slice


@dataclass(frozen=True)
class Reorder:
    """``num_bytes`` at ``target`` of the output tensor, filled by pieces whose elements change places."""

    pieces: tuple[Piece, ...]
    itemsize: int
    num_bytes: int
    target: int

    @property
    def buffer_bytes(self) -> int:
        """What it needs in RAM: its output and its largest input."""
        return self.num_bytes + max(piece.num_bytes for piece in self.pieces)


Step = Copy | Reorder


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write, with the steps that fill it without gaps."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def num_bytes(self) -> int:
        return num_bytes_of(self.dtype, self.shape)


def choose_form(experts: Experts, layout: Layout, form: Form | None) -> Form | None:
    """The fused form to write, by default the family's first; None for other layouts.

    Raises LayoutError for a form that the family does not have, and when there is nothing to do.
    """
    forms = experts.family.forms
    if form is not None and (layout != "fused" or form not in forms):
        raise LayoutError(
            f"expected a form of {experts.family.name}'s fused layout ({', '.join(forms)}), found {form!r} for {layout}"
        )
    if layout == "fused":
        form = form or forms[0]
    if (layout, form) == (experts.layout, experts.form):
        text = f" ({form})" if form and len(forms) > 1 else ""
        raise LayoutError(
            f"{experts.checkpoint.folder} is in the layout {layout}{text} already; there is nothing to do: ask "
            "for another layout, or copy the folder"
        )
    return form


def plan_conversion(experts: Experts, layout: Layout, form: Form | None) -> list[OutputTensor]:
    """The output's tensors in the order in which the source stores what they are made of.

    ``form`` is what ``choose_form`` says.
    """
    outputs = [
        OutputTensor(t.name, t.dtype, t.shape, (Copy(t.path, t.offset, t.num_bytes, 0),))
        for t in experts.others.values()
    ]
    for block in experts.blocks.values():
        outputs += _plan_block(experts, block, layout, form)
    _check_names(outputs)
    shards = {path: number for number, path in enumerate(experts.checkpoint.shards)}

    def place(output: OutputTensor) -> tuple[int, int]:
        step = output.steps[0]
        first = step if isinstance(step, Copy) else step.pieces[0]
        return shards[first.path], first.offset

    return sorted(outputs, key=place)


def _plan_block(experts: Experts, block: Block, layout: Layout, form: Form | None) -> list[OutputTensor]:
    outputs = []
    for parameter in sorted({parameter for _, parameter in block.tensors}):
        for stored in stored_projections(layout):
            if layout == "experts":
                for expert in range(block.num_experts):
                    name = single_name(
                        experts.family, block.single_module(experts.family), expert, _plain(stored), parameter
                    )
                    outputs.append(_plan_tensor(experts, block, name, stored, parameter, form, [expert], stack=False))
            else:
                name = merged_name(block.name, stored, parameter)
                numbers = list(range(block.num_experts))
                outputs.append(_plan_tensor(experts, block, name, stored, parameter, form, numbers, stack=True))
    return outputs


def _plan_tensor(
    experts: Experts,
    block: Block,
    name: str,
    stored: Stored,
    parameter: str,
    form: Form | None,
    numbers: list[int],
    *,
    stack: bool,
) -> OutputTensor:
    """One tensor that holds ``stored`` of the experts ``numbers``."""
    projections: list[Projection] = [p for p in PROJECTIONS if holder("fused", p) == stored or p == stored]
    shape = expert_shape(experts, block, projections[0], parameter)
    if shape is None:
        raise AssertionError(f"{name}: check_experts found {parameter} for every projection")
    dtype = _common_dtype(experts, block, projections, parameter)
    part = part_shape(shape, stored, form)
    part_bytes = num_bytes_of(dtype, part)
    steps: list[Step] = []
    for position, expert in enumerate(numbers):
        target = position * part_bytes
        pieces = [_piece(experts, block, expert, p, parameter, shape, form) for p in projections]
        # What is empty is a copy of nothing in every form: a step with no bytes to put in order has no size to plan by.
        if not part_bytes or all(piece.taken.contiguous and piece.put.contiguous for piece in pieces):
            steps += [_copy(piece, shape, dtype, target) for piece in pieces]
        else:
            steps.append(Reorder(tuple(pieces), DTYPE_BITS[dtype] // 8, part_bytes, target))
    return OutputTensor(name, dtype, (len(numbers), *part) if stack else part, tuple(steps))


def _piece(
    experts: Experts,
    block: Block,
    expert: int,
    projection: Projection,
    parameter: str,
    shape: tuple[int, ...],
    form: Form | None,
) -> Piece:
    """Where one projection of one expert is in the source, and where it goes in the expert's part of the output."""
    tensor, start, num_bytes = source_part(experts, block, expert, holder(experts.layout, projection), parameter)
    taken = slice_of(shape, projection, experts.form)
    put = slice_of(shape, projection, form)
    return Piece(tensor.path, tensor.offset + start, num_bytes, taken, put)


def source_part(
    experts: Experts, block: Block, expert: int, stored: Stored, parameter: str
) -> tuple[StoredTensor, int, int]:
    """The tensor that holds this, and the expert's part of it: start and length in bytes."""
    tensors = block.tensors[stored, parameter]
    if experts.layout == "experts":
        tensor = tensors[expert]
        return tensor, 0, tensor.num_bytes
    tensor = tensors[None]
    part_bytes = tensor.num_bytes // tensor.shape[0]
    return tensor, expert * part_bytes, part_bytes


def _copy(piece: Piece, shape: tuple[int, ...], dtype: str, target: int) -> Copy:
    itemsize = DTYPE_BITS[dtype] // 8
    offset = piece.offset + piece.taken.offset * itemsize
    return Copy(piece.path, offset, num_bytes_of(dtype, shape), target + piece.put.offset * itemsize)


def _common_dtype(experts: Experts, block: Block, projections: list[Projection], parameter: str) -> str:
    tensors = {p: next(iter(block.tensors[holder(experts.layout, p), parameter].values())) for p in projections}
    dtypes = {p: tensor.dtype for p, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{dtype} in {tensors[p].name}" for p, dtype in dtypes.items())
        raise BrokenCheckpointError(f"{block.name}: expected gate and up of one dtype to fuse them, found {listed}")
    dtype = next(iter(dtypes.values()))
    if DTYPE_BITS[dtype] % 8:
        raise UnsupportedCheckpointError(
            f"{block.name}: {dtype} is packed below 8 bits; convert the unpacked checkpoint"
        )
    return dtype


def _check_names(outputs: list[OutputTensor]) -> None:
    seen: set[str] = set()
    for output in outputs:
        if output.name in seen:
            raise LayoutError(
                f"the output would hold {output.name} twice; the source holds a tensor of that name already"
            )
        seen.add(output.name)


def _plain(stored: Stored) -> Projection:
    if stored == "gate_up":
        raise AssertionError("expected one tensor per projection in the layout of one tensor per expert")
    return stored
