"""Results that a fused kernel writes over values that it is the last to read.

See [Note: How a segment's memory is walked] in ``estimate_memory``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import OTHER_PLACES, aten_names, fused_form, numel_of, op_name, source_of, tensors_of
from fxoffload.analysis.segment_kernels import Buffer, Kernel, SegmentKernels
from fxoffload.torch_private.symbolic_sizes import hint


def bytes_in_place(segment: SegmentKernels, kernel: Kernel, freed: Sequence[Buffer]) -> int:
    """Bytes that ``kernel`` writes over values that die with it.

    Each result can take the place of a value that no other step reads, but those that it is made of.
    """
    dead = {b for b in freed if b in kernel.reads and b in segment.size and segment.known(b)}
    if not kernel.fused or not dead:
        return 0
    touched = [_touched(segment, kernel, step) for step in kernel.steps]
    moved = {b for found in touched for b, kept in found.items() if not kept}
    total = 0
    for i, step in enumerate(kernel.steps):
        nbytes = kernel.writes.get((step,), 0)
        form = fused_form(step)
        if not nbytes or form not in ("pointwise", "scatter"):
            continue
        made_of = _made_of(segment, step, kernel)
        into = [segment.buffer_of(step.args[0])] if form == "scatter" else touched[i]  # type: ignore[arg-type]
        for old in into:
            if (
                old in dead
                and (form == "scatter" or old not in moved)
                and all(old not in other or kernel.steps[j] in made_of for j, other in enumerate(touched) if j != i)
            ):
                value = kernel.reads[old][0]
                same = tensors_of(value)[0].dtype == tensors_of(step)[0].dtype and numel_of(value) == numel_of(step)
                if same and segment.size[old] * 0.95 <= nbytes <= segment.size[old]:
                    dead.remove(old)
                    total += nbytes
                    break
    return total


def _made_of(segment: SegmentKernels, step: fx.Node, kernel: Kernel) -> set[fx.Node]:
    """The ops inside the kernel, written or not, that ``step`` is made of."""
    found: set[fx.Node] = set()
    todo = [step]
    while todo:
        for value in todo.pop().all_input_nodes:
            if value in segment.inside and value not in found and segment.buffer_of(value) not in kernel.reads:
                found.add(value)
                todo.append(value)
    return found


def _touched(segment: SegmentKernels, kernel: Kernel, step: fx.Node) -> dict[Buffer, bool]:
    """The values that one step of a kernel reads from memory -> whether each element stands where it is read for."""
    found: dict[Buffer, bool] = {}
    todo = [(step, True)]
    seen = set(todo)
    while todo:
        node, kept = todo.pop()
        buffer = segment.buffer_of(node)
        if node is not step and buffer in kernel.reads:
            found[buffer] = found.get(buffer, True) and kept and _same_order(node, step)
        elif node is step or (node in segment.inside and node not in kernel.steps):
            if fused_form(node) != "reduction":
                kept = kept and _keeps_places(node)
            following = {(value, kept) for value in node.all_input_nodes if tensors_of(value)} - seen
            seen |= following
            todo.extend(following)
    return found


def _keeps_places(node: fx.Node) -> bool:
    """Whether each element of what ``node`` gives stands where the element does of which it was made."""
    name = op_name(node.target)
    if source_of(node) is not None:
        return name in _SAME_PLACES
    return fused_form(node) == "pointwise" and name not in OTHER_PLACES


def _same_order(value: fx.Node, step: fx.Node) -> bool:
    """Whether ``value`` lies in memory in the order in which ``step`` writes (a reduction takes any order)."""
    if fused_form(step) == "reduction":
        return True
    a, b = _layout(tensors_of(value)[0]), _layout(tensors_of(step)[0])
    return a == b or (_is_contiguous(a) and _is_contiguous(b))


_Layout: TypeAlias = list[tuple[int | None, int | None]]


def _layout(tensor: torch.Tensor) -> _Layout:
    """Hinted sizes with their strides, without dimensions of one element."""
    pairs = [(hint(size), hint(stride)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [(size, stride) for size, stride in pairs if size != 1]


def _is_contiguous(layout: _Layout) -> bool:
    expected = 1
    for size, stride in reversed(layout):
        if size is None or stride != expected:
            return False
        expected *= size
    return True


_SAME_PLACES = aten_names("view _unsafe_view reshape unsqueeze squeeze alias detach expand")
