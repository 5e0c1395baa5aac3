"""Which storages there are, where each of them is, and which tensors lie in it."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fxoffload.phases.guarding.sentinel import bring_back, holdings_of, is_away, send_away, untouched
from fxoffload.phases.inventory import Inventory, can_be_emptied
from fxoffload.phases.moving.host_image import HostImage
from fxoffload.phases.moving.storages import Holding, Owner, Where, plain_tensors
from fxoffload.phases.phase import BUFFERS, BY_PRECEDENCE, EXTRA, GRADS, GROUPS, OPTIMIZER, PARAMS
from fxoffload.sizes import format_bytes

# Groups that a forward or a step needs first arrive first.
_RETURN_ORDER = (GRADS, BUFFERS, PARAMS, OPTIMIZER, EXTRA)


class PhaseLedger:
    """The book of a ``PhaseManager``, whose transactions call it.

    It holds no tensor that is just on the device: those are the user's to drop. It only remembers its block in the host
    image, by a weak reference to the storage, to write the block anew the next time.

    Args:
        device_types: the devices whose memory is wanted back.
    """

    def __init__(self, inventory: Inventory, device_types: frozenset[str], owner: Owner, image: HostImage) -> None:
        self._inventory = inventory
        self._device_types = device_types
        self._owner = owner
        self._image = image
        self._held: dict[int, Holding] = {}  # By the storage's address.
        self._num_held: Counter[str] = Counter()  # By group.
        self._homes: dict[int, Holding] = {}  # Storages that were away before.
        self._ranks: dict[str, int] = {}
        self._readers: set[str] = set()
        self._foreign: list[tuple[str, str]] = []
        # Found by the last search. By group: how many tensors are on other devices, and whether some are on ours.
        self.has_immovable = False
        self.params_bytes = self.params_elsewhere_bytes = 0
        self.elsewhere: dict[str, Counter[torch.device]] = {}
        self.present: dict[str, bool] = {}
        self.num_kept_by_fsdp = 0

    def held(self, *where: Where, groups: Iterable[str] = GROUPS) -> list[Holding]:
        """Storages of these groups that are not just on the device, in these states (all for none)."""
        groups = tuple(groups)
        if not self.holds(groups):
            return []
        return [h for h in self._held.values() if h.group in groups and (not where or h.where in where)]

    def holds(self, groups: Iterable[str] = GROUPS) -> bool:
        """Whether a storage of these groups is not just on the device.

        Asked for every few storages that arrive, while a program wants the interpreter. So it takes no longer where
        there are many.
        """
        return any(map(self._num_held.__getitem__, groups))

    def arrived(self) -> list[Holding]:
        """Arriving storages that have arrived. Copies of a device end in their order: few need be asked."""
        waiting: dict[Any, list[Holding]] = {}
        for holding in self._held.values():
            if holding.where is Where.ARRIVING and holding.serial:
                waiting.setdefault(holding.device, []).append(holding)
        found: list[Holding] = []
        for holdings in waiting.values():
            holdings.sort(key=lambda holding: holding.serial)
            found += itertools.takewhile(Holding.has_arrived, holdings)
        return found

    def where(self, group: str) -> Where:
        """Where a group is; of one that is in several places the least settled."""
        found = {holding.where for holding in self.held(groups=(group,))}
        return next((where for where in (Where.LEAVING, Where.ARRIVING, Where.HOST) if where in found), Where.DEVICE)

    def describe(self) -> str:
        """Where each group is, in words."""
        sizes: Counter[str] = Counter()
        for holding in self._held.values():
            sizes[f"{holding.group} {holding.where.value}"] += holding.nbytes
        if not sizes:
            return "everything is on the device"
        return ", ".join(f"{key} ({format_bytes(size)})" for key, size in sizes.items())

    def storages(self, groups: Iterable[str] = GROUPS) -> list[Holding]:
        """Every storage of these groups, known or new, with every tensor on it, wherever it is.

        A storage that lies in several groups belongs to the first of ``BY_PRECEDENCE``.
        """
        groups = tuple(groups)
        found: dict[int, Holding] = {}
        others: dict[int, Any] = {}  # storages of other groups than the wanted ones
        wanted: dict[torch.device, bool] = {}  # ``device.type`` makes a string every time
        empty: dict[str, list[Tensor]] = {}  # by group: wrappers without an element, and their inner tensors
        self._foreign, self.has_immovable = [], False
        walk = self._inventory.walk()
        # One loop, written out: the caller waits for every turn of it, and so does its work on the device.
        for group in BY_PRECEDENCE:
            is_asked_for = group in groups
            named = walk.collect(group)
            is_present, elsewhere, bytes_elsewhere = False, Counter[torch.device](), 0
            with untouched():
                for name, tensor in named:
                    parts = plain_tensors(tensor)
                    if not parts and tensor.device.type in self._device_types:
                        is_present = self.has_immovable = True
                    for plain in parts:
                        device = plain.device
                        if not wanted.get(device):
                            if device in wanted or device.type not in self._device_types:
                                wanted[device] = False
                                elsewhere[device] += 1
                                bytes_elsewhere += plain.nbytes
                                continue
                            wanted[device] = True
                        is_present = True
                        if is_away(plain) and any(held.owner is not self._owner for held in holdings_of(plain)):
                            self._foreign.append((group, name))
                            continue
                        storage = plain.untyped_storage()
                        key = storage._cdata
                        holding = found.get(key) or self._held.get(key)
                        if holding is not None:
                            found[key] = holding
                            self._add_tensors(holding, tensor, plain)
                        elif not is_asked_for:
                            others[key] = storage
                        elif key not in others and (nbytes := storage.nbytes()):
                            if can_be_emptied(storage, device.type):
                                tensors = [tensor] if tensor is plain else [tensor, plain]
                                holding = Holding(storage, nbytes, device, group, name, self._owner, tensors)
                                found[key] = holding
                                if key in self._homes:
                                    self._take_block(key, holding)
                            else:
                                self.has_immovable = True
                        elif tensor is not plain and group != GRADS and key not in others and not is_away(plain):
                            empty.setdefault(group, []).extend((tensor, plain))
            self.present[group], self.elsewhere[group] = is_present, elsewhere
            if group == PARAMS:
                self.params_elsewhere_bytes = bytes_elsewhere
        self.num_kept_by_fsdp = len(walk.kept_by_fsdp)
        # A rank's shard of a small tensor may have no element. It leaves with another tensor: else its use would raise
        # on other ranks only, and this rank would wait for them in a collective.
        for group, tensors in empty.items():
            for holding in found.values():
                if holding.group == group and holding.where is Where.DEVICE:
                    holding.tensors += tensors
                    break
        self.params_bytes = sum(holding.nbytes for holding in found.values() if holding.group == PARAMS)
        return [holding for holding in found.values() if holding.group in groups]

    def remembered(self, groups: Iterable[str], most_bytes: int) -> list[Holding]:
        """Some of the storages that were away before, have a block and are alive: very likely they leave next. These
        holdings are for a copy ahead only; they are not in the book."""
        groups = tuple(groups)
        found: list[Holding] = []
        for home in self._homes.values():
            if most_bytes <= 0:
                break
            if home.group not in groups or home.block is None or not self._image.may_write(home.block):
                continue
            storage = home.weak() if home.weak is not None else None
            if storage is not None and storage.nbytes() == home.nbytes:
                most_bytes -= home.nbytes
                ahead = Holding(storage, home.nbytes, home.device, home.group, home.name, self._owner)
                ahead.block, ahead.event = home.block, home.event
                found.append(ahead)
        return found

    def on_device(self, groups: tuple[str, ...]) -> list[Holding]:
        """Holdings that can leave, in the order in which they do.

        Raises:
            RuntimeError: another manager has offloaded some of it.
        """
        self._drop_expired()
        found = [holding for holding in self.storages(groups) if holding.where is Where.DEVICE]
        foreign = [name for group, name in self._foreign if group in groups]
        if foreign:
            raise RuntimeError(
                f"expected tensors that no other PhaseManager has offloaded, found {len(foreign)}, the first "
                f"{foreign[0]}: call onload() of that manager, or use one manager for both"
            )
        return sorted(found, key=lambda holding: groups.index(holding.group))

    def on_host(self, groups: tuple[str, ...]) -> list[Holding]:
        """Holdings that can return, in the order of need: as far as known, the order of the modules' forwards."""
        last = len(self._ranks)
        return sorted(
            self.held(Where.HOST, groups=groups),
            key=lambda held: (_RETURN_ORDER.index(held.group), self._ranks.get(held.name, last)),
        )

    def note_reads(self, reader: str, tensors: Iterable[Tensor]) -> None:
        """A reader reads these now: the order of first reads is the order in which parameters return.

        Args:
            reader: its name; each reader counts once, with the tensors that have arrived by then too.
        """
        if reader in self._readers:
            return
        with untouched():
            for plain in (plain for tensor in tensors for plain in plain_tensors(tensor)):
                storage = plain.untyped_storage()
                holding = self._held.get(storage._cdata) or self._homes.get(storage._cdata)
                if holding is not None and (holding.weak is None or holding.weak() is storage):
                    self._readers.add(reader)
                    self._ranks.setdefault(holding.name, len(self._ranks))

    def leave(self, holdings: Iterable[Holding]) -> None:
        """These begin to leave: from now on their tensors must not be touched."""
        holdings = list(holdings)
        for holding in holdings:
            key = holding.storage._cdata
            self._drop(key)
            self._held[key] = holding
            self._homes.pop(key, None)
            self._num_held[holding.group] += 1
            holding.serial = 0
            holding.where = Where.LEAVING
        send_away(*((holding.tensors, holding) for holding in holdings))

    def settle(self, holdings: Iterable[Holding]) -> None:
        """These are on the device: their tensors get their own classes back."""
        holdings = list(holdings)
        bring_back(*((holding.tensors, holding) for holding in holdings))
        for holding in holdings:
            key = holding.storage._cdata
            holding.where = Where.DEVICE
            self._drop(key)
            holding.weak = weakref.ref(holding.storage)
            self._homes[key] = holding
            holding.let_go()

    def drop_dead(self, holdings: Iterable[Holding]) -> None:
        """Forgets holdings on the host without a known use (gradients that were set to None). A holding whose tensors
        are still referenced stays."""
        for holding in holdings:
            holding.watched = [weakref.ref(tensor) for tensor in holding.tensors]
            holding.tensors = []
            _stop_watching(holding)
            if not holding.tensors:
                self._drop(holding.storage._cdata)
                self._give_up(holding)
                holding.let_go()

    def forget_blocks(self) -> None:
        """Returns every block to the image; nothing is held."""
        for holding in self._homes.values():
            self._give_up(holding)
        self._homes.clear()

    def mend(self) -> None:
        """After an exception in between. ``_held`` is the source of truth: all of it is away until it is settled."""
        for holding in self._held.values():
            _stop_watching(holding)
        self._num_held = Counter(holding.group for holding in self._held.values())
        send_away(*((holding.tensors, holding) for holding in self._held.values()))

    def _drop(self, key: int) -> None:
        holding = self._held.pop(key, None)
        if holding is not None:
            self._num_held[holding.group] -= 1

    def _add_tensors(self, holding: Holding, *tensors: Tensor) -> None:
        for tensor in tensors:
            if not any(tensor is known for known in holding.tensors):
                holding.tensors.append(tensor)
                if holding.where is not Where.DEVICE:
                    send_away(((tensor,), holding))

    def _take_block(self, key: int, holding: Holding) -> None:
        # Of the same storage, or of one that is gone and had its address. A user's tensor of a block (a state dict)
        # keeps its values: the storage leaves to another one.
        home = self._homes[key]
        if home.nbytes == holding.nbytes and (home.block is None or self._image.may_write(home.block)):
            holding.block, holding.event = home.block, home.event
        else:
            del self._homes[key]
            self._give_up(home)

    def _drop_expired(self) -> None:
        for key, home in list(self._homes.items()):
            if home.weak is None or home.weak() is None:
                del self._homes[key]
                self._give_up(home)

    def _give_up(self, holding: Holding) -> None:
        block = holding.block
        if block is not None:
            if holding.event is not None:
                holding.event.synchronize()
            block.fence = None
            self._image.free(block)
            holding.block = None


def _stop_watching(holding: Holding) -> None:
    """Its tensors are those of the watched ones that are still referenced."""
    if holding.watched is not None:
        known = holding.tensors
        found = [tensor for tensor in (ref() for ref in holding.watched) if tensor is not None]
        holding.tensors = found + [tensor for tensor in known if not any(tensor is one for one in found)]
        holding.watched = None
