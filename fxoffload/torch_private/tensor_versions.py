"""Private torch APIs of the counters of in-place writes."""

from __future__ import annotations

from typing import Any

import torch


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the memory of ``tensor`` was written to in place, views included; None for an inference tensor.

    Stands for ``Tensor._version``.

    Needed by torch 2.11 to 2.14.
    """
    return None if tensor.is_inference() else tensor._version


_set_version_counters: Any = torch._C._autograd._unsafe_set_version_counter  # type: ignore[attr-defined]


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Lets autograd believe that a tensor was written to ``version`` times.

    It is no inference tensor: those count nothing.

    One by one: several tensors, in different storages too, may have one counter (``detach()``, then ``.data = ``).

    Needed by torch 2.11 to 2.14: ``torch._C._autograd._unsafe_set_version_counter``.
    """
    _set_version_counters((tensor,), (version,))


def write_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory whose ``_version`` grows when this one, or a view of it, is written to.

    Needed by torch 2.11 to 2.14: ``Tensor._version``.
    """
    found = tensor.detach()
    found.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found
