"""Private torch APIs of process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
    """Starts to gather ``part`` of every rank into ``whole``; returns a handle to wait for.

    ``all_gather_single`` is torch 2.13's name for ``all_gather_into_tensor``, which it deprecates.

    Needed by torch 2.11 (``all_gather_into_tensor``); torch 2.13 and newer have the other one.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=True)


def first_of_ranks(key: str, value: str) -> str | None:
    """The value of the rank that asked first for ``key``, by the store of the default process group. No collective: no
    rank waits for another. None: the store cannot do that.

    Needed by torch 2.11 to 2.14: ``distributed_c10d._get_default_store``.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.compare_set(key, "", value).decode()
    except (RuntimeError, ValueError, NotImplementedError, AttributeError):
        return None
