"""Weight sync: the named weights of a model on the device, with or without bringing the model there.

[Note: Whose a weight is]
Each tensor that ``stream_weights`` hands out has memory of its own and belongs to the caller. The caller may keep and
write it, also after the stream has ended. So ``dict(stream)`` is the whole model on the device. A loop that keeps
nothing has the last tensor until it gets the next one. That one, and every kept tensor, comes on top of the stream's
own memory. It is PyTorch's memory as any other: allocated on the stream that is current at ``next()``. To use it on
another stream, call ``record_stream``, or let the first stream wait before the last reference goes.

Rejected: views of a buffer, which later buckets overwrite. Nothing tells a view that is still needed from the variable
of a loop. It may be needed by ``dict(stream)``, a numpy array, or a handle that was sent to another process.

With ``full=True`` and shards, each bucket is one collective for each way in which tensors are cut, and for each mesh
dimension that cuts them. All ranks have to iterate alike, with the same arguments, and as far. The stream may end early
(``close()``, the end of a ``with`` block, or dropping it). It then finishes the collectives that were begun and frees
everything. A rank that ends alone leaves the others waiting in their next collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from fxoffload.errors import UnsupportedError
from fxoffload.gc_pause import gc_paused
from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.handle import Handle
from fxoffload.phases.moving.storages import Where, plain_tensors
from fxoffload.phases.phase import BUFFERS, PARAMS
from fxoffload.phases.stand_still import StandStill
from fxoffload.phases.weight_sync.bucket_stream import BucketLedger, BucketStream
from fxoffload.phases.weight_sync.making import Maker
from fxoffload.phases.weight_sync.plans import Planned, WeightPlans
from fxoffload.phases.weight_sync.recorded import Derivation
from fxoffload.phases.weight_sync.saved import Saved, Weight, memory_of, saved_models, saved_of
from fxoffload.phases.weight_sync.source import Stored, WeightSource
from fxoffload.phases.weight_sync.units import Modules, Unit, clean_modules, named_tensors
from fxoffload.runtime.copies.streams import CopyStreams
from fxoffload.runtime.switches import without_grad
from fxoffload.sizes import parse_bytes
from fxoffload.torch_private.tensor_subclasses import is_traceable_wrapper_subclass


class Synced(Stored, Protocol):
    """The part of a ``PhaseManager`` that is used here."""

    weight_plans: WeightPlans

    @property
    def models(self) -> Mapping[str, nn.Module]: ...
    def copies(self, device: torch.device) -> CopyStreams: ...
    def where(self, group: str) -> Where: ...
    def onload(self, *groups: str) -> Handle: ...
    def offload(self, *groups: str) -> Handle: ...


class WeightStream(Iterator[tuple[str, Tensor]]):
    """(name, tensor on the device), one after the other; see [Note: Whose a weight is].

    Attributes:
        plan: the buckets.
        units: the tensors that they are made of.
        nbytes: that this process copies from its host image or its device, if the stream is read to its end.
        delivered_bytes: those of them whose tensors were handed out so far.
        ledger: the device memory that the stream holds, without tensors that were handed out.
        still: the clock that is charged with the waits for it.
    """

    def __init__(
        self,
        planned: Planned,
        start: Callable[[BucketLedger], BucketStream],
        ended: Callable[[WeightStream], object],
        still: StandStill,
    ) -> None:
        self.units, self.plan, saved = planned
        with untouched():
            self.nbytes = sum(unit.own_bytes for unit in self.units)
        self.delivered_bytes = 0
        self.ledger = BucketLedger(self.plan.limit_bytes)
        self._ended, self.still = ended, still
        self._items = self._run(start, Maker(saved, self.ledger))

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._items)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the consumer's stream, or the calling thread, stood still for weights.

        On a GPU of the waits that are over by now: of all of them after ``torch.cuda.synchronize()``.
        """
        return self.still.seconds

    def close(self) -> None:
        """Ends the stream; its memory is free."""
        self._items.close()

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(
        self, start: Callable[[BucketLedger], BucketStream], maker: Maker
    ) -> Generator[tuple[str, Tensor], None, None]:
        with contextlib.ExitStack() as stack:
            stack.callback(self._ended, self)
            stack.callback(maker.close)
            buckets = stack.enter_context(contextlib.closing(start(self.ledger)))
            for index, bucket in enumerate(self.plan.buckets):
                with record_function("fxoffload::stream_weights"):
                    buckets.advance(index)
                for piece in bucket.finished:
                    unit = self.units[piece.index]
                    self.delivered_bytes += unit.own_bytes
                    yield from maker.take(unit, buckets.whole(piece))
                    buckets.let_go(piece)
                    maker.settle()


def stream_weights(
    manager: Synced,
    bucket_bytes: int | str = "512MiB",
    dtype: torch.dtype | None = None,
    full: bool = True,
    device: torch.device | str | None = None,
    names: Collection[str] | None = None,
    model: str | None = None,
    as_saved: bool | None = None,
    ended: Callable[[WeightStream], object] = lambda stream: None,
) -> WeightStream:
    """The weights of a model on the device, in buckets, read from wherever they are; the model stays there.

    Names are those of the checkpoint; see [Note: As saved] for models of transformers and [Note: Names] for others.
    Tensors are contiguous, each with memory of its own; see [Note: Whose a weight is]. The stream holds at most two
    buckets, the largest tensor in memory (for FSDP1 the largest flat parameter) and one tensor that is made of it.

    Args:
        bucket_bytes: half of the memory that the stream may hold on the device, without the largest tensor and the
            output made of it.
        dtype: to cast floating tensors to, on the device, and before they are gathered where that makes fewer bytes.
        full: whether to gather tensors that are sharded. Else each rank gets its own part: of a DTensor the local
            tensor, of tensors that FSDP1 flattened a vector of those elements that lie here.
        device: by default the one that the model lives on.
        names: only these, as they are handed out; the same on all ranks.
        model: which one, where the manager has several.
        as_saved: whether names and shapes are those that ``save_pretrained`` writes; else those in memory. By default
            with ``full=True`` alone: checkpoints know no parts.
        ended: called when a stream that was begun is over, or was given up.

    Raises:
        ValueError: an unknown name or model, a dtype that is not floating, a bucket too small for an element,
            ``as_saved=True`` with ``full=False``.
        UnsupportedError: a tensor that cannot be read in pieces; a model of which transformers cannot say how it would
            be saved.
    """
    if as_saved and not full:
        raise ValueError(
            "expected as_saved=True with full=True, found full=False: a checkpoint has whole tensors. Give "
            "as_saved=False for the parts of the tensors in memory"
        )
    limit = parse_bytes(bucket_bytes, "bucket_bytes")
    with untouched(), gc_paused():  # nothing is copied meanwhile
        of = _model(manager.models, model)
        planned = manager.weight_plans.plan(
            of, limit, full=full, dtype=dtype, names=names, as_saved=full if as_saved is None else as_saved
        )
        units, plan, _ = planned
        where = _device(units, device)
    still = StandStill(where)
    read = WeightSource(manager, still).copies

    def start(ledger: BucketLedger) -> BucketStream:
        return BucketStream(plan, units, read, manager.copies(where), where, ledger, still)

    return WeightStream(planned, start, ended, still)


class WeightsOnDevice(Mapping[str, Tensor]):
    """Weights by name, while they are on the device.

        A weight that is saved as it is in memory is the parameter or the buffer itself. Any other is made, with memory
        of its own, each time that it is asked for.

    Attributes:
        load_seconds: that bringing them took; exactly 0.0 if they were there.
        offload_seconds: that taking them back took, known after the block; exactly 0.0 if they stay.
    """

    load_seconds = 0.0
    offload_seconds = 0.0

    def __init__(self, tensors: dict[str, Tensor], saved: Saved | None) -> None:
        self._tensors = tensors
        self._derivations: Mapping[str, Derivation | None] = saved.derivations if saved else dict.fromkeys(tensors)

    def __getitem__(self, name: str) -> Tensor:
        derivation = self._derivations[name]
        if derivation is None:
            return self._tensors[name]
        inputs = {one: self._tensors[one] for one in derivation.inputs}
        first = inputs[derivation.inputs[0]]
        if derivation.is_input(tuple(first.shape)):
            return first
        return _make(derivation, inputs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._derivations)

    def __len__(self) -> int:
        return len(self._derivations)

    def clear(self) -> None:
        """Lets go of all of them."""
        self._tensors, self._derivations = {}, {}


@without_grad
def _make(derivation: Derivation, inputs: Mapping[str, Tensor]) -> Tensor:
    return derivation.make({one: tensor.detach().contiguous() for one, tensor in inputs.items()}, {})


@contextlib.contextmanager
def weights_on_device(
    manager: Synced, model: str | None = None, as_saved: bool | None = None
) -> Iterator[WeightsOnDevice]:
    """The simple way: brings parameters and buffers to the device, and takes back at the end those from the host.

    It waits for parameters and buffers that are arriving already; those stay on the device at the end.

    Sharded parameters stay DTensors. The manager's transitions record the moves; there are none where nothing moved.

    Args:
        model: which one, where the manager has several.
        as_saved: as of ``stream_weights``; by default True.

    Raises:
        ValueError: an unknown model.
        UnsupportedError: FSDP1, whose parameters are parts of a shard, or a shard that is saved in another shape: use
            ``stream_weights``. A model of which transformers cannot say how it would be saved.
    """
    with untouched():
        modules = clean_modules(_model(manager.models, model))
        tensors = named_tensors(modules)
        saved = _saved_from(modules, tensors) if as_saved is not False else None
    weights = WeightsOnDevice(tensors, saved)
    del tensors, modules
    places = {group: manager.where(group) for group in (PARAMS, BUFFERS)}
    missing = [group for group, where in places.items() if where is not Where.DEVICE]
    away = [group for group in missing if places[group] is not Where.ARRIVING]
    if missing:
        began = time.perf_counter()
        manager.onload(*missing).wait()
        weights.load_seconds = time.perf_counter() - began
    try:
        yield weights
    finally:
        weights.clear()
        if away:
            began = time.perf_counter()
            manager.offload(*away).wait()
            weights.offload_seconds = time.perf_counter() - began


def _saved_from(modules: Modules, tensors: Mapping[str, Tensor]) -> Saved | None:
    weights = {name: Weight(tuple(tensor.shape), tensor.dtype, _memory_of(tensor)) for name, tensor in tensors.items()}
    saved = saved_of(saved_models(modules), modules, weights)
    for name, derivation in saved.derivations.items() if saved is not None else ():
        inputs = [tensors[one] for one in derivation.inputs]
        if any(is_traceable_wrapper_subclass(one) for one in inputs) and not derivation.is_input(
            tuple(inputs[0].shape)
        ):
            raise UnsupportedError(
                f"expected plain tensors, found {derivation.inputs[0]!r} sharded or quantized, and {name!r} is made of "
                "it when the model is saved: use stream_weights(), or as_saved=False for names and shapes as in memory"
            )
    return saved


def _memory_of(tensor: Tensor) -> Hashable:
    inner = plain_tensors(tensor)
    return memory_of(tensor) if len(inner) == 1 and inner[0] is tensor else id(tensor)


def _model(models: Mapping[str, nn.Module], name: str | None) -> nn.Module:
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if name is None or name not in models:
        known = ", ".join(map(repr, models))
        found = "none" if name is None else repr(name)
        raise ValueError(f"expected model= as one of {known}, found {found}")
    return models[name]


def _device(units: list[Unit], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    found = {unit.local.device for unit in units}
    away_from_cpu = {one for one in found if one.type != "cpu"}
    if len(away_from_cpu) > 1:
        listed = ", ".join(sorted(map(str, away_from_cpu)))
        raise ValueError(f"the model's tensors are on {listed}: say on which device= they shall be handed out")
    return next(iter(away_from_cpu or found), torch.device("cpu"))
