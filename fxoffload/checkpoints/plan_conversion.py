"""Decide: every tensor of the output, and which bytes of the source it is made of. Nothing is read or written.

Most of a conversion is bytes moved as they are. An expert's matrix is a row of bytes in all layouts but the transposed
forms of the fused one, whose elements change places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fxoffload.checkpoints.errors import BrokenCheckpointError, LayoutError, UnsupportedCheckpointError
from fxoffload.checkpoints.expert_keys import Stored, merged_name
from fxoffload.checkpoints.families import PROJECTIONS, Form, Projection
from fxoffload.checkpoints.header import DTYPE_BITS, StoredTensor, num_bytes_of
from fxoffload.checkpoints.layouts import Experts, Layout, LayoutBlock
from fxoffload.checkpoints.slices import STORED, Slice, expert_shape, holder, part_shape, slice_of


@dataclass(frozen=True)
class Copy:
    """``num_bytes`` from ``offset`` of the file at ``path`` to ``target`` bytes into the output tensor."""

    path: Path
    offset: int
    num_bytes: int
    target: int


@dataclass(frozen=True)
class ConversionPiece:
    """One expert's matrix: read ``num_bytes`` at ``offset`` of ``path``; ``taken`` lies there, and goes to ``put``."""

    path: Path
    offset: int
    num_bytes: int
    taken: Slice
    put: Slice


@dataclass(frozen=True)
class Reorder:
    """``num_bytes`` at ``target`` of the output tensor, filled by pieces whose elements change places."""

    pieces: tuple[ConversionPiece, ...]
    itemsize: int
    num_bytes: int
    target: int

    @property
    def buffer_bytes(self) -> int:
        """The RAM that it needs: for its output and its largest input."""
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

    @property
    def begins(self) -> Copy | ConversionPiece:
        """Its first bytes in the source: ``path`` and ``offset``."""
        step = self.steps[0]
        return step if isinstance(step, Copy) else step.pieces[0]


class Target(NamedTuple):
    """What a block's experts become. ``form`` is set for the fused layout."""

    layout: Layout
    form: Form | None


# By the block's name.
Targets = Mapping[str, Target]


def choose_targets(experts: Experts, to: Layout, form: Form | None, towers: Mapping[str, Layout]) -> Targets:
    """``to`` for every tower but those that begin as ``towers`` say; of several beginnings the longest counts.

    The fused form is ``form``, by default the family's first. Raises LayoutError for a form that the family does not
    have, for a tower that the checkpoint does not have, and when there is nothing to do.
    """
    forms = experts.family.forms
    layouts = {to, *towers.values()}
    if form is not None and ("fused" not in layouts or form not in forms):
        raise LayoutError(
            f"expected a form of {experts.family.name}'s fused layout ({', '.join(forms)}), found {form!r} for "
            f"{', '.join(sorted(layouts))}; leave it out, or name one of these with fused"
        )
    _check_towers(experts, towers)
    targets = {}
    for name, block in experts.blocks.items():
        beginning = max((start for start in towers if block.group.startswith(start)), key=len, default=None)
        layout = to if beginning is None else towers[beginning]
        targets[name] = Target(layout, form or forms[0] if layout == "fused" else None)
    if all(targets[name] == (block.layout, block.form) for name, block in experts.blocks.items()):
        text = f" ({experts.form})" if experts.form and len(forms) > 1 else ""
        raise LayoutError(
            f"{experts.checkpoint.folder}: is in the layout {experts.layout}{text} already; there is nothing to do: "
            "ask for another layout, or copy the folder"
        )
    return targets


def _check_towers(experts: Experts, beginnings: Iterable[str]) -> None:
    groups = sorted({block.group for block in experts.blocks.values()})
    for beginning in beginnings:
        if not any(group.startswith(beginning) for group in groups):
            raise LayoutError(
                f"expected a tower of {', '.join(groups)}, or how some begin, found {beginning!r}; name one of these"
            )


def plan_conversion(experts: Experts, targets: Targets) -> list[OutputTensor]:
    """The output's tensors in the order in which the source stores their parts.

    ``targets`` is the result of ``choose_targets``.
    """
    outputs = [
        OutputTensor(t.name, t.dtype, t.shape, (Copy(t.path, t.offset, t.num_bytes, 0),))
        for t in experts.others.values()
    ]
    for block in experts.blocks.values():
        outputs += _plan_block(experts, block, *targets[block.name])
    _check_names(outputs)
    files = {path: number for number, path in enumerate(experts.checkpoint.files)}
    return sorted(outputs, key=lambda output: (files[output.begins.path], output.begins.offset))


def _plan_block(experts: Experts, block: LayoutBlock, layout: Layout, form: Form | None) -> list[OutputTensor]:
    outputs = []
    numbers = list(range(block.num_experts))
    for parameter in sorted({parameter for _, parameter in block.tensors}):
        if layout == "experts":
            for projection, expert in itertools.product(PROJECTIONS, numbers):
                name = block.single_name(experts.family, expert, projection, parameter)
                outputs.append(_plan_tensor(block, name, projection, parameter, form, [expert], stack=False))
        else:
            for stored in STORED[layout]:
                name = merged_name(block.name, stored, parameter)
                outputs.append(_plan_tensor(block, name, stored, parameter, form, numbers, stack=True))
    return outputs


def _plan_tensor(
    block: LayoutBlock, name: str, stored: Stored, parameter: str, form: Form | None, numbers: list[int], *, stack: bool
) -> OutputTensor:
    """One tensor that holds ``stored`` of the experts ``numbers``."""
    projections: list[Projection] = [p for p in PROJECTIONS if holder("fused", p) == stored or p == stored]
    shape = expert_shape(block, projections[0], parameter)
    if shape is None:
        raise AssertionError(f"{name}: check_experts found {parameter} for every projection")
    dtype = _common_dtype(block, projections, parameter)
    part = part_shape(shape, stored, form)
    part_bytes = num_bytes_of(dtype, part)
    steps: list[Step] = []
    for position, expert in enumerate(numbers):
        target = position * part_bytes
        pieces = [_piece(block, expert, p, parameter, shape, form) for p in projections]
        # An empty part is a copy of nothing in every form: a step of no bytes to reorder has no size to plan by.
        if not part_bytes or all(piece.taken.contiguous and piece.put.contiguous for piece in pieces):
            steps += [_copy(piece, shape, dtype, target) for piece in pieces]
        else:
            steps.append(Reorder(tuple(pieces), DTYPE_BITS[dtype] // 8, part_bytes, target))
    return OutputTensor(name, dtype, (len(numbers), *part) if stack else part, tuple(steps))


def _piece(
    block: LayoutBlock, expert: int, projection: Projection, parameter: str, shape: tuple[int, ...], form: Form | None
) -> ConversionPiece:
    """Where one projection of one expert is in the source, and where it goes in the expert's part of the output."""
    tensor, start, num_bytes = source_part(block, expert, holder(block.layout, projection), parameter)
    taken = slice_of(shape, projection, block.form)
    put = slice_of(shape, projection, form)
    return ConversionPiece(tensor.path, tensor.offset + start, num_bytes, taken, put)


def source_part(block: LayoutBlock, expert: int, stored: Stored, parameter: str) -> tuple[StoredTensor, int, int]:
    """The tensor that holds this, and the expert's part of it: start and length in bytes."""
    tensors = block.tensors[stored, parameter]
    if block.layout == "experts":
        tensor = tensors[expert]
        return tensor, 0, tensor.num_bytes
    tensor = tensors[None]
    part_bytes = tensor.num_bytes // tensor.shape[0]
    return tensor, expert * part_bytes, part_bytes


def _copy(piece: ConversionPiece, shape: tuple[int, ...], dtype: str, target: int) -> Copy:
    itemsize = DTYPE_BITS[dtype] // 8
    offset = piece.offset + piece.taken.offset * itemsize
    return Copy(piece.path, offset, num_bytes_of(dtype, shape), target + piece.put.offset * itemsize)


def _common_dtype(block: LayoutBlock, projections: list[Projection], parameter: str) -> str:
    tensors = {p: next(iter(block.tensors[holder(block.layout, p), parameter].values())) for p in projections}
    dtypes = {p: tensor.dtype for p, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{dtype} in {tensors[p].name}" for p, dtype in dtypes.items())
        raise BrokenCheckpointError(
            f"{block.name}: expected gate and up of one dtype to fuse them, found {listed}; stack them"
        )
    dtype = next(iter(dtypes.values()))
    if DTYPE_BITS[dtype] % 8:
        raise UnsupportedCheckpointError(
            f"{block.name}: expected 8 bits or more, found {dtype}, which is packed; convert the checkpoint before "
            "quantization"
        )
    return dtype


def _check_names(outputs: list[OutputTensor]) -> None:
    seen: set[str] = set()
    for output in outputs:
        if output.name in seen:
            raise LayoutError(
                f"the output would hold {output.name} twice, as the source has a tensor of that name beside those that "
                "it is made of; remove the one that is wrong"
            )
        seen.add(output.name)
