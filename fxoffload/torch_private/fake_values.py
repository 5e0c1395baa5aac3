"""Private torch APIs of fake tensors: some that know their values.

A model may shape its work by small integers that it is given (the sizes of images, where a text has them). Where such
inputs are real, ``step_fake_mode`` keeps their values, and those of tensors computed from them alone. It stands for
``FakeTensor.constant`` and ``FakeTensorMode.may_turn_const``, which do so for single numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from fxoffload.torch_private.fake_tensors import FakeTensorMode
from fxoffload.torch_private.pytree import tree_leaves, tree_map

aten, prims = torch.ops.aten, torch.ops.prims
# What makes tensors of numbers.
_MAKERS = frozenset({aten.full, aten.zeros, aten.ones, aten.arange, aten.scalar_tensor, prims.iota})
# Token ids of a batch; a mask of sequence x sequence is not kept.
_MOST_VALUES = 1 << 20


def step_fake_mode() -> FakeTensorMode:
    """For the fake tensors of a step, all on the CPU. Real tensors among them (constants of a graph) are taken as fake.

    Assertions on tensors (``torch._check_tensor_all``) hold where the values are not known.

    Needed by torch 2.11 to 2.14.
    """
    # Not a subclass: rules of higher-order operators are for the class itself.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    may_turn_const, dispatch = mode.may_turn_const, mode.dispatch

    def may_keep(t: Tensor) -> bool:
        return may_turn_const(t) or (not mode.is_our_fake(t) and _has_few_values(t))

    def known(value: Any) -> Any:
        found = with_values(mode, value) if isinstance(value, Tensor) else None
        return value if found is None else found

    def dispatch_with_values(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._is_all_true.default and getattr(args[0], "constant", None) is None:
            return known(_really(torch.tensor, True))
        if any(type(leaf) is Tensor for leaf in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(known, (args, kwargs))
        result: Any = dispatch(func, types, args, kwargs)
        if getattr(func, "overloadpacket", None) in _MAKERS and _has_few_values(result):
            return known(_really(func, *args, **{**kwargs, "device": "cpu"}))
        return result

    mode.may_turn_const = may_keep  # type: ignore[method-assign]
    mode.dispatch = dispatch_with_values  # type: ignore[method-assign]
    return mode


def with_values(mode: FakeTensorMode, tensor: Tensor) -> Tensor | None:
    """A fake tensor that knows the values of ``tensor``; None where it has none that may be kept.

    Needed by torch 2.11 to 2.14: ``fake_tensor_converter.from_real_tensor(make_constant=True)``.
    """
    if type(tensor) is not Tensor or not _has_few_values(tensor):
        return None
    with no_dispatch():
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        copied.copy_(tensor)
    return mode.fake_tensor_converter.from_real_tensor(mode, copied, make_constant=True)


def _really(func: Any, *args: Any, **kwargs: Any) -> Any:
    with no_dispatch():
        return func(*args, **kwargs)


def _has_few_values(tensor: Tensor) -> bool:
    is_whole = not tensor.is_floating_point() and not tensor.is_complex()
    return is_whole and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() <= _MOST_VALUES
