"""Moves groups to the host and back, and guards the use of tensors that are away.

[Note: States]
Every storage is in one of the states of ``Where``; a group is where its storages are. A call moves only storages that
are not there yet, so that repeating one does nothing. A call that meets a transition under way joins it (the same
direction) or waits for it (the other direction). A transition that fails undoes its moves, and its handle
raises.

[Note: Interrupted transitions]
All of this changes in transactions ([Note: Asynchronous exceptions]). Three things that change by single stores say
where the bytes of a storage are: whether it is empty, ``Holding.where`` and ``Holding.serial``. A transition that was
not handed to its thread is undone: ``_mend`` takes back storages that should leave, and leaves those on the host that
should return.

[Note: Who waits]
``offload`` copies in a background thread. The thread waits for host memory that is still being pinned and for the
copies, and empties each storage when its bytes are safe. ``onload`` allocates and starts copies. If it waits it does so
in the caller's thread, else slice by slice (see [Note: Slices]). Its tensors are fenced one by one until all have
arrived: see [Note: Away classes] and [Note: Gates].
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from fxoffload.errors import in_brief
from fxoffload.gc_pause import gc_paused
from fxoffload.phases.gradients import Gradients
from fxoffload.phases.guarding import sharded
from fxoffload.phases.guarding.gates import Gates
from fxoffload.phases.guarding.guards import Guards
from fxoffload.phases.guarding.sentinel import OffloadedError, holdings_of
from fxoffload.phases.handle import Handle
from fxoffload.phases.inventory import Inventory
from fxoffload.phases.ledger import PhaseLedger
from fxoffload.phases.metrics import Transition
from fxoffload.phases.moving.arrivals import Arrivals
from fxoffload.phases.moving.device_memory import Returner, free_bytes, on_streams, return_to_driver, streams_of
from fxoffload.phases.moving.host_image import HostImage
from fxoffload.phases.moving.mover import Ahead, Mover
from fxoffload.phases.moving.room import ROOM_BEHIND_BYTES
from fxoffload.phases.moving.storages import Holding, Where, bytes_of
from fxoffload.phases.moving.worker import YIELD_S, Worker
from fxoffload.phases.phase import BUFFERS, EXTRA, GRADS, GROUPS, OPTIMIZER, PARAMS
from fxoffload.runtime.copies.streams import CopyStreams, Wait
from fxoffload.runtime.fork_safe_lock import ForkSafeRLock, locked
from fxoffload.runtime.transactions import transaction
from fxoffload.sizes import format_bytes

log = logging.getLogger(__name__)

_READ_BY_FORWARDS = (PARAMS, BUFFERS, GRADS, EXTRA)
_SETTLED = 8  # Storages whose tensors get their classes back at a time.
_PATIENCE = 200  # Sleeps of YIELD_S, 10 ms in all: an interrupted reader may be counted as one for ever.
_AHEAD_BYTES = 2 << 30  # 40 ms of copying: longer than the search for everything
_GONE = (Where.HOST, Where.LEAVING)
_Found = TypeVar("_Found")
_Params = ParamSpec("_Params")


@dataclass(eq=False)
class _Departure:
    """An offload.

    Attributes:
        at_once: whether a caller waits for the memory.
        ahead: copies that were started before the search for leaving storages.
        dropped: gradients, by their owners.
    """

    transition: Transition
    at_once: bool
    ahead: Ahead = field(default_factory=Ahead)
    holdings: list[Holding] = field(default_factory=list)
    dropped: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    handle: Handle | None = None


@dataclass(eq=False)
class _Return:
    """An onload of these holdings.

    Attributes:
        pending: holdings that should already return because of other onloads.
    """

    transition: Transition
    holdings: list[Holding]
    pending: list[Holding]
    handle: Handle


def _reading(
    method: Callable[Concatenate[Transit, _Params], None],
) -> Callable[Concatenate[Transit, _Params], None]:
    """A transaction of a caller who needs a tensor now: the background threads stand back."""
    change = transaction(method)

    @functools.wraps(method)
    def call(self: Transit, *args: _Params.args, **kwargs: _Params.kwargs) -> None:
        mine = threading.get_ident()
        try:
            self._readers.add(mine)
            change(self, *args, **kwargs)
        finally:
            self._readers.discard(mine)

    return call


class Transit:
    """See [Note: States] and [Note: Who waits]. Thread-safe.

    Args:
        device_types: the devices whose memory is wanted back.
        grads: "keep", "drop" or "error".
        empty_cache: whether freed memory goes back to the driver when an offload is waited for.
        make_copies: the copy streams of a device, for tests.
        state: tells the user where groups are.
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
        self._lock = ForkSafeRLock()
        self._torn = False
        self.ledger = PhaseLedger(inventory, device_types, self, image)
        self.worker = Worker("fxoffload-leave")
        self._bringer = Worker("fxoffload-return")
        self.mover = Mover(image, make_copies)
        self._arrivals = Arrivals(self.mover)
        self._preparing: _Departure | _Return | None = None  # The one that the caller prepares.
        self._departures: list[_Departure] = []  # Those that the thread has.
        self._returns: list[_Return] = []  # Those that the other thread has.
        self._failed: list[Handle] = []  # Their errors may not have been raised yet.
        self._readers: set[int] = set()  # Threads that wait for the lock or have it, to read.
        self._room = ForkSafeRLock()  # While the background thread has memory for the next storages.
        self._inventory = inventory
        self._empty_cache = empty_cache
        self._state = state
        self._gates = Gates(inventory.modules, self.pass_gate)
        self._gradients = Gradients(inventory, grads, lambda: self._require_gradients("a backward"))
        self.device_types = device_types
        self._fsdp = sharded.GatherStreams(inventory.modules.values())
        self.guards: Guards | None = None  # they need the manager, which needs us
        self._latest: dict[str, Transition] = {}  # by group: charged with the time that streams wait

    @transaction
    def transact(self, work: Callable[[], _Found]) -> _Found:
        """Calls ``work`` in a transaction: nothing moves meanwhile."""
        return work()

    def _mend(self) -> None:
        """See [Note: Interrupted transitions]."""
        self.mover.go_back()
        preparing = self._preparing
        undone: list[Holding] = []
        if isinstance(preparing, _Departure) and preparing not in self._departures:
            self.mover.finish(preparing.ahead)
            self._gradients.restore(preparing.dropped)
        elif isinstance(preparing, _Return) and preparing not in self._returns:
            undone = [held for held in preparing.holdings if held.where is Where.ARRIVING]
        self.ledger.mend()
        self._mend_holdings(undone)
        self._preparing = None
        self._gates.mend()
        if self.guards is not None:
            self.guards.mend()
        self._guard(self.ledger.held())

    def _mend_holdings(self, undone: list[Holding]) -> None:
        leaving = {id(held) for departure in self._departures for held in departure.holdings}
        arriving = {id(held) for back in self._returns for held in (*back.holdings, *back.pending)}
        for held in undone:
            self.mover.give_up(held)
            arriving.discard(id(held))
        at_home: list[Holding] = []
        for held in self.ledger.held():
            is_empty = not held.storage.nbytes()
            if held.where is Where.LEAVING and is_empty:
                held.where = Where.HOST
            elif held.where is Where.DEVICE or (held.where is Where.LEAVING and id(held) not in leaving):
                at_home.append(held)
            elif held.where in (Where.HOST, Where.ARRIVING):
                if is_empty == (held.serial > 0):
                    self.mover.clear(held)
                if held.is_due and id(held) not in arriving:
                    held.where = Where.HOST
        self._arrivals.mend(held for held in self.ledger.held() if held.is_due)
        self._settle(at_home)

    # -- to the host ---------------------------------------------------------------------------------------------------

    def offload(self, transition: Transition, *, at_once: bool) -> Handle:
        """Starts to move groups to the host.

        Args:
            at_once: whether a caller waits for the memory.
        """
        # The caller, and the device, wait for this: no time to collect garbage.
        with self._starting(transition), gc_paused():
            return self._start_offload(transition, at_once)

    @contextmanager
    def _starting(self, transition: Transition) -> Iterator[None]:
        """The block starts a transition, while the caller waits."""
        self.worker.birthplace.require(f"{transition.kind}()")
        began = time.perf_counter()
        try:
            with record_function(f"fxoffload::{transition.kind}({','.join(transition.groups)})"):
                yield
        except BaseException:
            transition.finish(failed=True)
            raise
        transition.stood_still_since(began)

    @transaction
    def _start_offload(self, transition: Transition, at_once: bool) -> Handle:
        self.harvest()
        groups = transition.groups
        departure = self._preparing = _Departure(transition, at_once)
        if GRADS in groups:
            self._gradients.apply_policy(departure.dropped)
        self._settle_modules(groups)
        arriving = self.ledger.held(Where.ARRIVING, groups=groups)
        self._fence([held for held in arriving if held.serial])
        if at_once:
            self._start_ahead(groups, departure)
        if GRADS in groups:
            self._drop_dead_gradients()
        departure.holdings = holdings = self.ledger.on_device(groups)
        self.warn_of_what_stays(groups)
        transition.nbytes = sum(held.nbytes for held in holdings)
        free_before = free_bytes(holdings)
        departure.handle = handle = Handle(
            f"offload of {', '.join(groups)}",
            transition,
            lambda: self._give_back(holdings, transition, free_before, at_once),
        )
        returner = Returner(at_once and self._empty_cache)
        streams = streams_of(holdings)
        self.ledger.leave(holdings)
        # Only now: work of other threads that was queued before these went away comes first.
        self.mover.before_leaving(holdings)
        self._guard(holdings)
        # Late: with a second thread that wants the interpreter all of this takes twice as long.
        self.worker.submit(
            lambda: self._leave(departure, returner, streams), lambda error: self._end_departure(departure, error)
        )
        self._departures.append(departure)  # from here on it is the thread's; it waits for the end of this transaction
        self._preparing = None
        # Copies that were not started are cancelled, only when nothing can be refused any more: they stay on the host.
        self._arrivals.cancel(arriving)
        return handle

    def _settle_modules(self, groups: tuple[str, ...]) -> None:
        if {PARAMS, EXTRA}.intersection(groups):
            for module in self._inventory.modules.values():
                sharded.settle(module)

    def _start_ahead(self, groups: tuple[str, ...], departure: _Departure) -> None:
        remembered = self.ledger.remembered(groups, _AHEAD_BYTES)
        self.mover.before_leaving(remembered)
        departure.ahead = Ahead(remembered)
        self.mover.start_ahead(departure.ahead)

    def warn_of_what_stays(self, groups: tuple[str, ...]) -> None:
        """Warns once of tensors that the last search of the ledger has found and that do not move."""
        if self.ledger.has_immovable:
            self._inventory.warn_of_immovable(self.device_types)
        self._inventory.warn_of_fsdp(self.ledger.num_kept_by_fsdp)
        self._inventory.warn_of_elsewhere(groups, self.ledger.present, self.ledger.elsewhere, self.device_types)
        if PARAMS in groups:
            self._inventory.warn_of_most_elsewhere(self.ledger.params_elsewhere_bytes, self.ledger.params_bytes)

    def _drop_dead_gradients(self) -> None:
        away = self.ledger.held(Where.HOST, groups=(GRADS,))
        self.ledger.drop_dead([held for held in away if not self._gradients.still_used(held.tensors)])

    def _leave(self, departure: _Departure, returner: Returner, streams: list[torch.cuda.Stream]) -> None:
        """In the background thread."""

        def empty(part: list[Holding]) -> None:
            for held in self._empty(part):
                returner.freed(held)

        error: BaseException | None = None
        try:
            holdings = self._still_leaving(departure)
            with record_function("fxoffload::copies to the host"):
                self.mover.leave(holdings, departure.ahead, empty, gives_way=not departure.at_once)
        except BaseException as caught:
            error = caught
            with on_streams(streams):
                self._roll_back(departure)
        self._end_departure(departure, error)

    @transaction
    def _still_leaving(self, departure: _Departure) -> list[Holding]:
        """Holdings to copy; none where the thread that began this was interrupted."""
        return departure.holdings if departure in self._departures else []

    @transaction
    def _empty(self, part: list[Holding]) -> list[Holding]:
        emptied = [held for held in part if held.where is Where.LEAVING]
        for held in emptied:
            held.storage.resize_(0)
            held.where = Where.HOST
        return emptied

    @transaction
    def _roll_back(self, departure: _Departure) -> None:
        gone = [held for held in departure.holdings if held.where is Where.HOST]
        self._settle([held for held in departure.holdings if held.where is Where.LEAVING])
        self._gradients.restore(departure.dropped)
        try:
            self.mover.begin_arrivals()
            self.mover.arrive(gone)
            for held in gone:
                if held.event is not None:
                    held.event.synchronize()
            self._settle(gone)
        except Exception as error:
            log.warning(
                "an offload failed, and what had left cannot return (%s): it is on the host, whole", in_brief(error)
            )

    @transaction
    def _end_departure(self, departure: _Departure, error: BaseException | None) -> None:
        """Called once more where it was interrupted."""
        handle = departure.handle
        if departure not in self._departures or handle is None:
            return
        self._settle([held for held in departure.holdings if held.where is Where.LEAVING])
        departure.dropped.clear()
        self._tell(handle, departure.transition, error)
        self._departures.remove(departure)

    def _tell(self, handle: Handle, transition: Transition, error: BaseException | None) -> None:
        if error is not None and handle not in self._failed:
            self._failed.append(handle)
        transition.finish(failed=error is not None)
        transition.host_bytes = self.image.reserved_bytes
        handle.complete(error)

    def _give_back(self, holdings: list[Holding], transition: Transition, free_before: int, at_once: bool) -> None:
        """In the thread that waits for an offload: returns memory to the driver, that of earlier offloads included.

        Not after a background offload: its groups return soon. Memory that the allocator still has is there at once,
        while mapping 13 GB anew takes 0.1 s.
        """
        if self._empty_cache and at_once:
            return_to_driver(self.device_types)
        gone = sum(held.nbytes for held in holdings if held.device.type != "cuda")
        transition.freed_bytes = max(free_bytes(holdings) - free_before, 0) + gone

    # -- to the device -------------------------------------------------------------------------------------------------

    def onload(self, transition: Transition, *, at_once: bool) -> Handle:
        """Starts to move groups to the device.

        Args:
            at_once: whether a caller waits for all of it; else see [Note: Slices].
        """
        with self._starting(transition):
            if self._holds(Where.LEAVING, transition.groups):
                self.worker.drain()
            try:
                return self._start_onload(transition, at_once)
            except torch.OutOfMemoryError:
                if not self._make_room():
                    raise
                return self._start_onload(transition, at_once)

    def _make_room(self) -> bool:
        """Waits for storages that are leaving. Returns whether there were any."""
        crowded = self._holds(Where.LEAVING, GROUPS)
        if crowded:
            self.worker.drain()
            torch.cuda.empty_cache()
        return crowded

    @transaction
    def _holds(self, where: Where, groups: tuple[str, ...]) -> bool:
        return bool(self.ledger.held(where, groups=groups))

    @transaction
    def _start_onload(self, transition: Transition, at_once: bool) -> Handle:
        self.harvest()
        groups = transition.groups
        if GRADS in groups:
            self._drop_dead_gradients()
        holdings = self.ledger.on_host(groups)
        if self.guards is not None:
            self.guards.reader.returning(holdings)
        pending = self.ledger.held(Where.ARRIVING, groups=groups)
        transition.nbytes = max(transition.nbytes, sum(held.nbytes for held in holdings))
        transition.is_over = False
        handle = Handle(f"onload of {', '.join(groups)}", transition)
        back = self._preparing = _Return(transition, holdings, pending, handle)
        self._latest |= dict.fromkeys((held.group for held in holdings), transition)
        self.mover.begin_arrivals()
        if at_once:
            for waiting in pending:
                self._begun(self._start_until(waiting))
            self.mover.arrive(holdings)
            self._begun(holdings)
        else:
            self._arrivals.add(holdings)
            self._begun(self._arrivals.start_first())
        streams = streams_of(holdings)
        head_start_s = 0.0 if at_once else self._arrivals.head_start_s
        self._bringer.submit(
            lambda: self._bring(back, streams, head_start_s), lambda error: self._end_return(back, error)
        )
        self._returns.append(back)  # from here on it is the thread's
        self._preparing = None
        return handle

    def _begun(self, holdings: Iterable[Holding]) -> None:
        """A copy without an event was made at once."""
        self._settle([held for held in holdings if held.event is None])

    def _bring(self, back: _Return, streams: list[torch.cuda.Stream], head_start_s: float) -> None:
        """In the background thread."""
        error: BaseException | None = None
        holdings = [*back.pending, *back.holdings]
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
                self._settle_arrived(part)
                time.sleep(YIELD_S)
        except BaseException as caught:
            error = caught
        self._end_return(back, error)

    @transaction
    def _settle_arrived(self, part: list[Holding]) -> None:
        self._settle([held for held in part if held.where is Where.ARRIVING and held.has_arrived()])

    @transaction
    def _end_return(self, back: _Return, error: BaseException | None) -> None:
        """Called once more where it was interrupted."""
        if back not in self._returns:
            return
        if error is not None:
            others = [one for one in self._returns if one is not back]
            wanted = {id(held) for one in others for held in (*one.holdings, *one.pending)}
            self._arrivals.cancel([held for held in back.holdings if id(held) not in wanted])
        self._tell(back.handle, back.transition, error)
        self._returns.remove(back)

    def _start_rest(self, holdings: list[Holding]) -> None:
        retried = False
        left = deque(holdings)
        while True:
            began = time.perf_counter()
            upcoming = self.transact(self._arrivals.upcoming)
            if self.mover.room.lacks(upcoming):
                beyond = self.transact(lambda: self._arrivals.upcoming_bytes(ROOM_BEHIND_BYTES))
                self._make_room_behind(upcoming, beyond)
            self._stand_back()
            has_room = self._start_slice(left, may_retry=not retried)
            if has_room is None:
                return
            if has_room:
                # As long as it took: other threads want the allocator too.
                time.sleep(max(YIELD_S, time.perf_counter() - began))
                continue
            retried = True
            if not self._make_room():
                self.transact(lambda: self._arrivals.cancel(left))
                raise torch.OutOfMemoryError("no room on the device for what returns; it stays on the host")
            self.mover.begin_arrivals()  # no finding about idle memory is true any more

    @locked(lambda self, *args: self._room)
    def _make_room_behind(self, upcoming: Sequence[Holding], beyond: Sequence[Holding]) -> None:
        self.mover.room.make_behind(upcoming, beyond)

    @locked(lambda self: self._room)
    def _wait_for_room(self) -> None:
        """The background thread may have had the memory for a moment."""

    @transaction
    def _start_slice(self, left: deque[Holding], *, may_retry: bool) -> bool | None:
        """Starts the next ones. Returns whether there was room for them; None where nothing was left to start."""
        while left and not left[0].is_due:
            left.popleft()
        if not left:
            return None
        try:
            self._begun(self._arrivals.start())
        except torch.OutOfMemoryError:
            if may_retry:
                return False
            self._arrivals.cancel(left)
            raise
        return True

    def _stand_back(self) -> None:
        """Let waiting readers go first: else this thread takes the lock before one of them wakes up."""
        for _ in range(_PATIENCE):
            if not self._readers:
                return
            time.sleep(YIELD_S)

    def report(self) -> None:
        """Raises a background error that was not raised yet."""
        failed = self._unreported()
        for handle in failed[:1]:
            handle.report()

    @transaction
    def _unreported(self) -> list[Handle]:
        """The first one stays in the list until its error was raised."""
        failed = [handle for handle in self._failed if handle.has_failed()]
        for handle in failed[1:]:
            log.warning("the %s failed as well", handle.what)
        self._failed = failed[:1]
        return self._failed

    @transaction
    def harvest(self) -> None:
        """Storages that have arrived meanwhile are on the device."""
        self._settle(self.ledger.arrived())

    # -- queries -------------------------------------------------------------------------------------------------------

    @transaction
    def where(self, group: str) -> Where:
        """See ``PhaseLedger.where``."""
        self.harvest()
        return self.ledger.where(group)

    @transaction
    def describe(self) -> str:
        """See ``PhaseLedger.describe``."""
        return self.ledger.describe()

    @transaction
    def reserve(self, groups: Sequence[str]) -> None:
        """Begins to pin host memory for the known storages of these groups."""
        self.image.reserve(bytes_of(self.ledger.storages(groups)))

    @transaction
    def release(self) -> int:
        """Returns the host image to the operating system. Returns its bytes.

        Raises:
            RuntimeError: something is offloaded.
        """
        self.harvest()
        if self.ledger.holds():
            raise RuntimeError(
                f"expected everything on the device, found {self._state()}: call onload() before release_host_memory()"
            )
        self.mover.synchronize()  # streams of weights may still be reading
        self.ledger.forget_blocks()
        if self.image.in_use_bytes:
            gc.collect()  # frames of an interrupted call may hold blocks
        return self.image.release()

    # -- uses of tensors -----------------------------------------------------------------------------------------------

    @_reading
    def touched(self, holding: Holding, what: str, *, writes: bool = False) -> None:
        """See ``fxoffload.phases.moving.storages.Owner``."""
        if holding.where in _GONE:
            raise OffloadedError(self._complaint(holding, what))
        self._fence([holding])

    @_reading
    def pass_gate(self, tensors: list[Tensor], what: str) -> None:
        """``fence`` of tensors that a module is about to read; it tells in what order things are needed."""
        self.ledger.note_reads(what, tensors)
        self.fence(tensors, what)

    @_reading
    def fence(self, tensors: Iterable[Tensor], what: str) -> None:
        """Lets the current stream wait for those of the tensors that are arriving.

        Raises:
            OffloadedError: one is on the host; or gradients are, and this may be followed by a backward.
        """
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

    @_reading
    def fence_group(self, group: str) -> None:
        """``fence`` of all that a group holds."""
        for held in self.ledger.held(*_GONE, groups=(group,)):
            raise OffloadedError(self._complaint(held, f"a use of the {group}"))
        self._fence(self.ledger.held(Where.ARRIVING, groups=(group,)))

    @transaction
    def _require_gradients(self, what: str) -> None:
        self._fence(self.ledger.held(Where.ARRIVING, groups=(GRADS,)))
        for held in self.ledger.held(groups=(GRADS,)):
            if self._gradients.still_used(held.tensors):
                raise OffloadedError(self._complaint(held, what))

    def _fence(self, holdings: Iterable[Holding]) -> None:
        """Lets the current stream wait for copies; storages that arrive before the youngest of them are fenced too."""
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
            self._wait_for_room()
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
        """Puts up the guards that are needed while these are away."""
        groups = {held.group for held in holdings}
        if holdings and self.guards is not None:
            self.guards.install(of_modules=groups != {OPTIMIZER})
        if groups.intersection(_READ_BY_FORWARDS):
            self._gates.install()
        if GRADS in groups:
            self._gradients.guard()

    def _settle(self, holdings: Iterable[Holding]) -> None:
        """These are on the device: their tensors and guards are as they were."""
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
