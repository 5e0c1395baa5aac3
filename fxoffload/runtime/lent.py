"""What is on the device when a step begins to be watched, and is the step's all the same."""

from __future__ import annotations

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
        # Not the tensors: what a compiled graph is given may be a view that lives for the call.
        self._given = [(StorageRef(a), a.untyped_storage().nbytes()) for a in plain.values()]

    def left_bytes(self) -> int:
        """Bytes of what is gone or empty by now."""
        return sum(nbytes for ref, nbytes in self._given if not ref.nbytes())
