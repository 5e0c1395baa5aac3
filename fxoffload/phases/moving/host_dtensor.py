"""A shard on the host; see [Note: DTensors on the host]. Imported where somebody uses DTensors."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.tensor import DTensor

from fxoffload import _torch_private as private
from fxoffload.phases.guarding.sentinel import OffloadedError


class HostDTensor(DTensor):
    """A DTensor of the device's mesh over a local tensor on the CPU, which cannot be gathered there."""

    def full_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: it needs a collective on the device."""
        _refuse("full_tensor()")

    def redistribute(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: it needs a collective on the device."""
        _refuse("redistribute()")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of any DTensor, on the CPU."""
        device = private.device_asked_for(*args, **kwargs)
        if device is not None and device.type != "cpu":
            _refuse(f"to({device.type!r})")
        return super().to(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Written as a plain DTensor: whoever reads it needs no fxoffload.
        return private.dtensor_over(self, private.local_of(self)).__reduce_ex__(protocol)


def _refuse(what: str) -> NoReturn:
    raise OffloadedError(
        f"{what} of a shard in a state dict that was read from the host, while the model is offloaded: a full state "
        'dict needs a collective on the device. Call onload("params") before state_dict(), save the shards as they '
        "are (torch.distributed.checkpoint), or take full weights from stream_weights()"
    )
