"""One storage on its way to the host and back."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxoffload.runtime.host_memory.arena import HostBlock, block_bytes
from fxoffload.torch_private.dtensors import is_made_like_dtensor, local_of
from fxoffload.torch_private.tensor_subclasses import has_dispatch, is_traceable_wrapper_subclass


class Where(enum.Enum):
    """Where the bytes of a storage are.

    DEVICE     On the device only; the block on the host, if there is one, is out of date.
    LEAVING    On the device, being copied to the host: no code may write them.
    HOST       On the host only.
    ARRIVING   On the host, and being copied to the device: readers there wait for ``Holding.event``.
    """

    DEVICE = "device"
    LEAVING = "leaving"
    HOST = "host"
    ARRIVING = "arriving"


class Owner(Protocol):
    """The object that moves a holding; asked when a tensor is touched whose bytes are not on the device."""

    def touched(self, holding: Holding, what: str, *, writes: bool = False) -> None:
        """Lets the current stream wait for arriving bytes, or raises ``OffloadedError``."""
        ...


@dataclass(eq=False, slots=True, repr=False)
class Holding:
    """A storage that some group's tensors lie in.

    Attributes:
        storage: the storage itself, which stays the same object.
        group: the first group it was found in.
        name: of the first tensor on it.
        owner: moves it.
        tensors: every known tensor on it, wrappers (DTensor) included.
        block: its place in the host image.
        event: of the last copy to the device.
        serial: of that copy; copies of one device arrive in this order. 0 for one that was not started.
        weak: refers to the storage when ``storage`` no longer does.
        watched: the tensors, during the search for other references to them.
    """

    storage: torch.UntypedStorage
    nbytes: int
    device: torch.device
    group: str
    name: str
    owner: Owner
    tensors: list[Tensor] = field(default_factory=list)
    where: Where = Where.DEVICE
    block: HostBlock | None = None
    event: Any = None
    serial: int = 0
    weak: weakref.ref[torch.UntypedStorage] | None = None
    watched: list[weakref.ref[Tensor]] | None = None

    @property
    def is_due(self) -> bool:
        """Whether it is to arrive, and its copy was not started."""
        return self.where is Where.ARRIVING and not self.serial

    def __repr__(self) -> str:
        # Without the storage: torch writes out every byte of one.
        return f"Holding({self.name!r}, {self.nbytes} bytes of the {self.group}, {self.where.value})"

    def has_arrived(self) -> bool:
        """Whether the last copy to the device was started and is finished."""
        return self.serial > 0 and (self.event is None or self.event.query())

    def let_go(self) -> None:
        """Drops the references to the user's tensors and storage; the block stays known."""
        self.tensors = []
        self.storage = None  # type: ignore[assignment]

    def bytes_on_device(self) -> Tensor:
        """The storage as a vector of bytes. It shares memory and version counter with no tensor of the user."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)


def bytes_of(holdings: Iterable[Holding]) -> int:
    """Bytes that storages take in the host image."""
    return sum(block_bytes(holding.nbytes) for holding in holdings)


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory that a tensor is made of: itself, or those inside a wrapper (DTensor, quantized).

    Empty for a tensor that cannot be taken apart: a sparse one, a wrapper without ``__tensor_flatten__``.
    """
    kind = type(tensor)
    # Nearly every tensor has one of the first two classes, which need not be asked for methods that they lack.
    if kind is Tensor or kind is nn.Parameter:
        return [tensor] if tensor.layout is torch.strided else []
    if is_made_like_dtensor(kind):  # nearly every other
        return plain_tensors(local_of(tensor))
    if not hasattr(kind, "__tensor_flatten__") or not is_traceable_wrapper_subclass(tensor):
        return [tensor] if tensor.layout is torch.strided and _has_memory(tensor) else []
    found: list[Tensor] = []
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # torch 2.13 names a DTensor's mesh too
            found += plain_tensors(inner)
    return found


def _has_memory(tensor: Tensor) -> bool:
    """Whether this is no wrapper: its storage has a size, and no address. Of an away tensor the size is 0."""
    if not has_dispatch(tensor):
        return True
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() != 0 or storage.nbytes() == 0
    except RuntimeError:  # a fake tensor's
        return False
