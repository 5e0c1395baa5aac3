"""What is on the device when a step begins to be watched, and is the step's all the same."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fxoffload._torch_compat import StorageRef, is_traceable_wrapper_subclass


class Lent:
    """What the first call of a step is given. Of that, what is gone or emptied when the second call begins was there
    for the step alone: the parameters of a layer that FSDP gathers for it, say.

    Args:
        args: of the first call.
    """

    def __init__(self, args: Iterable[Any]) -> None:
        tensors = [a for a in args if isinstance(a, Tensor) and a.layout is torch.strided]
        plain: dict[int, Tensor] = {}
        for a in tensors:
            if not is_traceable_wrapper_subclass(a):
                plain.setdefault(a.untyped_storage()._cdata, a)
        self._given = [(StorageRef(a), weakref.ref(a), a.untyped_storage().nbytes()) for a in plain.values()]

    def left_bytes(self) -> int:
        """Bytes of what is gone or empty by now."""
        found = 0
        for ref, tensor, nbytes in self._given:
            alive = tensor()
            if ref.is_expired() or (alive is not None and not alive.untyped_storage().nbytes()):
                found += nbytes
        return found
