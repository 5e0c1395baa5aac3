"""State dicts of what is away: CPU tensors with the values in the host image.

[Note: DTensors on the host]
A shard that is away becomes a DTensor with the same mesh and placements over a local tensor on the CPU, as FSDP2's
CPUOffloadPolicy has them: ``torch.distributed.checkpoint`` saves and loads such shards without a collective. What would
gather it on the device is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from fxoffload import _torch_private as private
from fxoffload.phases.guarding.sentinel import OffloadedError, detached_by, holdings_of, is_away, touch, untouched
from fxoffload.phases.moving.host_reads import with_bits_of
from fxoffload.phases.moving.storages import Holding, Where
from fxoffload.phases.phase import PARAMS

if TYPE_CHECKING:
    from fxoffload.phases.manager import PhaseManager

# By id: a holding, which is kept lest another one gets its id, and its bytes on the CPU. What was tied stays tied.
Memo = dict[int, tuple[Holding, Tensor]]

_MEMO: ContextVar[Memo | None] = ContextVar("memo", default=None)


@contextlib.contextmanager
def one_state_dict() -> Iterator[Memo]:
    """Copies made in this block are tied as the tensors are, and no longer: neither does the next state dict find this
    one's values, nor is memory kept that whoever asked has let go. Of blocks in each other the outermost counts."""
    memo = _MEMO.get()
    if memo is not None:
        yield memo
        return
    memo = {}
    token = _MEMO.set(memo)
    try:
        yield memo
    finally:
        _MEMO.reset(token)


class HostReader:
    """Copies of away tensors out of the host image.

    Args:
        manager: whose image it is.
    """

    def __init__(self, manager: PhaseManager) -> None:
        self._manager = manager
        self._process = os.getpid()

    @contextlib.contextmanager
    def answering_detach(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """In this block ``detach()`` of an away tensor gives a copy from the host. ``tensors`` that are arriving are
        fenced before. See ``one_state_dict`` for what is tied."""
        for tensor in tensors:
            self._fence(tensor)
        with one_state_dict() as memo, detached_by(lambda tensor: self.read(tensor, memo)):
            yield

    def read_tree(self, tree: Any) -> Any:
        """The same tree with copies from the host in place of away tensors."""
        memo: Memo = {}
        leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            self._fence(leaf)
        if not any(is_away(leaf) for leaf in leaves):
            return tree
        return tree_map(lambda leaf: self._copy_or_keep(leaf, memo) if isinstance(leaf, Tensor) else leaf, tree)

    def read(self, tensor: Tensor, memo: Memo) -> Tensor:
        """A copy of an away tensor: of a wrapper one of its kind, of a DTensor see [Note: DTensors on the host]."""
        if os.getpid() != self._process:
            raise OffloadedError(
                "a state dict was asked for in a forked process, which has no access to the pinned host memory: "
                "ask for it in the process that owns the model, or onload() before the fork"
            )
        with untouched(), torch.inference_mode(False):
            return self._copy(tensor, memo)

    def stand_ins(self, destination: MutableMapping[str, Any], names: Iterable[str], group: str = PARAMS) -> None:
        """Shards without elements are never away. Beside others that are, they must refuse what those refuse: else one
        rank would wait in a collective that the others never enter."""
        if self._manager.where(group) in (Where.HOST, Where.LEAVING):
            for name in names:
                if isinstance(destination.get(name), Tensor):
                    destination[name] = self._copy_or_keep(destination[name], {})

    def _copy_or_keep(self, tensor: Tensor, memo: Memo) -> Tensor:
        if is_away(tensor) or (private.is_dtensor(tensor) and private.local_of(tensor).numel() == 0):
            return self.read(tensor, memo)
        return tensor

    def _fence(self, tensor: Tensor) -> None:
        if any(holding.where is Where.ARRIVING for holding in holdings_of(tensor)):
            touch(tensor, "a state dict")

    def _copy(self, tensor: Tensor, memo: Memo) -> Tensor:
        if private.is_dtensor(tensor):
            from fxoffload.phases.moving.host_dtensor import HostDTensor

            return private.dtensor_over(tensor, self._copy(private.local_of(tensor), memo), HostDTensor)
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            inner = {name: self._copy(p, memo) if isinstance(p, Tensor) else p for name, p in parts.items()}
            return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        holding = self._manager.holding_of(tensor)
        if holding is None or holding.where is Where.LEAVING:
            copy = self._manager.host_copy(tensor)  # waits for what is leaving
            holding = self._manager.holding_of(tensor)
            if holding is None:
                return copy
        if not tensor.numel():
            found = torch.empty(0, dtype=tensor.dtype, device="cpu").as_strided(tensor.shape, tensor.stride(), 0)
        else:
            whole = self._bytes(holding, memo).view(tensor.dtype)
            found = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return with_bits_of(tensor, found)

    def _bytes(self, holding: Holding, memo: Memo) -> Tensor:
        known = memo.get(id(holding))
        if known is not None:
            return known[1]
        # Whole multiples of the widest dtype, so that the bytes can be viewed as any.
        found = torch.empty(-(-holding.nbytes // 16) * 16, dtype=torch.uint8, device="cpu")
        for at, host in self._manager.host_pieces(holding):
            found[at : at + host.numel()] = host
        memo[id(holding)] = holding, found
        return found
