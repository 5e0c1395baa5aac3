"""Private torch APIs of DTensors. Imports ``torch.distributed.tensor`` late: that takes a second."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


def dtensor_over(like: Any, local: torch.Tensor, kind: type | None = None) -> Any:
    """A DTensor with the mesh, placements and shape of ``like`` and another local tensor, on whatever device.

    ``DTensor.from_local`` would move it to the mesh's device.

    Needed by torch 2.11 to 2.14: ``DTensor.__new__`` and ``DTensor._spec``.
    """
    from torch.distributed.tensor import DTensor

    found = DTensor(local, like._spec, requires_grad=False)  # type: ignore[call-arg]
    if kind is not None:
        found.__class__ = kind
    return found


def local_of(dtensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor itself: ``to_local`` makes another object.

    Needed by torch 2.11 to 2.14: ``DTensor._local_tensor``.
    """
    return dtensor._local_tensor


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Without importing ``torch.distributed.tensor``, which takes a second.

    Needed by torch 2.11 to 2.14.
    """
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def is_made_like_dtensor(kind: type) -> bool:
    """Whether tensors of a class have the inner tensors of DTensors and nothing else.

    Needed by torch 2.11 to 2.14.
    """
    dtensor: Any = _dtensor()
    return dtensor is not None and getattr(kind, "__tensor_flatten__", None) is dtensor.__tensor_flatten__


def _dtensor() -> type | None:
    # Another thread may be importing it just now.
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def mesh_and_placements(tensor: Any) -> tuple[Any, Any]:
    """Of a DTensor, with less host time than by its properties.

    Needed by torch 2.11 to 2.14: ``DTensor._spec``.
    """
    spec = tensor._spec
    return spec.mesh, spec.placements


def mesh_dims_in_order_of_cuts(placements: Sequence[Any], mesh_shape: Sequence[int]) -> list[int] | None:
    """The mesh dimensions that cut a DTensor, first cut first; None for an order that is no sequence of plain cuts.

    Stands for ``_StridedShard``: FSDP2 on top of tensor parallelism cuts along a mesh dimension to the left after those
    to the right. Its ``split_factor`` is the number of parts that were there before.

    Needed by torch 2.11 to 2.14.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    order: list[int] = []
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if not isinstance(getattr(placement, "dim", None), int):
            continue
        after, parts = 0, 1
        wanted = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        while parts < wanted and after < len(order):
            if placements[order[after]].dim == placement.dim:
                parts *= mesh_shape[order[after]]
            after += 1
        if parts != wanted:
            return None
        order.insert(after, mesh_dim)
    return order
