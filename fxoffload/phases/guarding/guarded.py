"""What guards ask of the manager whose tensors they guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from fxoffload.phases.handle import Handle
from fxoffload.phases.moving.host_image import HostImage
from fxoffload.phases.moving.storages import Holding


class Guarded(Protocol):
    """A ``PhaseManager``, as far as its guards know it."""

    image: HostImage

    @property
    def device_types(self) -> frozenset[str]:
        """The devices whose memory is wanted back."""
        ...

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The models, and the extra modules."""
        ...

    @property
    def optimizers(self) -> list[Any]:
        """Those that hold state."""
        ...

    def holding_of(self, tensor: Tensor) -> Holding | None:
        """The storage that an away tensor lies in."""
        ...

    def onload(self, *groups: str) -> Handle:
        """Moves groups back to the device."""
        ...

    def drain(self) -> None:
        """Waits until everything that was leaving has left."""
        ...
