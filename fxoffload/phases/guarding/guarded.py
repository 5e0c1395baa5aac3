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
    def device_types(self) -> frozenset[str]: ...
    @property
    def modules(self) -> Mapping[str, nn.Module]: ...
    @property
    def optimizers(self) -> list[Any]: ...
    def holding_of(self, tensor: Tensor) -> Holding | None: ...
    def onload(self, *groups: str) -> Handle: ...
    def drain(self) -> None: ...
