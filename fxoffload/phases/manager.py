"""The four phases of a colocated RL step: everything of training leaves the device and returns, unnoticed.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from fxoffload._torch_private import StorageWeakRef
from fxoffload.phases import sharded
from fxoffload.phases.gates import Gates
from fxoffload.phases.guards import Guards
from fxoffload.phases.handle import Handle, Handles
from fxoffload.phases.host_image import HostImage
from fxoffload.phases.inventory import Inventory, plain_tensors
from fxoffload.phases.metrics import Transition, summed
from fxoffload.phases.mover import Mover, is_done
from fxoffload.phases.phase import (
    BUFFERS,
    EXTRA,
    GRADS,
    GROUPS,
    OPTIMIZER,
    PARAMS,
    Phase,
    PhaseOptions,
    as_groups,
    leaving,
    returning,
)
from fxoffload.phases.sentinel import OffloadedError, bring_back, holdings_of, send_away, untouched
from fxoffload.phases.storages import Holding, Where
from fxoffload.phases.worker import Worker
from fxoffload.runtime.host_arena import CudaPinner, HeapMemory
from fxoffload.runtime.host_limits import default_host_budget_bytes
from fxoffload.runtime.streams import CopyStreams, Wait
from fxoffload.sizes import format_bytes, parse_bytes

_KEPT_TRANSITIONS = 10_000


class PhaseManager:
    """Moves parameters, gradients, optimizer state and buffers between a device and pinned host memory.

    Every tensor object, its strides and what shares memory with it stay as they are; see ``Phase`` for who is where.

    Args:
        model: a module, or a sequence or mapping of modules: plain, compiled, DDP, FSDP1, FSDP2, DTensor, LoRA.
        optimizer: an optimizer, or whatever ``fxoffload.phases.optimizers.leaves`` can take apart.
        extra: other things that training needs on the device (an EMA copy): name to tensor, module or tree of tensors.
        device_types: the devices that memory is wanted back on. ``("cpu",)`` is the rehearsal: memory of the CPU is
            really freed, and bytes are really moved.
        grads: "keep" moves gradients like everything else, "drop" sets them to None when they should leave, "error"
            raises if there are any.
        offload_optimizer_for_logprob: whether the optimizer's state leaves before log-probs are computed. It costs two
            transitions and is not needed where both fit.
        offload_optimizer_for_refit: whether it leaves before weights are synchronised.
        host_limit: bytes ("200GiB") of host memory; by default this process' share of the machine or its control group.
        pin: whether to pin that memory. Pageable copies are five to fifty times slower.
        empty_cache: whether an offload that is waited for returns the freed memory to the driver, where another process
            or allocator can have it.
        overlap: whether ``enter`` returns while copies are under way; everything is fenced.

    Raises:
        TypeError: something is not a module, an optimizer or a tensor.
        ValueError: an option has an unknown value.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: Any = None,
        *,
        extra: Mapping[str, Any] | None = None,
        device_types: Sequence[str] = ("cuda",),
        grads: str = "keep",
        offload_optimizer_for_logprob: bool = False,
        offload_optimizer_for_refit: bool = True,
        host_limit: int | str | None = None,
        pin: bool = True,
        empty_cache: bool = True,
        overlap: bool = True,
        make_copies: Callable[[torch.device], CopyStreams] | None = None,
    ) -> None:
        self._options = PhaseOptions(grads, offload_optimizer_for_logprob, offload_optimizer_for_refit)
        self._inventory = Inventory(model, optimizer, extra)
        self._device_types = frozenset(device_types)
        self._empty_cache = empty_cache
        self._overlap = overlap
        limit = None if host_limit is None else parse_bytes(host_limit, "host_limit")
        device = self._find_device()
        pinner = CudaPinner(device) if pin and device.type == "cuda" else HeapMemory()
        self.image = HostImage(pinner, lambda: limit or default_host_budget_bytes(), pin=pin and device.type == "cuda")
        self._mover = Mover(self.image, make_copies)
        self._worker = Worker("fxoffload-phases")
        self._gates = Gates(self.models, self._pass)
        self._guards = Guards(self)
        self._lock = threading.RLock()
        self._held: dict[int, Holding] = {}  # by the storage's address: everything that is not just on the device
        self._homes: dict[int, tuple[Any, Holding]] = {}  # blocks of what is on the device, to be used again
        self._grad_hooks: list[Any] = []
        self._ranks: dict[str, int] = {}  # in which order modules read what arrived
        self._latest: dict[str, Transition] = {}
        self.transitions: list[Transition] = []
        self.phase_now: Phase | None = None
        self._entering = ""
        self._reserve()

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name; the name of a single one is ""."""
        return self._inventory.models

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that hold state."""
        return self._inventory.optimizers

    def where(self, group: str) -> Where:
        """Where a group is. Of a group that is in several places the least finished: a transition, then the host."""
        as_groups((group,))
        with self._lock:
            self._harvest()
            found = {held.where for held in self._held.values() if held.group == group}
        for where in (Where.LEAVING, Where.ARRIVING, Where.HOST):
            if where in found:
                return where
        return Where.DEVICE

    @property
    def state(self) -> str:
        """One line that says what is where."""
        with self._lock:
            sizes: dict[str, int] = {}
            for held in self._held.values():
                key = f"{held.group} {held.where.value}"
                sizes[key] = sizes.get(key, 0) + held.nbytes
        phase = f"phase {self.phase_now.value}" if self.phase_now is not None else "no phase entered"
        if not sizes:
            return f"{phase}; everything is on the device"
        return f"{phase}; " + ", ".join(f"{key} ({format_bytes(size)})" for key, size in sizes.items())

    def holding_of(self, tensor: Tensor) -> Holding | None:
        """What an away tensor lies in; None for a tensor at home, or one we do not know."""
        own = [held for held in holdings_of(tensor) if held.owner is self]
        return own[0] if own else None

    def host_pieces(self, holding: Holding) -> Iterator[tuple[int, Tensor]]:
        """(offset, bytes) of a holding in the host image, without a copy."""
        assert holding.block is not None
        return self.image.pieces(holding.block, holding.nbytes)

    def copies(self, device: torch.device) -> CopyStreams:
        """The copy streams of a device."""
        return self._mover.copies(device)

    def host_copy(self, tensor: Tensor) -> Tensor:
        """The values of a tensor in memory of its own on the CPU, with the tensor's shape and strides.

        Read from the host image where the tensor is away, else copied from the device. Of a wrapper (DTensor) it is the
        plain tensor inside.
        """
        with untouched():
            inner = list(plain_tensors(tensor))
        if len(inner) != 1:
            raise NotImplementedError(
                f"expected a tensor with one storage, found {type(tensor).__name__} with {len(inner)}"
            )
        plain = inner[0]
        holding = self.holding_of(plain)
        if holding is not None and holding.where is Where.LEAVING:
            self._worker.drain()
            holding = self.holding_of(plain)
        if holding is None:
            return plain.detach().to("cpu", copy=True, memory_format=torch.preserve_format)
        with untouched():
            return _read(plain, self.host_pieces(holding))

    # -- moving --------------------------------------------------------------------------------------------------------

    def offload(self, *groups: str, wait: bool = True) -> Handle:
        """Moves groups to the host.

        Args:
            groups: of "params", "grads", "optimizer", "buffers", "extra"; none means all.
            wait: whether to return when the memory is free. Else the copies run behind what follows; the memory is free
                for this process when the handle is done, and for others when it was waited for.

        Raises:
            ValueError: an unknown group.
            RuntimeError: gradients exist and ``grads="error"``; or FSDP is in the middle of a step.
            HostMemoryError: the host has no room (from ``wait()``); nothing was moved then.
        """
        wanted = as_groups(groups)
        began = time.perf_counter()
        with record_function(f"fxoffload::offload({','.join(wanted)})"), self._lock:
            transition = self._new("offload", wanted)
            free_before = self._free_bytes()
            self._harvest()
            self._fence([held for held in self._held.values() if held.where is Where.ARRIVING])
            self._check_grads(wanted)
            holdings = self._find(wanted)
            transition.nbytes = sum(held.nbytes for held in holdings)
            handle = Handle(f"offload of {', '.join(wanted)}", lambda: self._freed(transition, free_before))
            self._mover.before_leaving(holdings)
            self._mark_leaving(holdings)
            self._worker.submit(lambda: self._leave(holdings, transition, handle))
        if wait:
            handle.wait()
            transition.host_wait_seconds = time.perf_counter() - began if holdings else 0.0
        return handle

    def onload(self, *groups: str, wait: bool = True) -> Handle:
        """Moves groups back to the device.

        Args:
            groups: as of ``offload``.
            wait: whether to return when everything has arrived. Else each tensor and each module waits for its own.

        Raises:
            ValueError: an unknown group.
            torch.OutOfMemoryError: the device has no room; everything is on the host as before.
        """
        wanted = as_groups(groups)
        began = time.perf_counter()
        with record_function(f"fxoffload::onload({','.join(wanted)})"):
            with self._lock:
                leaving_now = any(h.where is Where.LEAVING and h.group in wanted for h in self._held.values())
            if leaving_now:
                self._worker.drain()
            with self._lock:
                transition = self._new("onload", wanted)
                self._harvest()
                holdings = self._returning(wanted)
                transition.nbytes = sum(held.nbytes for held in holdings)
                pending = [h for h in self._held.values() if h.where is Where.ARRIVING and h.group in wanted]
                handle = Handle(f"onload of {', '.join(wanted)}")
                self._arrive(holdings, transition)
                for held in holdings:
                    self._latest[held.group] = transition
                self._worker.submit(lambda: self._arrived([*pending, *holdings], transition, handle))
        if wait:
            handle.wait()
            transition.host_wait_seconds = time.perf_counter() - began if holdings or pending else 0.0
        return handle

    def enter(self, phase: Phase | str) -> Handle:
        """Moves what a phase needs to the device and what it does not need to the host; see ``Phase``.

        Returns at once for every phase but the rollout, whose memory is free when it returns: what arrives is fenced.
        Entering the phase one is in moves what is not where it belongs, which is normally nothing.
        """
        phase = Phase.of(phase)
        out, back = leaving(phase, self._options), returning(phase)
        handles: list[Handle] = []
        with record_function(f"fxoffload::enter({phase.value})"), self._naming(phase):
            if out and self._options.grads == "error":
                self._check_grads(out)
            self.phase_now = phase
            if out:
                handles.append(self.offload(*out, wait=phase is Phase.ROLLOUT))
            first = tuple(group for group in back if group in (GRADS, BUFFERS, PARAMS))
            for groups in (first, tuple(group for group in back if group not in first)):
                if groups:
                    handles.append(self.onload(*groups, wait=False))
        handle = Handles(f"enter {phase.value}", handles)
        if not self._overlap:
            handle.wait()
        return handle

    @contextlib.contextmanager
    def phase(self, phase: Phase | str, then: Phase | str | None = None) -> Iterator[PhaseManager]:
        """Enters a phase. With ``then``, what that next phase does not need begins to leave at the end of the block."""
        following = None if then is None else Phase.of(then)
        self.enter(phase)
        yield self
        if following is not None:
            self.prepare(following)

    def prepare(self, next_phase: Phase | str) -> Handle:
        """Starts to offload, in the background, what the next phase does not need and the present one is done with.

        After training that is the optimizer's state and the gradients; parameters may still be read (weight sync), so
        they leave when the next phase is entered. After a sync or log-probs, everything the next one does not need.
        """
        phase = Phase.of(next_phase)
        out = leaving(phase, self._options)
        if self.phase_now is Phase.TRAIN:
            out = tuple(group for group in out if group not in (PARAMS, BUFFERS))
        with self._naming(phase):
            return self.offload(*out, wait=False) if out else Handles(f"prepare {phase.value}", [])

    def fence(self, tensors: Iterable[Tensor]) -> None:
        """Lets the current stream wait for those of the tensors that are arriving.

        Raises:
            OffloadedError: one is on the host.
        """
        self._pass(list(tensors), "reading it")

    def fence_group(self, group: str) -> None:
        """``fence`` of all that a group holds."""
        with self._lock:
            away = [held for held in self._held.values() if held.group == group]
            for held in away:
                if held.where in (Where.HOST, Where.LEAVING):
                    raise OffloadedError(self._complaint(held, f"a use of the {group}"))
            self._fence(away)

    # -- host memory and records ---------------------------------------------------------------------------------------

    def release_host_memory(self) -> int:
        """Returns the host image to the operating system. Returns its bytes.

        Raises:
            RuntimeError: something is offloaded.
        """
        self._worker.drain()
        with self._lock:
            self._harvest()
            if self._held:
                raise RuntimeError(
                    f"expected everything on the device, found {self.state}: call onload() before release_host_memory()"
                )
            for _, holding in self._homes.values():
                self._give_up_block(holding)
            self._homes.clear()
            return self.image.release()

    def metrics(self, *, reset: bool = True) -> dict[str, float]:
        """A flat dict of what the transitions since the last call took: seconds, bytes, GB/s, exposed seconds.

        Args:
            reset: whether to begin anew.
        """
        with self._lock:
            found = summed(self.transitions, self.image.reserved_bytes, [phase.value for phase in Phase])
            if reset:
                self.transitions.clear()
        return found

    def close(self) -> None:
        """Brings everything back to the device and returns the host memory. The manager can be used again."""
        self.onload()
        self._gates.remove()
        self._guards.close()
        self.release_host_memory()
        self._worker.stop()

    def __enter__(self) -> PhaseManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- called by away tensors, gates and hooks -----------------------------------------------------------------------

    def touched(self, holding: Holding, what: str) -> None:
        """See ``fxoffload.phases.storages.Owner``."""
        with self._lock:
            if holding.where in (Where.HOST, Where.LEAVING):
                raise OffloadedError(self._complaint(holding, what))
            self._fence([holding])

    def _pass(self, tensors: list[Tensor], what: str) -> None:
        with self._lock:
            away: dict[int, Holding] = {}
            for tensor in tensors:
                for held in holdings_of(tensor):
                    if held.owner is not self:
                        held.owner.touched(held, what)
                    elif held.where in (Where.HOST, Where.LEAVING):
                        raise OffloadedError(self._complaint(held, what))
                    else:
                        away[id(held)] = held
                        self._ranks.setdefault(held.name, len(self._ranks))
            self._fence(away.values())
            if torch.is_grad_enabled():
                self._require_grads(what)

    def _require_grads(self, what: str) -> None:
        # A backward adds to .grad in C++, where no class stops it.
        for held in list(self._held.values()):
            if held.group == GRADS:
                if held.where is Where.ARRIVING:
                    self._fence([held])
                elif any(
                    tensor is owner.grad for _, owner in self._inventory.gradient_owners() for tensor in held.tensors
                ):
                    raise OffloadedError(self._complaint(held, what))

    def _complaint(self, holding: Holding, what: str) -> str:
        way = "being offloaded" if holding.where is Where.LEAVING else "offloaded"
        return (
            f"{what} needs {holding.name} ({format_bytes(holding.nbytes)} of the {holding.group}) on {holding.device}, "
            f"but it is {way}: {self.state}. Call onload({holding.group!r}) or "
            f"enter({self._phase_with(holding.group)!r}) first"
        )

    def _phase_with(self, group: str) -> str:
        return Phase.LOGPROB.value if group in (PARAMS, BUFFERS) and not torch.is_grad_enabled() else Phase.TRAIN.value

    # -- inside --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _naming(self, phase: Phase) -> Iterator[None]:
        before, self._entering = self._entering, phase.value
        try:
            yield
        finally:
            self._entering = before

    def _new(self, kind: str, groups: tuple[str, ...]) -> Transition:
        transition = Transition(kind, groups, self._entering)
        self.transitions.append(transition)
        del self.transitions[:-_KEPT_TRANSITIONS]
        return transition

    def _find_device(self) -> torch.device:
        for group in (PARAMS, BUFFERS, EXTRA):
            for _, tensor in self._inventory.collect(group):
                if tensor.device.type in self._device_types:
                    return tensor.device
        return (
            torch.device("cuda") if "cuda" in self._device_types and torch.cuda.is_available() else torch.device("cpu")
        )

    def _storages(self) -> dict[int, Holding]:
        """Every storage of every group, new ones as fresh holdings, with all the tensors on it."""
        found: dict[int, Holding] = {}
        for group in self._inventory.order(GROUPS):
            for name, tensor in self._inventory.collect(group):
                with untouched():
                    plains = [plain for plain in plain_tensors(tensor) if plain.device.type in self._device_types]
                    for plain in plains:
                        self._add(found, group, name, tensor, plain)
        return found

    def _add(self, found: dict[int, Holding], group: str, name: str, tensor: Tensor, plain: Tensor) -> None:
        storage = plain.untyped_storage()
        key = storage._cdata
        holding = found.get(key) or self._held.get(key)
        if holding is None:
            if storage.nbytes() == 0 or not storage.resizable():
                return
            holding = Holding(storage, storage.nbytes(), plain.device, group, name, self)
            home = self._homes.get(key)
            if home is not None and not home[0].expired() and home[1].nbytes == holding.nbytes:
                holding.block, holding.event = home[1].block, home[1].event
        found[key] = holding
        for one in (tensor, plain):
            if not any(one is known for known in holding.tensors):
                holding.tensors.append(one)
                if holding.where is not Where.DEVICE:
                    send_away(one, holding)

    def _find(self, groups: tuple[str, ...]) -> list[Holding]:
        """What is on the device of these groups, in the order in which it leaves."""
        if PARAMS in groups:
            for model in self.models.values():
                sharded.settle(model)
        self._drop_expired()
        found = [held for held in self._storages().values() if held.where is Where.DEVICE and held.group in groups]
        return sorted(found, key=lambda held: groups.index(held.group))

    def _drop_expired(self) -> None:
        for key, (alive, holding) in list(self._homes.items()):
            if alive.expired():
                del self._homes[key]
                self._give_up_block(holding)

    def _give_up_block(self, holding: Holding) -> None:
        if holding.block is not None:
            if not is_done(holding.event):
                holding.event.synchronize()
            self.image.free(holding.block)
            holding.block = None

    def _mark_leaving(self, holdings: list[Holding]) -> None:
        for held in holdings:
            held.where = Where.LEAVING
            key = held.storage._cdata
            self._homes.pop(key, None)
            self._held[key] = held
            for tensor in held.tensors:
                send_away(tensor, held)
        if any(held.group in (PARAMS, BUFFERS, GRADS) for held in holdings):
            self._gates.install()
        if holdings:
            self._guards.install()
        if any(held.group == GRADS for held in holdings):
            self._guard_backward()

    def _guard_backward(self) -> None:
        def refuse(gradient: Tensor) -> None:
            with self._lock:
                self._require_grads("a backward")

        for _, owner in self._inventory.gradient_owners():
            if owner.grad is not None and owner.requires_grad and owner.is_leaf:
                self._grad_hooks.append(owner.register_hook(refuse))

    def _leave(self, holdings: list[Holding], transition: Transition, handle: Handle) -> None:
        """In the background thread."""
        error: BaseException | None = None
        try:
            self._mover.leave(holdings, self._empty)
            transition.finish()
        except BaseException as caught:
            error, transition.failed = caught, True
            self._roll_back(holdings)
        transition.host_bytes = self.image.reserved_bytes
        handle.complete(error)

    def _empty(self, holding: Holding) -> None:
        with self._lock:
            holding.storage.resize_(0)
            holding.where = Where.HOST

    def _roll_back(self, holdings: list[Holding]) -> None:
        with self._lock:
            gone = [held for held in holdings if held.where is Where.HOST]
            self._settle([held for held in holdings if held.where is Where.LEAVING])
            with contextlib.suppress(RuntimeError):  # no room on the device: it stays on the host, whole
                self._mover.arrive(gone, self._emptied)
                for held in gone:
                    if held.event is not None:
                        held.event.synchronize()
                self._settle(gone)

    def _emptied(self, holding: Holding) -> None:
        holding.storage.resize_(0)
        holding.event, holding.where = None, Where.HOST

    def _returning(self, groups: tuple[str, ...]) -> list[Holding]:
        """What is on the host of these groups, in the order in which it is needed."""
        order = (GRADS, BUFFERS, PARAMS, OPTIMIZER, EXTRA)
        found = [held for held in self._held.values() if held.where is Where.HOST and held.group in groups]
        known = len(self._ranks)
        return sorted(found, key=lambda held: (order.index(held.group), self._ranks.get(held.name, known)))

    def _arrive(self, holdings: list[Holding], transition: Transition) -> None:
        try:
            try:
                self._mover.arrive(holdings, self._emptied)
            except torch.OutOfMemoryError:
                # What is leaving may make the room.
                self._worker_may_free()
                self._mover.arrive(holdings, self._emptied)
        except BaseException:
            transition.failed = True
            raise
        self._settle([held for held in holdings if held.event is None])

    def _worker_may_free(self) -> None:
        leaving_now = [held for held in self._held.values() if held.where is Where.LEAVING]
        if not leaving_now:
            raise
        while any(held.where is Where.LEAVING for held in leaving_now):
            self._lock.release()
            try:
                self._worker.drain()
            finally:
                self._lock.acquire()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _arrived(self, holdings: list[Holding], transition: Transition, handle: Handle) -> None:
        """In the background thread."""
        error: BaseException | None = None
        try:
            for held in holdings:
                event = held.event
                if held.where is Where.ARRIVING and event is not None:
                    event.synchronize()
            transition.finish()
            with self._lock:
                self._settle([held for held in holdings if held.where is Where.ARRIVING and is_done(held.event)])
        except BaseException as caught:
            error, transition.failed = caught, True
        transition.host_bytes = self.image.reserved_bytes
        handle.complete(error)

    def _harvest(self) -> None:
        self._settle([held for held in self._held.values() if held.where is Where.ARRIVING and is_done(held.event)])

    def _fence(self, holdings: Iterable[Holding]) -> None:
        """Lets the current stream wait for copies; what arrives before the youngest of them is fenced too."""
        arriving = [held for held in holdings if held.where is Where.ARRIVING]
        for device in {held.device for held in arriving}:
            last = max((held for held in arriving if held.device == device), key=lambda held: held.serial)
            transition = self._latest.get(last.group)
            if device.type == "cuda" and transition is not None:
                if not is_done(last.event):
                    transition.let_wait(torch.cuda.current_stream(device), last.event)
            else:
                self.copies(device).compute_waits_for(last.event, Wait.TARGET_READY)
            self._settle(
                [
                    held
                    for held in self._held.values()
                    if held.where is Where.ARRIVING and held.device == device and held.serial <= last.serial
                ]
            )

    def _settle(self, holdings: Iterable[Holding]) -> None:
        """These are on the device again: their tensors get their classes back."""
        for held in holdings:
            held.where = Where.DEVICE
            key = held.storage._cdata
            self._held.pop(key, None)
            for tensor in held.tensors:
                bring_back(tensor, held)
            # The image's block stays for the next time; the tensors and the storage are the user's to drop.
            self._homes[key] = (StorageWeakRef(held.storage), held)
            held.tensors = []
            held.storage = None  # type: ignore[assignment]
        if not any(held.group == GRADS for held in self._held.values()):
            hooks, self._grad_hooks = self._grad_hooks, []
            for hook in hooks:
                hook.remove()
        if self._gates.shut and not any(held.group in (PARAMS, BUFFERS, GRADS) for held in self._held.values()):
            self._gates.remove()
        if not self._held:
            self._guards.remove()

    def _check_grads(self, groups: tuple[str, ...]) -> None:
        if GRADS not in groups or self._options.grads == "keep":
            return
        owners = [(name, owner) for name, owner in self._inventory.gradient_owners() if owner.grad is not None]
        if self._options.grads == "error" and owners:
            raise RuntimeError(
                f'expected no gradients (grads="error"), found {len(owners)}, the first of {owners[0][0]}: call '
                'optimizer.zero_grad(), or choose grads="keep" or "drop"'
            )
        for _, owner in owners:
            owner.grad = None

    def _free_bytes(self) -> int:
        device = self._find_device()
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0

    def _freed(self, transition: Transition, free_before: int) -> None:
        device = self._find_device()
        if device.type == "cuda":
            if self._empty_cache:
                torch.cuda.empty_cache()
            transition.freed_bytes = max(torch.cuda.mem_get_info(device)[0] - free_before, 0)
        else:
            transition.freed_bytes = transition.nbytes

    def _reserve(self) -> None:
        """Begins to pin what is known; the optimizer's state is known after its first step."""
        wanted = [group for group in GROUPS if group != GRADS or self._options.grads == "keep"]
        self.image.reserve(sum(held.nbytes for held in self._storages().values() if held.group in wanted))
        for optimizer in self.optimizers:
            if hasattr(optimizer, "register_step_post_hook") and not getattr(optimizer, "state", None):
                self._reserve_after_a_step(optimizer)

    def _reserve_after_a_step(self, optimizer: Any) -> None:
        def reserve(*_: Any) -> None:
            hook.remove()
            with self._lock:
                known = self._storages().values()
                self.image.reserve(
                    sum(held.nbytes for held in known if held.group != GRADS or self._options.grads == "keep")
                )

        hook = optimizer.register_step_post_hook(reserve)


def _read(plain: Tensor, pieces: Iterator[tuple[int, Tensor]]) -> Tensor:
    """A copy of a tensor out of the bytes of its storage."""
    size, start = plain.element_size(), plain.storage_offset() * plain.element_size()
    extent = (
        1 + sum((n - 1) * step for n, step in zip(plain.shape, plain.stride(), strict=True)) if plain.numel() else 0
    )
    found = torch.empty(extent * size, dtype=torch.uint8)
    for at, host in pieces:
        begin, end = max(at, start), min(at + host.numel(), start + extent * size)
        if begin < end:
            found[begin - start : end - start] = host[begin - at : end - at]
    return torch.as_strided(found.view(plain.dtype), plain.shape, plain.stride())
