"""One ``PhaseManager`` for each model and optimizer that a framework hands to us repeatedly."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from fxoffload.environment import phases_device_types
from fxoffload.phases import PhaseManager, Where
from fxoffload.phases.phase import GROUPS

_ATTRIBUTE = "_fxoffload_phases"
_managers: weakref.WeakSet[PhaseManager] = weakref.WeakSet()


class _Slot:
    """Holds a manager in its model's or optimizer's ``__dict__``. Copies and pickles hold none.

    A WeakKeyDictionary would keep all of them for ever: a manager refers to its model.
    """

    def __init__(self, manager: PhaseManager | None = None) -> None:
        self.manager = manager

    def __reduce__(self) -> Any:
        return _Slot, ()


def manager_of_model(model: nn.Module) -> PhaseManager:
    """The manager of a model's parameters, buffers and gradients; the same one at every call.

    It leaves the driver's cache to the caller.
    """
    return _manager_of(model, lambda: PhaseManager(model, device_types=phases_device_types(), empty_cache=False))


def manager_of_optimizer(optimizer: Any) -> PhaseManager:
    """The manager of an optimizer's state; the same one at every call."""
    # Gradients are the model's manager's. "drop" only keeps this one from reserving host memory for them.
    return _manager_of(optimizer, lambda: PhaseManager((), optimizer, device_types=phases_device_types(), grads="drop"))


def managers_away() -> list[PhaseManager]:
    """Those of which something is not on its device."""
    return [m for m in _managers if any(m.where(group) is not Where.DEVICE for group in GROUPS)]


def _manager_of(owner: Any, make: Callable[[], PhaseManager]) -> PhaseManager:
    slot = vars(owner).get(_ATTRIBUTE)
    if slot is not None and slot.manager is not None:
        return slot.manager
    manager = make()
    # Not by setattr: some wrappers pass attributes on to their inner object.
    vars(owner)[_ATTRIBUTE] = _Slot(manager)
    _managers.add(manager)
    return manager
