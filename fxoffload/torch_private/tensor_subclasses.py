"""Private torch APIs of tensor subclasses and dispatch modes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

# Within them a subclass is a plain tensor, for its class alone or for function modes too. Needed by torch 2.11 to 2.14.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
DisableTorchFunction = torch._C.DisableTorchFunction


def has_dispatch(tensor: torch.Tensor) -> bool:
    """Whether the class of a tensor has a ``__torch_dispatch__``.

    Needed by torch 2.11 to 2.14: ``torch._C._disabled_torch_dispatch_impl``.
    """
    disabled: Any = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
    return getattr(type(tensor), "__torch_dispatch__", disabled) is not disabled


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a tracer's: fake or functional. Does not ask for its ``__class__``: proxies may raise.

    Needed by torch 2.11 to 2.14: ``FakeTensor`` and ``FunctionalTensor``.
    """
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    functional = sys.modules.get("torch._subclasses.functional_tensor")
    return (fakes is not None and issubclass(type(tensor), fakes.FakeTensor)) or (
        functional is not None and issubclass(type(tensor), functional.FunctionalTensor)
    )
