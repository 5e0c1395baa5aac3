"""State dicts that are taken before a model is offloaded, and read after.

verl's weight sync does this: load, ``params = model.state_dict()``, offload. Then it gathers and sends one parameter
after the other. Where a model is moved by ``.cpu()``, those tensors keep the old memory, all of it, until they are
dropped. Here they share the storage that is emptied. So those that are alive then get a class of their own, as the
model's tensors do. But they raise no error: each gets memory with the right values when it is read. A write would be to
that memory, not to the model's, and is refused.

A hook notices state dicts from our first call on. Those that were taken before are looked for once, among all tensors.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxoffload.phases import PhaseManager, Where
from fxoffload.phases.guarding import sharded
from fxoffload.phases.guarding.sentinel import OffloadedError, bring_back, is_away, send_away, untouched
from fxoffload.phases.moving.storages import Holding, plain_tensors

log = logging.getLogger(__name__)


class Aliases:
    """Tensors of a model's state dicts, while other code keeps them. Owner of the holdings of those that are away."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Tensor]] = []
        # Emptied storages that aliases still lie in, by address: our holding, and the manager's, which has the bytes.
        self._away: dict[int, tuple[Holding, Holding]] = {}
        self._manager: weakref.ref[PhaseManager] | None = None
        self._searched = False
        self._apart: list[tuple[weakref.ref[Tensor], int]] = []  # those with memory of their own, and their versions

    def __reduce__(self) -> Any:
        return Aliases, ()  # copies and pickles know no tensors

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """The state dict post hook. Takes note of the tensors."""
        self._seen = [ref for ref in self._seen if ref() is not None]
        self._seen += [weakref.ref(value) for value in state_dict.values() if isinstance(value, Tensor)]

    def leave(self, manager: PhaseManager) -> None:
        """Sends those away that lie in storages which the manager has just offloaded."""
        self._manager = weakref.ref(manager)
        tensors = (t for model in manager.models.values() for t in (*model.parameters(), *model.buffers()))
        offloaded = {held.storage._cdata: held for t in tensors if (held := manager.holding_of(t)) is not None}
        if offloaded and not self._searched:
            self._searched = True
            self._seen += [weakref.ref(tensor) for tensor in _tensors_on(offloaded.keys(), manager)]
        alive = [tensor for tensor in self._alive() if not is_away(tensor)]
        for alias in alive:
            for plain in _plain(alias):
                key = plain.untyped_storage()._cdata
                if key not in offloaded:
                    continue
                if key not in self._away:
                    held = offloaded[key]
                    ours = Holding(held.storage, held.nbytes, held.device, held.group, held.name, self)
                    ours.where = Where.HOST
                    self._away[key] = ours, held
                send_away(((alias, plain), self._away[key][0]))

    def any_away(self) -> bool:
        """Whether there are aliases that were not read since the offload."""
        return bool(self._away)

    def come_back(self) -> None:
        """When the model has arrived: aliases that were not read share the model's memory again."""
        for key in list(self._away):
            ours, _ = self._away.pop(key)
            self._bring_back(ours)

    def warn_of_writes(self) -> None:
        """Warns of writes to aliases with memory of their own. Called before the model returns: an alias shares its
        parameter's count of writes, which changes then."""
        apart, self._apart = self._apart, []
        late = [ref for ref, version in apart if (tensor := ref()) is not None and tensor._version != version]
        if late:
            log.warning(
                "%d tensors of a state dict were written to after they had been read while their model was offloaded: "
                "they had memory of their own by then, so the values are not in the model. Take the state dict while "
                "the model is offloaded, or write when it is loaded",
                len(late),
            )

    def touched(self, holding: Holding, what: str, *, writes: bool = False) -> None:
        """Gives the aliases of one storage memory of their own.

        Raises:
            OffloadedError: they are written to.
        """
        if writes:
            raise OffloadedError(
                f"{what} writes to {holding.name} of a state dict that was taken before its model was offloaded: the "
                "values would not be in the model. Take state_dict() again and write to that, or load the model first"
            )
        manager = self._manager() if self._manager is not None else None
        key = holding.storage._cdata
        if manager is None or key not in self._away:
            raise RuntimeError(f"{what} needs {holding.name}, whose model was deleted while it was offloaded")
        ours, held = self._away.pop(key)
        own = torch.empty(held.nbytes, dtype=torch.uint8, device=held.device)
        for at, host in manager.host_pieces(held):
            own[at : at + host.numel()].copy_(host)
        with untouched():
            there = [t for alias in self._alive() for t in _plain(alias) if t.untyped_storage()._cdata == key]
            for plain in there:
                values = torch.empty(0, dtype=plain.dtype, device=held.device)
                values.set_(own.untyped_storage(), plain.storage_offset(), plain.shape, plain.stride())
                plain.data = values
        self._bring_back(ours)
        self._apart += [(weakref.ref(plain), plain._version) for plain in there]

    def _bring_back(self, ours: Holding) -> None:
        for alias in self._alive():
            bring_back(((alias, *_plain(alias)), ours))

    def _alive(self) -> Iterator[Tensor]:
        for ref in list(self._seen):
            tensor = ref()
            if tensor is not None:
                yield tensor


_aliases: weakref.WeakKeyDictionary[nn.Module, Aliases] = weakref.WeakKeyDictionary()


def aliases_of(model: nn.Module) -> Aliases:
    """The aliases of a model's state dicts, which are watched from the first call on."""
    if model not in _aliases:
        _aliases[model] = Aliases()
        model.register_state_dict_post_hook(_aliases[model])
    return _aliases[model]


def _plain(tensor: Tensor) -> list[Tensor]:
    with untouched():
        return [plain for plain in plain_tensors(tensor) if plain.device.type != "meta"]


def _tensors_on(storages: Collection[int], manager: PhaseManager) -> Iterator[Tensor]:
    """Detached tensors at home that lie in these storages, but for those that FSDP keeps for itself."""
    kept = {id(t) for model in manager.models.values() for _, t in sharded.held_tensors(model, emptied=True)}
    for thing in gc.get_objects():
        # Not isinstance(): that asks proxies for their __class__, and they may raise.
        if issubclass(type(thing), Tensor) and id(thing) not in kept and not is_away(thing):
            with untouched():
                fits = not thing.requires_grad and any(t.untyped_storage()._cdata in storages for t in _plain(thing))
            if fits:
                yield thing
