"""Moves groups to the host and back, and stands between what is away and whoever wants to use it.

[Note: States]
Every storage is in one of the states of ``Where``; a group is where its storages are. Calls move only what is not
there yet, so that repeating one does nothing. A call that meets a transition under way joins it (the same direction) or
waits for it (the other direction). A transition that fails puts back what it had moved, and its handle raises.

[Note: Who waits]
``offload`` copies in a background thread: it waits for host memory that is still being pinned and for the copies, and
empties each storage when its bytes are safe. ``onload`` allocates and starts copies, in the caller's thread if it
waits, else slice by slice (see [Note: Slices]), and its tensors are fenced one by one until all have arrived: see
[Note: Away classes] and [Note: Gates].
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.profiler import record_function

from fxoffload.gc_pause import gc_paused
from fxoffload.phases.guarding import sharded
from fxoffload.phases.guarding.gates import Gates
from fxoffload.phases.guarding.gradients import Gradients
from fxoffload.phases.guarding.guards import Guards
from fxoffload.phases.guarding.sentinel import OffloadedError, holdings_of
from fxoffload.phases.handle import Handle
from fxoffload.phases.inventory import Inventory
from fxoffload.phases.ledger import Ledger
from fxoffload.phases.metrics import Transition
from fxoffload.phases.moving.arrivals import Arrivals
from fxoffload.phases.moving.device_memory import Returner, free_bytes, on_streams, return_to_driver, streams_of
from fxoffload.phases.moving.host_image import HostImage
from fxoffload.phases.moving.mover import Ahead, Mover
from fxoffload.phases.moving.room import ROOM_BEHIND_BYTES
from fxoffload.phases.moving.storages import Holding, Where
from fxoffload.phases.moving.worker import YIELD_S, Worker
from fxoffload.phases.phase import BUFFERS, EXTRA, GRADS, OPTIMIZER, PARAMS
from fxoffload.runtime.copies.streams import CopyStreams, Wait
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock
from fxoffload.sizes import format_bytes

log = logging.getLogger(__name__)

_READ_BY_FORWARDS = (PARAMS, BUFFERS, GRADS, EXTRA)
_SETTLED = 8  # storages whose tensors get their classes back at a time
_PATIENCE = 200  # sleeps of YIELD_S: 10 ms, should somebody who was interrupted be counted as a reader for ever
_AHEAD_BYTES = 2 << 30  # 40 ms of copying: longer than the search for everything
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
        self.lock = ForkSafeRLock()
        self.ledger = Ledger(inventory, device_types, self, image)
        self.worker = Worker("fxoffload-leave")
        self._bringer = Worker("fxoffload-return")
        self.mover = Mover(image, make_copies)
        self._arrivals = Arrivals(self.mover)
        self._handles: list[Handle] = []
        self._readers: list[None] = []  # one for each that waits for the lock or has it, to read
        self._room = ForkSafeRLock()  # while the background thread has memory for what comes next
        self._inventory = inventory
        self._empty_cache = empty_cache
        self._state = state
        self._gates = Gates(inventory.modules, self.pass_gate)
        self._gradients = Gradients(inventory, grads, lambda: self._require_gradients("a backward"))
        self.device_types = device_types
        self._fsdp = sharded.GatherStreams(inventory.modules.values())
        self.guards: Guards | None = None  # they need the manager, which needs us
        self._latest: dict[str, Transition] = {}  # by group: charged with the time that streams wait

    # -- to the host ---------------------------------------------------------------------------------------------------

    def offload(self, groups: tuple[str, ...], transition: Transition, *, at_once: bool) -> Handle:
        """Starts to move groups to the host.

        Args:
            at_once: somebody waits for the memory.
        """
        self.worker.require_own_process("offload()")
        began = time.perf_counter()
        # The caller, and the device, wait for this: no time to collect garbage.
        with record_function(f"fxoffload::offload({','.join(groups)})"), self.lock, gc_paused():
            self.harvest()
            dropped = self._gradients.apply_policy() if GRADS in groups else []
            ahead = Ahead()
            holdings: list[Holding] = []
            try:
                self._settle_modules(groups)
                arriving = self.ledger.held(Where.ARRIVING, groups=groups)
                self._fence([held for held in arriving if held.serial])
                if at_once:
                    ahead = self._start_ahead(groups)
                holdings = self._find(groups)
                transition.nbytes = sum(held.nbytes for held in holdings)
                free_before = free_bytes(holdings)
                handle = Handle(
                    f"offload of {', '.join(groups)}",
                    transition,
                    lambda: self._give_back(holdings, transition, free_before, at_once),
                )
                returner = Returner(at_once and self._empty_cache)
                streams = streams_of(holdings)
                self.ledger.leave(holdings)
                # Only now: what other threads have queued until nobody could touch these any more comes before it.
                self.mover.before_leaving(holdings)
                self._guard(holdings)
                # Last: with a second thread that wants the interpreter all of this takes twice as long.
                self.worker.submit(
                    lambda: self._leave(holdings, ahead, dropped, transition, handle, returner, streams, at_once)
                )
                # What was not started stays on the host: not before nothing can be refused any more.
                self._arrivals.cancel(arriving)
                self._handles.append(handle)
            except BaseException:
                try:
                    self._settle([held for held in holdings if held.where is Where.LEAVING])
                finally:
                    self.mover.finish(ahead)
                    self._gradients.restore(dropped)
                raise
            transition.stood_still_since(began)
        return handle

    def _settle_modules(self, groups: tuple[str, ...]) -> None:
        if {PARAMS, EXTRA}.intersection(groups):
            for module in self._inventory.modules.values():
                sharded.settle(module)

    def _start_ahead(self, groups: tuple[str, ...]) -> Ahead:
        remembered = self.ledger.remembered(groups, _AHEAD_BYTES)
        self.mover.before_leaving(remembered)
        return self.mover.start_ahead(remembered)

    def _find(self, groups: tuple[str, ...]) -> list[Holding]:
        if GRADS in groups:
            self._drop_dead_gradients()
        found = self.ledger.on_device(groups)
        self.warn_of_what_stays(groups)
        return found

    def warn_of_what_stays(self, groups: tuple[str, ...]) -> None:
        """Warns once of tensors that the last search of the ledger has found and that do not move."""
        if self.ledger.has_immovable:
            self._inventory.warn_of_immovable(self.device_types)
        self._inventory.warn_of_fsdp(self.ledger.num_kept_by_fsdp)
        self._inventory.warn_of_elsewhere(groups, self.ledger.present, self.ledger.elsewhere, self.device_types)

    def _drop_dead_gradients(self) -> None:
        away = self.ledger.held(Where.HOST, groups=(GRADS,))
        self.ledger.drop_dead([held for held in away if not self._gradients.still_used(held.tensors)])

    def _leave(
        self,
        holdings: list[Holding],
        ahead: Ahead,
        dropped: list[tuple[Tensor, Tensor]],
        transition: Transition,
        handle: Handle,
        returner: Returner,
        streams: list[torch.cuda.Stream],
        at_once: bool,
    ) -> None:
        """In the background thread."""

        def empty(part: list[Holding]) -> None:
            with self.lock:
                # Others were taken back: whoever began this was interrupted.
                emptied = [held for held in part if held.where is Where.LEAVING]
                for held in emptied:
                    held.storage.resize_(0)
                    held.where = Where.HOST
            for held in emptied:
                returner.freed(held)

        error: BaseException | None = None
        try:
            with record_function("fxoffload::copies to the host"):
                self.mover.leave(holdings, ahead, empty, gives_way=not at_once)
        except BaseException as caught:
            error = caught
            with on_streams(streams):
                self._roll_back(holdings, dropped)
        finally:
            dropped.clear()
            transition.finish(failed=error is not None)
            transition.host_bytes = self.image.reserved_bytes
            handle.complete(error)

    def _roll_back(self, holdings: list[Holding], dropped: list[tuple[Tensor, Tensor]]) -> None:
        with self.lock:
            gone = [held for held in holdings if held.where is Where.HOST]
            self._settle([held for held in holdings if held.where is Where.LEAVING])
            self._gradients.restore(dropped)
            try:
                self.mover.begin_arrivals()
                self.mover.arrive(gone)
                for held in gone:
                    if held.event is not None:
                        held.event.synchronize()
                self._settle(gone)
            except Exception as error:
                log.warning("an offload failed, and what had left cannot return (%s): it is on the host, whole", error)

    def _give_back(self, holdings: list[Holding], transition: Transition, free_before: int, at_once: bool) -> None:
        """In the thread that waits for an offload: returns memory to the driver, what left before included.

        Not after an offload behind other work: what leaves so returns soon, and memory that the allocator still has is
        there at once, while mapping 13 GB again takes 0.1 s.
        """
        if self._empty_cache and at_once:
            return_to_driver(self.device_types)
        gone = sum(held.nbytes for held in holdings if held.device.type != "cuda")
        transition.freed_bytes = max(free_bytes(holdings) - free_before, 0) + gone

    # -- to the device -------------------------------------------------------------------------------------------------

    def onload(self, groups: tuple[str, ...], transition: Transition, *, at_once: bool) -> Handle:
        """Starts to move groups to the device.

        Args:
            at_once: somebody waits for all of it; else see [Note: Slices].
        """
        self.worker.require_own_process("onload()")
        began = time.perf_counter()
        with record_function(f"fxoffload::onload({','.join(groups)})"):
            self._drain(groups)
            try:
                return self._start_onload(groups, transition, began, at_once)
            except torch.OutOfMemoryError:
                if not self._make_room():
                    raise
            return self._start_onload(groups, transition, began, at_once)

    def _make_room(self) -> bool:
        """Waits for what is leaving. Returns whether there was something."""
        with self.lock:
            crowded = bool(self.ledger.held(Where.LEAVING))
        if crowded:
            self.worker.drain()
            torch.cuda.empty_cache()
        return crowded

    def _drain(self, groups: tuple[str, ...]) -> None:
        with self.lock:
            under_way = self.ledger.held(Where.LEAVING, groups=groups)
        if under_way:
            self.worker.drain()

    def _start_onload(self, groups: tuple[str, ...], transition: Transition, began: float, at_once: bool) -> Handle:
        with self.lock:
            self.harvest()
            if GRADS in groups:
                self._drop_dead_gradients()
            holdings = self.ledger.on_host(groups)
            if self.guards is not None:
                self.guards.returning(holdings)
            pending = self.ledger.held(Where.ARRIVING, groups=groups)
            transition.nbytes = max(transition.nbytes, sum(held.nbytes for held in holdings))
            transition.is_over = False
            handle = Handle(f"onload of {', '.join(groups)}", transition)
            self._latest |= dict.fromkeys((held.group for held in holdings), transition)
            self.mover.begin_arrivals()
            try:
                if at_once:
                    self._begun(self._start_all(pending))
                    self.mover.arrive(holdings)
                    self._begun(holdings)
                else:
                    self._arrivals.add(holdings)
                    self._begun(self._arrivals.start_first())
            except BaseException:
                self._arrivals.cancel(holdings)
                transition.finish(failed=True)
                raise
            self._handles.append(handle)
            streams = streams_of(holdings)
            head_start_s = 0.0 if at_once else self._arrivals.head_start_s
            self._bringer.submit(lambda: self._bring([*pending, *holdings], transition, handle, streams, head_start_s))
            transition.stood_still_since(began)
        return handle

    def _start_all(self, pending: list[Holding]) -> list[Holding]:
        return [held for waiting in pending for held in self._start_until(waiting)]

    def _begun(self, holdings: Iterable[Holding]) -> None:
        """A copy without an event was made at once."""
        self._settle([held for held in holdings if held.event is None])

    def _bring(
        self,
        holdings: list[Holding],
        transition: Transition,
        handle: Handle,
        streams: list[torch.cuda.Stream],
        head_start_s: float,
    ) -> None:
        """In the background thread."""
        error: BaseException | None = None
        try:
            time.sleep(head_start_s)
            with record_function("fxoffload::copies to the device"), on_streams(streams):
                self._start_rest(holdings)
            for i in range(0, len(holdings), _SETTLED):
                part = [held for held in holdings[i : i + _SETTLED] if held.where is Where.ARRIVING]
                if not part:
                    continue
                for held in part:
                    event = held.event
                    if held.where is Where.ARRIVING and event is not None:
                        event.synchronize()
                with self.lock:
                    self._settle([held for held in part if held.where is Where.ARRIVING and held.has_arrived()])
                time.sleep(YIELD_S)
        except BaseException as caught:
            error = caught
        finally:
            transition.finish(failed=error is not None)
            transition.host_bytes = self.image.reserved_bytes
            handle.complete(error)

    def _start_rest(self, holdings: list[Holding]) -> None:
        retried = False
        left = deque(holdings)
        while True:
            began = time.perf_counter()
            with self.lock:
                upcoming = self._arrivals.upcoming()
            if self.mover.room.lacks(upcoming):
                with self.lock:
                    beyond = self._arrivals.upcoming_bytes(ROOM_BEHIND_BYTES)
                with self._room:
                    self.mover.room.make_behind(upcoming, beyond)
            self._stand_back()
            with self.lock:
                while left and not _is_unstarted(left[0]):
                    left.popleft()
                if not left:
                    return
                try:
                    self._begun(self._arrivals.start())
                    oom = False
                except torch.OutOfMemoryError:
                    if retried:
                        self._arrivals.cancel(filter(_is_unstarted, left))
                        raise
                    oom = True
            if not oom:
                # As long as it took: others want the allocator too.
                time.sleep(max(YIELD_S, time.perf_counter() - began))
                continue
            retried = True
            if not self._make_room():
                with self.lock:
                    self._arrivals.cancel(filter(_is_unstarted, left))
                raise torch.OutOfMemoryError("no room on the device for what returns; it stays on the host")
            with self.lock:
                self.mover.begin_arrivals()  # nothing of what was found out is true any more

    def _stand_back(self) -> None:
        """Else this thread has the lock again before one that waits for it, to read something now, wakes up."""
        for _ in range(_PATIENCE):
            if not self._readers:
                return
            time.sleep(YIELD_S)

    def report(self) -> None:
        """Raises what went wrong in the background and nobody was told."""
        with self.lock:
            over = [handle for handle in self._handles if handle.done()]
            self._handles = [handle for handle in self._handles if not handle.done()]
            failed = [handle for handle in over if handle.has_failed()]
            for handle in failed[1:]:
                log.warning("the %s failed as well", handle.what)
        for handle in failed[:1]:
            handle.report()

    def harvest(self) -> None:
        """What has arrived meanwhile is on the device."""
        with self.lock:
            self._settle(self.ledger.arrived())

    # -- whoever wants to use it ---------------------------------------------------------------------------------------

    def touched(self, holding: Holding, what: str, *, writes: bool = False) -> None:
        """See ``fxoffload.phases.moving.storages.Owner``."""
        with self._reading():
            if holding.where in _GONE:
                raise OffloadedError(self._complaint(holding, what))
            self._fence([holding])

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """The lock, for somebody who needs something now: the background threads stand back."""
        try:
            self._readers.append(None)
            with self.lock:
                yield
        finally:
            self._readers.pop()

    def pass_gate(self, tensors: list[Tensor], what: str) -> None:
        """``fence`` of what a module is about to read, which says in what order things are needed."""
        with self._reading():
            self.ledger.note_reads(what, tensors)
            self.fence(tensors, what)

    def fence(self, tensors: Iterable[Tensor], what: str) -> None:
        """Lets the current stream wait for those of the tensors that are arriving.

        Raises:
            OffloadedError: one is on the host; or gradients are, and this may be followed by a backward.
        """
        with self._reading():
            arriving: list[Holding] = []
            for held in (held for tensor in tensors for held in holdings_of(tensor)):
                if held.owner is not self:
                    held.owner.touched(held, what)
                elif held.where in _GONE:
                    raise OffloadedError(self._complaint(held, what))
                else:
                    arriving.append(held)
            self._fence(arriving)
            if torch.is_grad_enabled():
                self._require_gradients(what)

    def fence_group(self, group: str) -> None:
        """``fence`` of all that a group holds."""
        with self._reading():
            for held in self.ledger.held(*_GONE, groups=(group,)):
                raise OffloadedError(self._complaint(held, f"a use of the {group}"))
            self._fence(self.ledger.held(Where.ARRIVING, groups=(group,)))

    def _require_gradients(self, what: str) -> None:
        with self._reading():
            self._fence(self.ledger.held(Where.ARRIVING, groups=(GRADS,)))
            for held in self.ledger.held(groups=(GRADS,)):
                if self._gradients.still_used(held.tensors):
                    raise OffloadedError(self._complaint(held, what))

    def _fence(self, holdings: Iterable[Holding]) -> None:
        """Lets the current stream wait for copies; what arrives before the youngest of them is fenced too."""
        arriving = [held for held in holdings if held.where is Where.ARRIVING]
        for held in arriving:
            self._begun(self._start_until(held))
        arriving = [held for held in arriving if held.where is Where.ARRIVING]
        for device in {held.device for held in arriving}:
            last = max((held for held in arriving if held.device == device), key=lambda held: held.serial)
            transition = self._latest.get(last.group)
            if device.type == "cuda" and transition is not None:
                if not last.has_arrived():
                    transition.let_wait(torch.cuda.current_stream(device), last.event)
                    self._fsdp.wait(last.event)
            else:
                self.mover.copies(device).compute_waits_for(last.event, Wait.TARGET_READY)
            there = [h for h in self.ledger.held(Where.ARRIVING) if 0 < h.serial <= last.serial]
            self._settle(h for h in there if h.device == device)

    def _start_until(self, held: Holding) -> list[Holding]:
        try:
            return self._arrivals.start_until(held)
        except torch.OutOfMemoryError:
            with self._room:  # the background thread may have had the memory for a moment
                pass
            return self._arrivals.start_until(held)

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
            self.guards.install(of_modules=groups != {OPTIMIZER})
        if groups.intersection(_READ_BY_FORWARDS):
            self._gates.install()
        if GRADS in groups:
            self._gradients.guard()

    def _settle(self, holdings: Iterable[Holding]) -> None:
        """These are on the device again."""
        self.ledger.settle(list(holdings))
        if not self.ledger.holds((GRADS,)):
            self._gradients.unguard()
        if not self.ledger.holds(_READ_BY_FORWARDS):
            self._gates.remove()
        if self.guards is not None and not self.ledger.holds():
            self.guards.remove()

    def close(self) -> None:
        """Ends the background thread."""
        self._gates.remove()
        if self.guards is not None:
            self.guards.close()
        self.worker.stop()
        self._bringer.stop()


def _is_unstarted(holding: Holding) -> bool:
    return holding.where is Where.ARRIVING and not holding.serial
