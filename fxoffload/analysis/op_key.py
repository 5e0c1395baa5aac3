"""A key for calls of an operator that take the same time: text that is the same in every process."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fxoffload.analysis.op_costs import call_of, kwargs_of, shape_of
from fxoffload.torch_private.symbolic_sizes import hint


def op_key(node: fx.Node) -> str | None:
    """Operator, shapes, strides and dtypes of its tensors, its other arguments, and torch's settings that choose its
    kernel; None where a size has no hint, or an argument is no plain value.

    An operator inside a wrapper that saves or sets the random state has the key that it has without.
    """
    target, args = call_of(node)
    kwargs = sorted(kwargs_of(node).items())
    try:
        text = f"{target}({', '.join((*map(_text, args), *(f'{k}={_text(v)}' for k, v in kwargs)))})"
    except _NoTextError:
        return None
    if torch.float32 in {t.dtype for n in node.all_input_nodes if isinstance(t := n.meta.get("val"), torch.Tensor)}:
        text += f" {torch.backends.cuda.matmul.fp32_precision}"
    return text + " deterministic" * torch.are_deterministic_algorithms_enabled()


class _NoTextError(Exception):
    """An argument that is no plain value."""


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return _value_text(value.meta.get("val"))
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if value is None or isinstance(value, (bool, int, float, str, slice)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    return _value_text(value)


def _value_text(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        shape, strides = shape_of(value), [hint(s) for s in value.stride()]
        if shape is None or None in strides:
            raise _NoTextError
        layout = f"{'x'.join(map(str, shape)) or 'scalar'}:{','.join(map(str, strides))}"
        return f"{str(value.dtype).removeprefix('torch.')} {layout} {value.device.type}"
    if value is None:  # a result that an operator does not have
        return "None"
    if isinstance(value, (int, torch.SymInt)) and (size := hint(value)) is not None:
        return str(size)
    raise _NoTextError
