"""State dicts of offloaded models: CPU tensors that lie in the host image.

[Note: State dicts of the host image]
A tensor of such a state dict shares memory with the host image: nothing is copied. A write to it (a checkpoint loaded
in place, one element, a NumPy array over it) reaches the model at the next onload. ``load_state_dict`` writes there.
After the onload the tensor is a snapshot and keeps its values: the next offload takes other host memory as long as a
reference to it is alive. A write to a snapshot reaches no model; the next transition warns of it once.

[Note: DTensors on the host]
A shard that is away becomes a DTensor with the same mesh and placements over a local tensor on the CPU, as FSDP2's
CPUOffloadPolicy has them. ``torch.distributed.checkpoint`` saves and loads such shards without a collective. Gathering
one moves that shard to the device first: see ``HostDTensor``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxoffload.phases.guarding.guarded import Guarded
from fxoffload.phases.guarding.sentinel import (
    OffloadedError,
    attributes_of,
    fence_arriving,
    home_of,
    is_away,
    untouched,
)
from fxoffload.phases.moving.host_reads import with_bits_of
from fxoffload.phases.moving.storages import Holding, Where
from fxoffload.torch_private.dtensors import is_dtensor, local_of
from fxoffload.torch_private.pytree import tree_map_only
from fxoffload.torch_private.storages import StorageWeakRef, is_gone, storage_behind
from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass
from fxoffload.torch_private.tensor_versions import write_counter

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Given:
    """A tensor of the image that was handed out.

    Attributes:
        address: of its first byte in the image.
        probe: shares the tensor's count of writes, and has no memory.
        holding: whose bytes the tensor has.
        writes: the count when the holding began to return; None before.
    """

    storage: StorageWeakRef
    address: int
    probe: Tensor
    holding: Holding
    writes: int | None = None

    @property
    def was_written_late(self) -> bool:
        """Whether the tensor was written to after its holding had begun to return."""
        return self.writes is not None and self.probe._version != self.writes


class HostReader:
    """Gives tensors of the host image in place of away tensors. See [Note: State dicts of the host image]."""

    def __init__(self, manager: Guarded) -> None:
        self._manager = manager
        self._process = os.getpid()
        self._given: list[_Given] = []
        self._most_given = 1000  # before those that are gone are left out
        self._has_warned = False

    def read_tree(self, tree: Any) -> Any:
        """The same tree with stand-ins in place of away tensors."""
        return tree_map_only(Tensor, self._stand_in_or_keep, tree)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """For an away tensor: of a wrapper one of its kind, of a DTensor see [Note: DTensors on the host]."""
        if os.getpid() != self._process:
            raise OffloadedError(
                "a state dict was asked for in a forked process, which has no access to the pinned host memory: "
                "ask for it in the process that owns the model, or onload() before the fork"
            )
        with untouched(), torch.inference_mode(False):
            return self._stand_in(tensor)

    def returning(self, holdings: Iterable[Holding]) -> None:
        """These begin to return: later writes to their tensors reach no model."""
        if self._given:
            ids = {id(holding) for holding in holdings}
            for given in self._given:
                if given.writes is None and id(given.holding) in ids:
                    self._take_back(given)
                    given.writes = given.probe._version

    def _take_back(self, given: _Given) -> None:
        """Brings the bytes of a tensor into the image that has left it (``share_memory_()``)."""
        storage, block = storage_behind(given.storage), given.holding.block
        if storage is None or block is None or storage.data_ptr() == given.address:
            return
        moved = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        for at, host in self._manager.image.pieces(block, given.holding.nbytes):
            host.copy_(moved[at : at + host.numel()])

    def warn_of_late_writes(self) -> None:
        """Warns once of writes to snapshots."""
        if not self._given:
            return
        late = [given for given in self._given if given.was_written_late]
        self._given = [g for g in self._given if not g.was_written_late and not is_gone(g.storage)]
        if late and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d tensors of a state dict were written to after onload(), the first of %s: the state dict was taken "
                "while that was offloaded, so the values are not in the model. Call state_dict() again after onload(), "
                "or write before it",
                len(late),
                late[0].holding.name,
            )

    def _stand_in_or_keep(self, tensor: Tensor) -> Tensor:
        fence_arriving((tensor,), "a state dict")
        return self.stand_in(tensor) if is_away(tensor) else tensor

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if is_dtensor(tensor):
            from fxoffload.phases.guarding.host_dtensor import HostDTensor

            local = local_of(tensor)
            return HostDTensor.over(tensor, self._stand_in(local), local.device)
        home = home_of(tensor)
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            inner = {name: self._stand_in(p) if isinstance(p, Tensor) else p for name, p in parts.items()}
            return home.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        found = self._plain(tensor)
        if home in (Tensor, torch.nn.Parameter):
            return found
        # Its detach() knows what becomes of its attributes.
        found = found.as_subclass(home)
        found.__dict__.update(attributes_of(tensor))
        return found

    def _plain(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return torch.empty(0, dtype=tensor.dtype, device="cpu").as_strided(tensor.shape, tensor.stride(), 0)
        holding = self._manager.holding_of(tensor)
        if holding is not None and holding.where is Where.LEAVING:
            self._manager.drain()
            holding = self._manager.holding_of(tensor)
        if holding is None:  # at home: one part of a wrapper may be
            return tensor.detach()
        assert holding.block is not None
        whole = self._manager.image.tensor(holding.block, holding.nbytes)  # as large as at home
        if len(self._given) >= self._most_given:
            self._given = [given for given in self._given if not is_gone(given.storage)]
            self._most_given = 2 * len(self._given) + 1000
        self._given.append(
            _Given(StorageWeakRef(whole.untyped_storage()), whole.data_ptr(), write_counter(whole), holding)
        )
        found = whole[: len(whole) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        found = found.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return with_bits_of(tensor, found).detach()
