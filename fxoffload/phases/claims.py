"""Refuses a second ``PhaseManager`` for the same tensors: each would move them without the other's knowledge."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Collection

from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.inventory import Inventory
from fxoffload.phases.moving.storages import plain_tensors
from fxoffload.phases.phase import BUFFERS, EXTRA, OPTIMIZER, PARAMS
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock
from fxoffload.torch_private.storages import storage_key

_LOCK = ForkSafeRLock()
_CLAIMS: weakref.WeakKeyDictionary[Inventory, frozenset[str]] = weakref.WeakKeyDictionary()


def claim(inventory: Inventory, device_types: frozenset[str]) -> None:
    """Reserves an inventory's tensors and optimizers for it, until ``give_up`` or until it is gone. Idempotent.

    Raises:
        RuntimeError: another inventory has reserved some of them.
    """
    with _LOCK:
        if inventory in _CLAIMS:
            return
        shared = _shared(inventory, device_types)
        if shared:
            gc.collect()  # managers and the guards of their models refer to each other
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
    """Lets others reserve them."""
    with _LOCK:
        _CLAIMS.pop(inventory, None)


def _shared(inventory: Inventory, device_types: frozenset[str]) -> list[str]:
    """Names of tensors and optimizers that other inventories have reserved."""
    others = {key for other, types in list(_CLAIMS.items()) for key in _named(other, types)}
    return [name for key, name in _named(inventory, device_types).items() if key in others] if others else []


def _named(inventory: Inventory, device_types: Collection[str]) -> dict[tuple[str, int], str]:
    """Names of the storages that a manager moves, and of its optimizers, which may have no state yet."""
    found = {("optimizer", id(one)): f"the optimizer {type(one).__name__}" for one in inventory.optimizers}
    walk = inventory.walk()
    for group in (PARAMS, BUFFERS, OPTIMIZER, EXTRA):
        named = walk.collect(group)
        with untouched():
            for name, tensor in named:
                for plain in plain_tensors(tensor):
                    if plain.device.type in device_types:
                        found.setdefault(("storage", storage_key(plain)), f"{name} ({group})")
    return found


# A child cannot use its parent's managers.
os.register_at_fork(after_in_child=_CLAIMS.clear)
