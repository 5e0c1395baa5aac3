"""Private torch APIs of fake tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

from fxoffload.torch_private.dynamo_errors import is_verbose
from fxoffload.torch_private.symbolic_sizes import form_of


@contextlib.contextmanager
def _fakes_without_guards(fake: Any) -> Iterator[None]:
    """The mode of a fake tensor; computing in it guards nothing.

    Stands for ``FakeTensor.fake_mode`` and ``ShapeEnv.suppress_guards``.
    """
    mode = fake.fake_mode
    env = mode.shape_env
    with mode, torch.no_grad(), env.suppress_guards() if env is not None else contextlib.nullcontext():
        yield


def new_fake_like(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same layout, over memory of its own.

    Needed by torch 2.11 to 2.14.
    """
    with _fakes_without_guards(value) if isinstance(value, FakeTensor) else contextlib.nullcontext():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def fakes_over_new_memory(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake tensors of the same layouts, over new memory that they share as ``values`` share theirs.

    Values that are not strided stay.

    Needed by torch 2.11 to 2.14.
    """
    memory: dict[int, torch.Tensor] = {}
    found = []
    for value in values:
        if value.layout is not torch.strided or not isinstance(value, FakeTensor):
            found.append(value)
            continue
        storage = value.untyped_storage()
        with _fakes_without_guards(value):
            if storage._cdata not in memory:
                memory[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=value.device)
            flat = memory[storage._cdata].view(value.dtype)
            found.append(flat.as_strided(value.shape, value.stride(), value.storage_offset()))
    return found


def with_strides(value: Any, strides: Sequence[Any]) -> Any:
    """A fake tensor with other strides, over the same memory; itself where it has them, or is no fake tensor.

    Needed by torch 2.11 to 2.14: ``ShapeEnv.deserialize_symexpr``.

    Args:
        strides: numbers, sizes, or Inductor's text for them.
    """
    if not isinstance(value, FakeTensor) or len(strides) != value.dim():
        return value
    env = value.fake_mode.shape_env
    size_of = int if env is None else env.deserialize_symexpr
    found: list[Any] = [size_of(s) if isinstance(s, str) else s for s in strides]
    with _fakes_without_guards(value):
        other = value.as_strided(value.shape, found)
    return value if form_of(other) == form_of(value) else other


def run_on_fakes(node: fx.Node) -> Any:
    """The result of the op of ``node`` for the fake values of its arguments.

    Needed by torch 2.11 to 2.14.
    """
    args = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    fake = next((n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], FakeTensor)), None)
    with _fakes_without_guards(fake) if fake is not None else contextlib.nullcontext():
        return node.target(*args[0], **args[1])  # type: ignore[operator]


@contextlib.contextmanager
def without_log_of_fake_tensors() -> Iterator[None]:
    """torch logs the traceback of an op that fails on fake tensors; not within this, unless Dynamo is verbose.

    Needed by torch 2.11 to 2.14: the logger of ``torch._subclasses.fake_tensor``.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, not is_verbose()
    try:
        yield
    finally:
        log.disabled = before
