"""Private torch APIs of tensor subclasses and dispatch modes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass


def has_dispatch(tensor: torch.Tensor) -> bool:
    """Whether the class of a tensor has a ``__torch_dispatch__``.

    Needed by torch 2.11 to 2.14: ``torch._C._disabled_torch_dispatch_impl``.
    """
    disabled: Any = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
    return getattr(type(tensor), "__torch_dispatch__", disabled) is not disabled
