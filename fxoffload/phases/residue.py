"""Tensors that are still on a device after an offload, and the objects that hold them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from fxoffload.environment import check_device_types
from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.phases.referrers import describe_referrers
from fxoffload.runtime.switches import without_grad
from fxoffload.sizes import format_bytes, parse_bytes
from fxoffload.torch_private.pytree import tree_leaves
from fxoffload.torch_private.storages import storage_key
from fxoffload.torch_private.tensor_subclasses import is_fake, is_traceable_wrapper_subclass


@dataclass(frozen=True)
class Residue:
    """Memory of one storage.

    Attributes:
        nbytes: of the storage.
        kind: class of the first tensor on it.
        shape: of that tensor.
        dtype: of that tensor.
        device: where it is.
        tensors: how many tensors share it.
        held_by: the objects that refer to them, in words; empty where only C++ does (an autograd graph).
    """

    nbytes: int
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensors: int
    held_by: tuple[str, ...]


class Residues(list[Residue]):
    """Largest first; printed as a table.

    Attributes:
        unseen_bytes: that the caching allocator gave out and no tensor in Python accounts for: autograd graphs,
            workspaces, tensors smaller than asked for. Zero without CUDA.
        num_frozen: objects that ``gc.freeze()`` has hidden (serving engines call it). They are neither listed nor named
            as holders.
    """

    unseen_bytes: int = 0
    num_frozen: int = 0

    @property
    def nbytes(self) -> int:
        """Of all together."""
        return sum(one.nbytes for one in self)

    def __str__(self) -> str:
        rows = [
            [
                format_bytes(one.nbytes),
                one.kind,
                "x".join(map(str, one.shape)) or "scalar",
                str(one.dtype).removeprefix("torch."),
                str(one.device),
                "\n".join(one.held_by) or "nothing in Python (an autograd graph, or C++)",
            ]
            for one in self
        ]
        lines = [f"{format_bytes(self.nbytes)} in {len(self)} storage{'' if len(self) == 1 else 's'}"]
        if self.unseen_bytes:
            lines.append(f"{format_bytes(self.unseen_bytes)} allocated beside them, by what is not listed")
        if self.num_frozen:
            lines.append(f"not looked at: {self.num_frozen:,} objects that gc.freeze() hides (gc.unfreeze() helps)")
        if rows:
            lines.append(tabulate(rows, headers=["size", "type", "shape", "dtype", "device", "held by"]))
        return "\n".join(lines)


@without_grad
def residue(
    device: torch.device | str | int | None = None,
    *,
    min_bytes: int | str = "1MiB",
    ignore: Iterable[Any] = (),
    device_types: Sequence[str] = ("cuda",),
) -> Residues:
    """The tensors that are alive on a device after an offload, and the objects that refer to them.

    It collects garbage first, and keeps no reference to the tensors that it found.

    Args:
        device: only this one; by default every device of ``device_types``.
        min_bytes: smaller storages are left out.
        ignore: tensors, modules, or trees of tensors that are known and left out.
        device_types: ("cpu",) for a rehearsal.

    Raises:
        ValueError: ``min_bytes`` is no size, or ``device_types`` has an unknown one.
    """
    device_types = check_device_types(device_types)
    least = parse_bytes(min_bytes, "min_bytes", allow_zero=True)
    one = None if device is None else torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    gc.collect()
    found = Residues()
    with untouched():
        known = {storage_key(plain) for tensor in _known(ignore) for plain in plain_tensors(tensor)}
        storages: dict[int, list[Tensor]] = {}
        alive = _alive()
        for tensor in alive:
            key = _storage_key(tensor)
            if key is not None and key not in known and _is_wanted(tensor, one, device_types, least):
                storages.setdefault(key, []).append(tensor)
        tensors = [tensor for some in storages.values() for tensor in some]
        texts = describe_referrers(tensors, [alive, tensors, storages, *storages.values()])
        grads = _grad_owners(alive, tensors)
        for some in storages.values():
            held_by = [t for tensor in some for t in (*texts[id(tensor)], *grads.get(id(tensor), ()))]
            found.append(_residue(some, held_by))
    found.sort(key=lambda entry: -entry.nbytes)
    found.unseen_bytes = _unseen_bytes(one, device_types, found.nbytes)
    found.num_frozen = gc.get_freeze_count()
    return found


def _alive() -> list[Tensor]:
    """Every tensor that Python knows, and their gradients, which it may not know."""
    # type(), not isinstance(): that asks proxies for their __class__, and they may raise.
    tensors = {id(t): t for t in gc.get_objects() if issubclass(type(t), Tensor) and not is_fake(t)}
    for tensor in list(tensors.values()):
        if tensor.is_leaf and tensor.grad is not None:
            tensors.setdefault(id(tensor.grad), tensor.grad)
    return list(tensors.values())


def _storage_key(tensor: Tensor) -> int | None:
    """None for tensors without memory of their own: wrappers (their inner tensors are listed), sparse and away ones."""
    try:
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            return None
        return storage_key(tensor) if tensor.untyped_storage().nbytes() else None
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def _is_wanted(tensor: Tensor, device: torch.device | None, types: Sequence[str], least: int) -> bool:
    if device is None:
        fits = tensor.device.type in types
    else:
        fits = tensor.device.type == device.type and device.index in (None, tensor.device.index)
    return fits and tensor.untyped_storage().nbytes() >= least


def _known(ignore: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for thing in ignore:
        if isinstance(thing, nn.Module):
            found += [*thing.parameters(), *thing.buffers()]
        else:
            found += [leaf for leaf in tree_leaves(thing) if isinstance(leaf, Tensor)]
    return found


def _grad_owners(alive: list[Tensor], tensors: list[Tensor]) -> dict[int, list[str]]:
    """A gradient is held by its tensor, in C++."""
    wanted = {id(tensor) for tensor in tensors}
    found: dict[int, list[str]] = {}
    for owner in alive:
        if owner.is_leaf and owner.grad is not None and id(owner.grad) in wanted:
            shape = "x".join(map(str, owner.shape))
            found.setdefault(id(owner.grad), []).append(f"grad of a {type(owner).__name__} ({shape})")
    return found


def _residue(tensors: list[Tensor], held_by: list[str]) -> Residue:
    first = tensors[0]
    return Residue(
        nbytes=first.untyped_storage().nbytes(),
        kind=type(first).__name__,
        shape=tuple(first.shape),
        dtype=first.dtype,
        device=first.device,
        tensors=len(tensors),
        held_by=tuple(dict.fromkeys(held_by)),
    )


def _unseen_bytes(device: torch.device | None, types: Sequence[str], seen: int) -> int:
    if device is not None:
        devices = [device] if device.type == "cuda" else []
    else:
        devices = list(range(torch.cuda.device_count())) if "cuda" in types and torch.cuda.is_initialized() else []
    return max(sum(torch.cuda.memory_allocated(one) for one in devices) - seen, 0) if devices else 0
