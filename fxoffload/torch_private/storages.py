"""Private torch APIs of storages: weak references, keys, counts of references."""

from __future__ import annotations

import functools

import torch
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef


class StorageRef:
    """A tensor's storage, not held.

    Attributes:
        key: tells it from all storages that live as long as this reference.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._weak = StorageWeakRef(tensor.untyped_storage())
        self.key = storage_key(tensor)

    def is_expired(self) -> bool:
        """Whether the storage is gone: it has no reference left."""
        return is_gone(self._weak)

    def nbytes(self) -> int:
        """Its bytes now: none where it is gone, or where it was emptied."""
        storage = storage_behind(self._weak)
        return 0 if storage is None else storage.nbytes()

    def address(self) -> int:
        """Of its memory, now; 0 where it has none."""
        storage = storage_behind(self._weak)
        return 0 if storage is None else storage.data_ptr()

    def is_alive(self, but_for: int) -> bool:
        """Whether more than ``but_for`` tensors hold it."""
        if self.is_expired():
            return False
        # The weak reference keeps the counter, whatever happens to the storage meanwhile.
        return torch._C._storage_Use_Count(self.key) - _wrapper_holds() > but_for  # type: ignore[attr-defined]


@functools.cache
def _wrapper_holds() -> int:
    """How often a storage's Python object, once made, counts among those that hold it: 0 up to torch 2.11, then 1."""
    tensor = torch.empty(1)
    return torch._C._storage_Use_Count(storage_key(tensor)) - 1  # type: ignore[attr-defined]


def storage_key(tensor: torch.Tensor) -> int:
    """Tells a plain tensor's storage from all others that are alive; also while it is empty.

    Needed by torch 2.11 to 2.14: ``UntypedStorage._cdata``.
    """
    return tensor.untyped_storage()._cdata


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose values are the negative ones: the same bytes with the other negative bit.

    Needed by torch 2.11 to 2.14: ``torch.ops.aten._neg_view``.
    """
    return torch.ops.aten._neg_view(tensor)


def storage_behind(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, if it is still alive.

    Needed by torch 2.11 to 2.14: ``UntypedStorage._new_with_weak_ptr``.
    """
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)


def is_gone(weak: StorageWeakRef) -> bool:
    """``weak.expired()``, in a tenth of the time.

    Needed by torch 2.11 to 2.14: ``UntypedStorage._expired``.
    """
    return torch.UntypedStorage._expired(weak.cdata)  # type: ignore[attr-defined]
