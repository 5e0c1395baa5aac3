"""The four phases of a colocated RL step: everything of training leaves the device and returns, unnoticed."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from fxoffload.environment import check_device_types
from fxoffload.errors import in_brief
from fxoffload.phases.claims import claim, give_up
from fxoffload.phases.guarding.guards import Guards
from fxoffload.phases.guarding.sentinel import holdings_of, untouched
from fxoffload.phases.handle import Handle, Handles
from fxoffload.phases.inventory import Inventory, find_device
from fxoffload.phases.metrics import Transition, summed
from fxoffload.phases.moving.host_image import HostImage
from fxoffload.phases.moving.host_reads import read_tensor
from fxoffload.phases.moving.storages import Holding, Where, plain_tensors
from fxoffload.phases.phase import BUFFERS, GRADS, GROUPS, PARAMS, Phase, PhaseOptions, as_groups, leaving, returning
from fxoffload.phases.transit import Transit
from fxoffload.phases.weight_sync.plans import WeightPlans
from fxoffload.phases.weight_sync.weights import WeightsOnDevice, WeightStream, stream_weights, weights_on_device
from fxoffload.runtime.copies.streams import CopyStreams
from fxoffload.runtime.host_memory.limits import default_host_budget_bytes
from fxoffload.runtime.host_memory.pinners import CudaPinner, HeapMemory
from fxoffload.sizes import parse_bytes

log = logging.getLogger(__name__)

_KEPT_TRANSITIONS = 10_000


class PhaseManager:
    """Moves parameters, gradients, optimizer state and buffers between a device and pinned host memory.

    Every tensor object, its strides and its sharing of memory stay as they are; see ``Phase`` for where each group is.

    Args:
        model: a module, or a sequence or mapping of modules: plain, compiled, DDP, FSDP1, FSDP2, DTensor, LoRA.
        optimizer: an optimizer, or any object that ``fxoffload.phases.optimizers.leaves`` can take apart.
        extra: other things that training needs on the device (an EMA copy): name to tensor, module or tree of tensors.
        device_types: the devices that memory is wanted back on. ``("cpu",)`` is the rehearsal: memory of the CPU is
            really freed, and bytes are really moved.
        grads: "keep" moves gradients like everything else, "drop" sets them to None when they should leave, "error"
            raises if there are any.
        offload_optimizer_for_logprob: whether the optimizer's state leaves before log-probs are computed. It costs two
            transitions and is not needed where both fit.
        offload_optimizer_for_refit: whether it leaves before weights are synchronised.
        host_limit: most bytes ("200GiB") of host memory, pinned and pageable. By default this process' share of the
            machine or its control group is pinned, and the rest is pageable.
        pin: whether to pin that memory. Pageable copies are five to fifty times slower.
        empty_cache: whether an offload that is waited for returns the freed memory to the driver, where another process
            or allocator can have it.
        overlap: whether ``enter`` returns while copies are under way; everything is fenced.
        make_copies: makes the copy streams of a device, in place of CUDA streams: for tests.

    Raises:
        TypeError: something is not a module, an optimizer or a tensor.
        ValueError: an option has an unknown value (of ``device_types``, OptionsError), or there is nothing to move.
        RuntimeError: another manager, which was not closed, has some of the tensors or optimizers.
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
        self._overlap = overlap
        types = frozenset(check_device_types(device_types))
        claim(self._inventory, types)
        limit = None if host_limit is None else parse_bytes(host_limit, "host_limit")
        device = find_device(self._inventory, types)
        pin = pin and device.type == "cuda"
        pinner = CudaPinner(device) if pin else HeapMemory()
        self.image = HostImage(
            pinner, lambda: default_host_budget_bytes() if limit is None else limit, pin=pin, total_limit_bytes=limit
        )
        self._transit = Transit(
            self._inventory,
            self.image,
            types,
            grads=grads,
            empty_cache=empty_cache,
            make_copies=make_copies,
            state=lambda: self.state,
        )
        self._guards = self._transit.guards = Guards(self)
        self._guards.watch(self.optimizers)
        self.weight_plans = WeightPlans()
        self._blocks: list[weakref.ref[_Block]] = []
        self.transitions: list[Transition] = []
        self.phase_now: Phase | None = None
        self._pending: list[Any] = []  # work that waits for an optimizer's first step
        self._reserve()
        self._transit.warn_of_what_stays(GROUPS)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name; the name of a single one is ""."""
        return self._inventory.models

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The models, and the extra modules."""
        return self._inventory.modules

    @property
    def device_types(self) -> frozenset[str]:
        """The devices whose memory is wanted back."""
        return self._transit.device_types

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that hold state."""
        return self._inventory.optimizers

    def where(self, group: str) -> Where:
        """Where a group is. Of a group that is in several places the least finished: a transition, then the host."""
        as_groups((group,))
        return self._transit.where(group)

    @property
    def state(self) -> str:
        """The phase and where each group is, in one line."""
        phase = f"phase {self.phase_now.value}" if self.phase_now is not None else "no phase entered"
        return f"{phase}; {self._transit.describe()}"

    def holding_of(self, tensor: Tensor) -> Holding | None:
        """The storage that an away tensor lies in; None for a tensor at home, or one we do not know."""
        own = [held for held in holdings_of(tensor) if held.owner is self._transit]
        return own[0] if own else None

    def host_pieces(self, holding: Holding) -> list[tuple[int, Tensor]]:
        """(offset, bytes) of a holding in the host image, without a copy: the next offload writes over them."""
        assert holding.block is not None
        return self.image.pieces(holding.block, holding.nbytes)

    def copies(self, device: torch.device) -> CopyStreams:
        """The copy streams of a device, for a stream of weights."""
        return self._transit.mover.copies(device)

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
            self.drain()
            holding = self.holding_of(plain)
        if holding is None:
            return plain.detach().to("cpu", copy=True, memory_format=torch.preserve_format)
        with untouched():
            return read_tensor(plain, self.host_pieces(holding))

    # -- moving --------------------------------------------------------------------------------------------------------

    def offload(self, *groups: str, wait: bool = True) -> Handle:
        """Moves groups to the host, as they are when the current stream has done its queued work.

        No other thread and no other stream may use them when this is called, be it to read: neither can be waited for.

        Args:
            groups: of "params", "grads", "optimizer", "buffers", "extra"; none means all.
            wait: whether to return when the memory is free, for other processes too. Else the copies run in the
                background. The memory is free for this process when the handle is done. It is free for others after the
                next ``offload`` that waits (as that of a rollout does).

        Raises:
            ValueError: an unknown group.
            RuntimeError: gradients exist and ``grads="error"``; or FSDP is in the middle of a step.
            HostMemoryError: the host has no room (from ``wait()``); nothing was moved then.
        """
        self._inventory.warn_of_absent(groups)
        return self._offload(groups, wait, "")

    def onload(self, *groups: str, wait: bool = True) -> Handle:
        """Moves groups back to the device.

        Args:
            groups: as of ``offload``.
            wait: whether to return when everything has arrived. Else each tensor and each module waits for its own, but
                not a backward whose forward ran before the offload: wait for the handle then.

        Raises:
            ValueError: an unknown group.
            torch.OutOfMemoryError: the device has no room; everything is on the host as before. With ``wait=False`` the
                handle, or the manager's next call, raises it; tensors that had arrived by then stay on the device.
        """
        return self._onload(groups, wait, "")

    def enter(self, phase: Phase | str) -> Handle:
        """Moves the groups that a phase needs to the device, and the others to the host; see ``Phase``.

        Returns at once for every phase but the rollout, whose memory is free when it returns: arriving tensors are
        fenced. Entering the phase one is in moves tensors that are not where they belong, normally none.
        """
        phase = Phase.of(phase)
        out, back = leaving(phase, self._options), returning(phase)
        first = tuple(group for group in back if group in (GRADS, BUFFERS, PARAMS))
        handles: list[Handle] = []
        self._transit.report()
        before = self.phase_now, {group: self.where(group) for group in (*out, *back)}
        with record_function(f"fxoffload::enter({phase.value})"):
            self.phase_now = phase
            try:
                if out:
                    handles.append(self._offload(out, phase is Phase.ROLLOUT, phase.value))
                for groups in (first, tuple(group for group in back if group not in first)):
                    if groups:
                        handles.append(self._onload(groups, not self._overlap, phase.value))
            except BaseException:
                self._return_to(*before)
                raise
        handle = Handles(f"enter {phase.value}", handles)
        return handle if self._overlap else handle.wait()

    def _return_to(self, phase: Phase | None, places: dict[str, Where]) -> None:
        """Entering a phase failed: every group goes where it was, as far as that can be done."""
        self.phase_now = phase
        for groups, move in (
            (tuple(g for g, where in places.items() if where in (Where.HOST, Where.LEAVING)), self._offload),
            (tuple(g for g, where in places.items() if where in (Where.DEVICE, Where.ARRIVING)), self._onload),
        ):
            try:
                if groups:
                    move(groups, True, "")
            except Exception as error:
                log.warning("could not undo what was moved before a phase could not be entered: %s", in_brief(error))

    def phase(
        self, phase: Phase | str, then: Phase | str | None = None
    ) -> contextlib.AbstractContextManager[PhaseManager]:
        """Enters a phase; a block inside another one's returns to the outer phase at its end, also by an exception.

        With ``then``, the groups that the next phase does not need begin to leave at the end of the block instead, if
        it ends without an exception. After one, errors on the way to the outer phase are logged.
        """
        return _Block(self, Phase.of(phase), None if then is None else Phase.of(then))

    def _blocks_around(self, block: _Block) -> list[_Block]:
        """Those that are entered. One that an exception came into the way of is gone, and counts no more."""
        found = [one for ref in self._blocks if (one := ref()) is not None and one is not block]
        self._blocks = [weakref.ref(one) for one in found]
        return found

    def _end_block(self, block: _Block, failed: bool) -> None:
        around = self._blocks_around(block)
        if failed:
            if around:
                self._enter_again(around[-1].phase)
            return
        if block.then is not None:
            self.prepare(block.then)
        elif around:
            self.enter(around[-1].phase)
        self._transit.report()

    def _enter_again(self, phase: Phase) -> None:
        """After an exception, which this must not hide."""
        # An error in the background would be raised by the first call, in place of the transition.
        for step in (self._transit.report, lambda: self.enter(phase)):
            try:
                step()
            except Exception as error:
                log.warning("on the way from an exception back to the phase %s: %s", phase.value, in_brief(error))

    def prepare(self, next_phase: Phase | str) -> Handle:
        """Starts to offload, in the background, groups that the present phase is done with and the next does not need.

        After training that is the optimizer's state and the gradients; parameters may still be read (weight sync), so
        they leave when the next phase is entered. After a sync or log-probs, everything the next one does not need.
        """
        phase = Phase.of(next_phase)
        out = leaving(phase, self._options)
        if self.phase_now is Phase.TRAIN:
            out = tuple(group for group in out if group not in (PARAMS, BUFFERS))
        return self._offload(out, False, phase.value) if out else Handles(f"prepare {phase.value}", [])

    def fence(self, tensors: Iterable[Tensor]) -> None:
        """Lets the current stream wait for those of the tensors that are arriving.

        Raises:
            OffloadedError: one is on the host.
        """
        self._transit.fence(tensors, "reading it")

    def fence_group(self, group: str) -> None:
        """``fence`` of all that a group holds."""
        self._transit.fence_group(group)

    def drain(self) -> None:
        """Waits until everything that was leaving has left."""
        self._transit.worker.drain()

    # -- weight sync ---------------------------------------------------------------------------------------------------

    def stream_weights(
        self,
        bucket_bytes: int | str = "512MiB",
        dtype: torch.dtype | None = None,
        full: bool = True,
        *,
        device: torch.device | str | None = None,
        names: Collection[str] | None = None,
        model: str | None = None,
        as_saved: bool | None = None,
    ) -> WeightStream:
        """(name, tensor on the device) of every weight, in buckets, from wherever they are; the model stays there.

        Names and shapes are those that ``save_pretrained`` writes; with ``as_saved=False`` those in memory. See
        ``fxoffload.phases.weight_sync.weights.stream_weights`` for the arguments.
        """
        transition = Transition("stream", (PARAMS, BUFFERS))

        def ended(stream: WeightStream) -> None:
            transition.nbytes = stream.delivered_bytes
            transition.stream = stream.still
            transition.finish()
            self._record(transition)

        return stream_weights(self, bucket_bytes, dtype, full, device, names, model, as_saved, ended)

    def weights_on_device(
        self, model: str | None = None, as_saved: bool | None = None
    ) -> contextlib.AbstractContextManager[WeightsOnDevice]:
        """The simple way: loads parameters and buffers, yields them by name, and offloads those that were away."""
        return weights_on_device(self, model, as_saved)

    # -- host memory and records ---------------------------------------------------------------------------------------

    def release_host_memory(self) -> int:
        """Returns the host image to the operating system. Returns its bytes.

        Raises:
            RuntimeError: something is offloaded.
        """
        self.drain()
        return self._transit.release()

    def metrics(self, *, reset: bool = True) -> dict[str, float]:
        """A flat dict about the transitions since the last call: seconds, bytes, GB/s, exposed seconds.

        Args:
            reset: whether to begin anew.
        """

        def read() -> dict[str, float]:
            found = summed(self.transitions, self.image.reserved_bytes, [phase.value for phase in Phase])
            if reset:
                self.transitions = [transition for transition in self.transitions if not transition.is_over]
            return found

        return self._transit.transact(read)

    def close(self) -> None:
        """Brings everything back to the device and returns the host memory. The manager can be used again.

        Errors of earlier transitions are not raised.
        """
        self._pending.clear()
        self._onload(GROUPS, True, "", reports=False)
        with contextlib.suppress(Exception):
            self._transit.report()
        self.release_host_memory()
        self._transit.close()
        give_up(self._inventory)

    def __enter__(self) -> PhaseManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _offload(self, groups: tuple[str, ...], wait: bool, phase: str) -> Handle:
        wanted = as_groups(groups)
        claim(self._inventory, self._transit.device_types)
        self._transit.report()
        self._guards.reader.warn_of_late_writes()
        _drop_abandoned_activations()
        transition = self._record(Transition("offload", wanted, phase))
        handle = self._transit.offload(transition, at_once=wait)
        return handle.wait() if wait else handle

    def _onload(self, groups: tuple[str, ...], wait: bool, phase: str, *, reports: bool = True) -> Handle:
        """``reports``: raise what went wrong before."""
        wanted = as_groups(groups)
        if reports:
            self._transit.report()
        self._guards.reader.warn_of_late_writes()
        transition = self._record(Transition("onload", wanted, phase))
        handle = self._transit.onload(transition, at_once=wait)
        return handle.wait() if wait else handle

    def _record(self, transition: Transition) -> Transition:
        self.transitions.append(transition)
        del self.transitions[:-_KEPT_TRANSITIONS]
        return transition

    def _reserve(self) -> None:
        """Begins to pin memory for known tensors; the optimizer's state is known after its first step."""
        self._reserve_known()
        for optimizer in self.optimizers:
            if hasattr(optimizer, "_optimizer_step_post_hooks") and not getattr(optimizer, "state", None):
                _after_a_step(optimizer, self._pending, weakref.WeakMethod(self._reserve_known))

    def _reserve_known(self) -> None:
        wanted = [group for group in GROUPS if group != GRADS or self._options.grads == "keep"]
        self._transit.reserve(wanted)


class _Block:
    """See ``PhaseManager.phase``."""

    def __init__(self, manager: PhaseManager, phase: Phase, then: Phase | None) -> None:
        self._manager = manager
        self.phase, self.then = phase, then

    def __enter__(self) -> PhaseManager:
        self._manager.enter(self.phase)
        self._manager._blocks.append(weakref.ref(self))
        return self._manager

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._manager._end_block(self, failed=kind is not None)


def _drop_abandoned_activations() -> None:
    """Memory that forwards without a backward have left on devices. There is an engine if something was compiled."""
    runtime = sys.modules.get("fxoffload.runtime.engine")
    for engine in runtime.engines() if runtime is not None else ():
        engine.drop_abandoned()


def _after_a_step(optimizer: Any, pending: list[Any], work: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Once, unless ``pending`` is cleared before. The hook stays: torch walks over the hooks while it runs them."""
    pending.append(work)

    def run(*_: Any) -> None:
        if work in pending:
            pending.remove(work)
            found = work()
            if found is not None:
                found()

    optimizer.register_step_post_hook(run)
