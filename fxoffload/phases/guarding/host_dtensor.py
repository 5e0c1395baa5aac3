"""A shard on the host; see [Note: DTensors on the host]. Imported only in programs that use DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxoffload.phases.guarding.sentinel import OffloadedError, untouched
from fxoffload.torch_private.dtensors import dtensor_over, local_of
from fxoffload.torch_private.pytree import tree_leaves, tree_map_only

# torch's message about a process group that has no backend for CPU tensors (NCCL alone).
_NO_BACKEND = "No backend type associated with device type cpu"


class HostDTensor(DTensor):
    """A DTensor of the device's mesh over a local tensor on the CPU. Collectives run on the device.

    ``to(device)`` of the mesh gives a plain DTensor. ``full_tensor`` and ``redistribute`` begin with that. An operator
    on host shards gives a host shard again, if its result is on the CPU.

    Attributes:
        home: the device that its values come from.
    """

    home: torch.device

    @staticmethod
    def over(like: Any, local: Tensor, home: torch.device) -> HostDTensor:
        """One with the mesh, placements and shape of ``like``."""
        found: HostDTensor = dtensor_over(like, local, HostDTensor)
        found.home = home
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
        try:
            with untouched():
                found = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if _NO_BACKEND not in str(error):
                raise
            raise OffloadedError(
                f"{getattr(func, '__name__', func)} of a shard in a state dict that was read from the host needs other "
                "ranks, and their process group has no backend for the CPU: expected the shard on its device, found it "
                f"on the host, while the model is offloaded. Call .to({cls._home_of(given).type!r}) of it first"
            ) from error
        if not all(isinstance(one, HostDTensor) for one in given):
            return found
        known, home = {id(one) for one in given}, cls._home_of(given)

        def as_host(tensor: DTensor) -> DTensor:
            on_host = local_of(tensor).device.type == "cpu"
            return HostDTensor.over(tensor, local_of(tensor), home) if on_host else tensor

        return tree_map_only(DTensor, lambda one: one if id(one) in known else as_host(one), found)

    @staticmethod
    def _home_of(given: list[DTensor]) -> torch.device:
        return next(one.home for one in given if isinstance(one, HostDTensor))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of any DTensor; a plain one on the mesh's device."""
        found: Any = super().to(*args, **kwargs)
        return _plain(found) if _asked_for(*args, **kwargs) == self.home.type else found

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        """``to("cpu")``."""
        return self.to("cpu") if not (args or kwargs) else super().cpu(*args, **kwargs)

    def full_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """All of it, on the device: one collective, which all ranks call."""
        return self._on_device().full_tensor(*args, **kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        """On the device."""
        return self._on_device().redistribute(*args, **kwargs)

    def _on_device(self) -> DTensor:
        return self.to(self.home, non_blocking=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> HostDTensor:
        local = local_of(self)
        found = HostDTensor.over(self, local.clone(memory_format=torch.preserve_format), self.home)
        memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Written as a plain DTensor: its reader needs no fxoffload.
        return _plain(self).__reduce_ex__(protocol)


def _asked_for(*args: Any, **kwargs: Any) -> str:
    """The type of the device in the arguments of ``to``; empty for a dtype alone."""
    first = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(first, Tensor):
        return first.device.type
    return "" if first is None or isinstance(first, torch.dtype) else torch.device(first).type


def _plain(tensor: DTensor) -> DTensor:
    return dtensor_over(tensor, local_of(tensor)) if isinstance(tensor, HostDTensor) else tensor
