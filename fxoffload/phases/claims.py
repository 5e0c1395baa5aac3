"""Which tensors have a manager: two would move one tensor behind each other's back."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Collection

from fxoffload import _torch_private as private
from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.inventory import Inventory
from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.phases.phase import BUFFERS, EXTRA, OPTIMIZER, PARAMS
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock

_LOCK = ForkSafeRLock()
_CLAIMS: weakref.WeakKeyDictionary[Inventory, frozenset[str]] = weakref.WeakKeyDictionary()


def claim(inventory: Inventory, device_types: frozenset[str]) -> None:
    """These are an inventory's from now on, until it is given up or gone. Claiming twice is once.

    Raises:
        RuntimeError: some of them have another manager.
    """
    with _LOCK:
        if inventory in _CLAIMS:
            return
        shared = _shared(inventory, device_types)
        if shared:
            gc.collect()  # managers and what guards their models refer to each other
            shared = _shared(inventory, device_types)
        if shared:
            more = f" and {len(shared) - 1} others" if len(shared) > 1 else ""
            raise RuntimeError(
                f"expected tensors and optimizers that no other PhaseManager has, found {shared[0]}{more} in one: use "
                "that manager, or close() it first. What shares weights or an optimizer goes into one manager: "
                'PhaseManager({"actor": actor, "critic": critic}, [optimizer, ...])'
            )
        _CLAIMS[inventory] = device_types


def give_up(inventory: Inventory) -> None:
    """Others may have them."""
    with _LOCK:
        _CLAIMS.pop(inventory, None)


def _shared(inventory: Inventory, device_types: frozenset[str]) -> list[str]:
    """Names of what others have as well."""
    others = {key for other, types in list(_CLAIMS.items()) for key in _named(other, types)}
    return [name for key, name in _named(inventory, device_types).items() if key in others] if others else []


def _named(inventory: Inventory, device_types: Collection[str]) -> dict[tuple[str, int], str]:
    """Everything that a manager moves, and its optimizers, which may have no state yet."""
    found = {("optimizer", id(one)): f"the optimizer {type(one).__name__}" for one in inventory.optimizers}
    walk = inventory.walk()
    for group in (PARAMS, BUFFERS, OPTIMIZER, EXTRA):
        named = walk.collect(group)
        with untouched():
            for name, tensor in named:
                for plain in plain_tensors(tensor):
                    if plain.device.type in device_types:
                        found.setdefault(("storage", private.storage_key(plain)), f"{name} ({group})")
    return found


# A child has no part of its parent's managers.
os.register_at_fork(after_in_child=_CLAIMS.clear)
