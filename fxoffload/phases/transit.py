"""Moves groups to the host and back, and stands between what is away and whoever wants to use it.

[Note: States]
Every storage is in one of the states of ``Where``; a group is where its storages are. Calls move only what is not
there yet, so that repeating one does nothing. A call that meets a transition under way joins it (the same direction) or
waits for it (the other direction). A transition that fails puts back what it had moved, and its handle raises.

[Note: Who waits]
``offload`` copies in a background thread: it waits for host memory that is still being pinned and for the copies, and
empties each storage when its bytes are safe. ``onload`` allocates and starts the copies in the caller's thread (memory
belongs to the stream it was allocated on), and its tensors are fenced one by one until all have arrived: see
[Note: Away classes] and [Note: Gates].
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from fxoffload.phases import sharded
from fxoffload.phases.gates import Gates
from fxoffload.phases.gradients import Gradients
from fxoffload.phases.guards import Guards
from fxoffload.phases.handle import Handle
from fxoffload.phases.host_image import HostImage
from fxoffload.phases.inventory import Inventory
from fxoffload.phases.ledger import Ledger
from fxoffload.phases.metrics import Transition
from fxoffload.phases.mover import Mover
from fxoffload.phases.phase import BUFFERS, GRADS, GROUPS, PARAMS
from fxoffload.phases.sentinel import OffloadedError, holdings_of
from fxoffload.phases.storages import Holding, Where
from fxoffload.phases.worker import Worker
from fxoffload.runtime.host_arena import ALIGNMENT
from fxoffload.runtime.streams import CopyStreams, Wait
from fxoffload.sizes import format_bytes

_READ_BY_FORWARDS = (PARAMS, BUFFERS, GRADS)
_GONE = (Where.HOST, Where.LEAVING)


class Transit:
    """See [Note: States] and [Note: Who waits]. Thread-safe.

    Args:
        inventory: what there is.
        image: the host memory.
        device_types: the devices whose memory is wanted back.
        grads: "keep", "drop" or "error".
        empty_cache: whether freed memory goes back to the driver when an offload is waited for.
        make_copies: the copy streams of a device, for tests.
        state: what the user is told about where things are.
    """

    def __init__(
        self,
        inventory: Inventory,
        image: HostImage,
        device_types: frozenset[str],
        *,
        grads: str,
        empty_cache: bool,
        make_copies: Callable[[torch.device], CopyStreams] | None,
        state: Callable[[], str],
    ) -> None:
        self.image = image
        self.lock = threading.RLock()
        self.ledger = Ledger(inventory, device_types, self, image.free)
        self.worker = Worker("fxoffload-phases")
        self.mover = Mover(image, make_copies)
        self._inventory = inventory
        self._empty_cache = empty_cache
        self._state = state
        self._gates = Gates(inventory.models, self.fence)
        self._gradients = Gradients(inventory, grads, lambda: self._require_gradients("a backward"))
        self._fsdp = sharded.GatherStreams(inventory.models.values())
        self.guards: Guards | None = None  # they need the manager, which needs us
        self._latest: dict[str, Transition] = {}  # by group: charged with the time that streams wait

    # -- to the host ---------------------------------------------------------------------------------------------------

    def offload(self, groups: tuple[str, ...], transition: Transition) -> Handle:
        """Starts to move groups to the host."""
        began = time.perf_counter()
        with record_function(f"fxoffload::offload({','.join(groups)})"), self.lock:
            self.harvest()
            self._fence(self.ledger.held(Where.ARRIVING))
            holdings = self._find(groups)
            transition.nbytes = sum(held.nbytes for held in holdings)
            free_before = self._free_bytes(holdings)
            handle = Handle(
                f"offload of {', '.join(groups)}",
                transition,
                lambda: self._give_back(holdings, transition, free_before),
            )
            self.mover.before_leaving(holdings)
            self.ledger.leave(holdings)
            self._guard(holdings)
            self.worker.submit(lambda: self._leave(holdings, transition, handle))
            transition.stood_still_since(began)
        return handle

    def _find(self, groups: tuple[str, ...]) -> list[Holding]:
        if GRADS in groups:
            self._gradients.apply_policy()
        if PARAMS in groups:
            for model in self._inventory.models.values():
                sharded.settle(model)
        return self.ledger.on_device(groups)

    def _leave(self, holdings: list[Holding], transition: Transition, handle: Handle) -> None:
        """In the background thread."""
        error: BaseException | None = None
        try:
            self.mover.leave(holdings, self._empty)
            transition.finish()
        except BaseException as caught:
            error, transition.failed = caught, True
            self._roll_back(holdings)
        transition.host_bytes = self.image.reserved_bytes
        handle.complete(error)

    def _empty(self, holding: Holding) -> None:
        with self.lock:
            holding.storage.resize_(0)
            holding.where = Where.HOST

    def _roll_back(self, holdings: list[Holding]) -> None:
        with self.lock:
            gone = [held for held in holdings if held.where is Where.HOST]
            self._settle([held for held in holdings if held.where is Where.LEAVING])
            with contextlib.suppress(RuntimeError):  # no room on the device: it stays on the host, whole
                self.mover.arrive(gone, self._emptied)
                for held in gone:
                    if held.event is not None:
                        held.event.synchronize()
                self._settle(gone)

    def _give_back(self, holdings: list[Holding], transition: Transition, free_before: int) -> None:
        """In the thread that waits for an offload: returns its memory to the driver."""
        if any(held.device.type == "cuda" for held in holdings):
            if self._empty_cache:
                torch.cuda.empty_cache()
            transition.freed_bytes = max(self._free_bytes(holdings) - free_before, 0)
        else:
            transition.freed_bytes = transition.nbytes

    @staticmethod
    def _free_bytes(holdings: list[Holding]) -> int:
        """Of their GPUs, as the driver sees it."""
        devices = {held.device for held in holdings if held.device.type == "cuda"}
        return sum(torch.cuda.mem_get_info(device)[0] for device in devices)

    # -- to the device -------------------------------------------------------------------------------------------------

    def onload(self, groups: tuple[str, ...], transition: Transition) -> Handle:
        """Starts to move groups to the device."""
        began = time.perf_counter()
        with record_function(f"fxoffload::onload({','.join(groups)})"):
            self._drain(groups)
            try:
                return self._start_onload(groups, transition, began)
            except torch.OutOfMemoryError:
                with self.lock:
                    crowded = bool(self.ledger.held(Where.LEAVING))
                if not crowded:
                    raise
            # What is leaving may make the room.
            self._drain(GROUPS)
            return self._start_onload(groups, transition, began)

    def _drain(self, groups: tuple[str, ...]) -> None:
        with self.lock:
            under_way = self.ledger.held(Where.LEAVING, groups=groups)
        if under_way:
            self.worker.drain()

    def _start_onload(self, groups: tuple[str, ...], transition: Transition, began: float) -> Handle:
        with self.lock:
            self.harvest()
            holdings = self.ledger.on_host(groups)
            pending = self.ledger.held(Where.ARRIVING, groups=groups)
            transition.nbytes, transition.failed = sum(held.nbytes for held in holdings), False
            handle = Handle(f"onload of {', '.join(groups)}", transition)
            try:
                self.mover.arrive(holdings, self._emptied)
            except BaseException:
                transition.failed = True
                raise
            self._latest |= dict.fromkeys((held.group for held in holdings), transition)
            self._settle([held for held in holdings if held.event is None])
            self.worker.submit(lambda: self._arrived([*pending, *holdings], transition, handle))
            transition.stood_still_since(began)
        return handle

    def _emptied(self, holding: Holding) -> None:
        holding.storage.resize_(0)
        holding.event, holding.where = None, Where.HOST

    def _arrived(self, holdings: list[Holding], transition: Transition, handle: Handle) -> None:
        """In the background thread."""
        error: BaseException | None = None
        try:
            for held in holdings:
                event = held.event
                if held.where is Where.ARRIVING and event is not None:
                    event.synchronize()
            transition.finish()
            self.harvest()
        except BaseException as caught:
            error, transition.failed = caught, True
        transition.host_bytes = self.image.reserved_bytes
        handle.complete(error)

    def harvest(self) -> None:
        """What has arrived meanwhile is on the device."""
        with self.lock:
            self._settle([held for held in self.ledger.held(Where.ARRIVING) if held.has_arrived()])

    # -- whoever wants to use it ---------------------------------------------------------------------------------------

    def touched(self, holding: Holding, what: str) -> None:
        """See ``fxoffload.phases.storages.Owner``."""
        with self.lock:
            if holding.where in _GONE:
                raise OffloadedError(self._complaint(holding, what))
            self._fence([holding])

    def fence(self, tensors: Iterable[Tensor], what: str) -> None:
        """Lets the current stream wait for those of the tensors that are arriving.

        Raises:
            OffloadedError: one is on the host; or gradients are, and this may be followed by a backward.
        """
        with self.lock:
            arriving: list[Holding] = []
            for held in (held for tensor in tensors for held in holdings_of(tensor)):
                if held.owner is not self:
                    held.owner.touched(held, what)
                elif held.where in _GONE:
                    raise OffloadedError(self._complaint(held, what))
                else:
                    self.ledger.note_read(held)
                    arriving.append(held)
            self._fence(arriving)
            if torch.is_grad_enabled():
                self._require_gradients(what)

    def fence_group(self, group: str) -> None:
        """``fence`` of all that a group holds."""
        with self.lock:
            for held in self.ledger.held(*_GONE, groups=(group,)):
                raise OffloadedError(self._complaint(held, f"a use of the {group}"))
            self._fence(self.ledger.held(Where.ARRIVING, groups=(group,)))

    def _require_gradients(self, what: str) -> None:
        with self.lock:
            self._fence(self.ledger.held(Where.ARRIVING, groups=(GRADS,)))
            for held in self.ledger.held(groups=(GRADS,)):
                if self._gradients.still_used(held.tensors):
                    raise OffloadedError(self._complaint(held, what))

    def _fence(self, holdings: Iterable[Holding]) -> None:
        """Lets the current stream wait for copies; what arrives before the youngest of them is fenced too."""
        arriving = [held for held in holdings if held.where is Where.ARRIVING]
        for device in {held.device for held in arriving}:
            last = max((held for held in arriving if held.device == device), key=lambda held: held.serial)
            transition = self._latest.get(last.group)
            if device.type == "cuda" and transition is not None:
                if not last.has_arrived():
                    transition.let_wait(torch.cuda.current_stream(device), last.event)
                    self._fsdp.wait(last.event)
            else:
                self.mover.copies(device).compute_waits_for(last.event, Wait.TARGET_READY)
            self._settle(h for h in self.ledger.held(Where.ARRIVING) if h.device == device and h.serial <= last.serial)

    def _complaint(self, holding: Holding, what: str) -> str:
        way = "being offloaded" if holding.where is Where.LEAVING else "offloaded"
        forward = holding.group in (PARAMS, BUFFERS) and not torch.is_grad_enabled()
        return (
            f"{what} needs {holding.name} ({format_bytes(holding.nbytes)} of the {holding.group}) on {holding.device}, "
            f"but it is {way}: {self._state()}. Call onload({holding.group!r}) or "
            f"enter({'logprob' if forward else 'train'!r}) first"
        )

    # -- guards --------------------------------------------------------------------------------------------------------

    def _guard(self, holdings: list[Holding]) -> None:
        """Puts up what must be up while these are away."""
        groups = {held.group for held in holdings}
        if holdings and self.guards is not None:
            self.guards.install()
        if groups.intersection(_READ_BY_FORWARDS):
            self._gates.install()
        if GRADS in groups:
            self._gradients.guard()

    def _settle(self, holdings: Iterable[Holding]) -> None:
        """These are on the device again."""
        self.ledger.settle(list(holdings))
        if not self.ledger.held(groups=(GRADS,)):
            self._gradients.unguard()
        if not self.ledger.held(groups=_READ_BY_FORWARDS):
            self._gates.remove()
        if self.guards is not None and not self.ledger.held():
            self.guards.remove()

    def close(self) -> None:
        """Ends the background thread."""
        self._gates.remove()
        if self.guards is not None:
            self.guards.close()
        self.worker.stop()


def bytes_of(holdings: Iterable[Holding]) -> int:
    """Bytes that storages take in the host image."""
    return sum(-(-holding.nbytes // ALIGNMENT) * ALIGNMENT for holding in holdings)


def find_device(inventory: Inventory, device_types: frozenset[str], groups: Iterable[Any] = GROUPS) -> torch.device:
    """The device that most of this is about: of the first tensor on one of the types."""
    for group in inventory.order(list(groups)):
        for _, tensor in inventory.collect(group):
            if tensor.device.type in device_types:
                return tensor.device
    if "cuda" in device_types and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
