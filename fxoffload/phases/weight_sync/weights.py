"""Weight sync: the named weights of a model on the device, with or without bringing the model there.

[Note: How long a weight is valid]
``stream_weights`` hands out views of a buffer: they hold their values until the next bucket begins, which is when a
later ``next()`` needs one. Work that was queued on the stream that is current at ``next()`` is waited for before the
buffer is written again; whoever reads on another stream lets the current stream wait for it first. Keep a copy of what
must live longer (``.clone()``).

With ``full=True`` and shards each bucket is one collective for each way in which tensors are cut (and for each mesh
dimension that cuts them): all ranks iterate alike, with the same arguments, and as far. Ending early (``close()``, the
end of a ``with`` block, or dropping the stream) finishes the collectives that were begun and frees everything; a rank
that ends alone leaves the others waiting in their next collective.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from fxoffload.gc_pause import gc_paused
from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.handle import Handle
from fxoffload.phases.moving.storages import Where
from fxoffload.phases.phase import BUFFERS, PARAMS
from fxoffload.phases.weight_sync.bucket_stream import BucketStream, Ledger
from fxoffload.phases.weight_sync.buckets import Plan
from fxoffload.phases.weight_sync.plans import WeightPlans
from fxoffload.phases.weight_sync.source import Stored, WeightSource
from fxoffload.phases.weight_sync.stand_still import StandStill
from fxoffload.phases.weight_sync.units import Unit, named_tensors
from fxoffload.runtime.copies.streams import CopyStreams
from fxoffload.sizes import parse_bytes


class Streamed(Stored, Protocol):
    """What ``stream_weights`` asks of a ``PhaseManager``."""

    weight_plans: WeightPlans

    @property
    def models(self) -> Mapping[str, nn.Module]: ...
    def copies(self, device: torch.device) -> CopyStreams: ...


class Moved(Protocol):
    """What ``weights_on_device`` asks of a ``PhaseManager``."""

    @property
    def models(self) -> Mapping[str, nn.Module]: ...
    def where(self, group: str) -> Where: ...
    def onload(self, *groups: str) -> Handle: ...
    def offload(self, *groups: str) -> Handle: ...


class WeightStream(Iterator[tuple[str, Tensor]]):
    """(name, tensor on the device), one after the other; see [Note: How long a weight is valid].

    Attributes:
        plan: the buckets.
        units: what they are made of.
        nbytes: that this process copies from its host image or its device, if the stream is read to its end.
        delivered_bytes: those of them whose tensors were handed out so far.
        ledger: the device memory of the stream.
        still: what is charged with the waits for it.
    """

    def __init__(
        self,
        units: list[Unit],
        plan: Plan,
        start: Callable[[Ledger], BucketStream],
        ended: Callable[[WeightStream], object],
        still: StandStill,
    ) -> None:
        self.plan = plan
        self.units = units
        with untouched():
            self.nbytes = sum(unit.own_bytes for unit in units)
        self.delivered_bytes = 0
        self.ledger = Ledger(plan.limit_bytes)
        self._ended, self.still = ended, still
        self._items = self._run(units, start)

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._items)

    @property
    def exposed_seconds(self) -> float:
        """That the consumer's stream, or the calling thread, stood still for weights.

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
        self, units: list[Unit], start: Callable[[Ledger], BucketStream]
    ) -> Generator[tuple[str, Tensor], None, None]:
        with contextlib.ExitStack() as stack:
            stack.callback(self._ended, self)
            buckets = stack.enter_context(contextlib.closing(start(self.ledger)))
            for index, bucket in enumerate(self.plan.buckets):
                with record_function("fxoffload::stream_weights"):
                    buckets.advance(index)
                for piece in bucket.finished:
                    self.delivered_bytes += units[piece.index].own_bytes
                    flat = buckets.whole(piece).view(-1)
                    for named in units[piece.index].named:
                        yield named.name, flat[named.start :][: _numel(named.shape)].view(named.shape)
                    del flat


def stream_weights(
    manager: Streamed,
    bucket_bytes: int | str = "512MiB",
    dtype: torch.dtype | None = None,
    full: bool = True,
    device: torch.device | str | None = None,
    names: Collection[str] | None = None,
    model: str | None = None,
    ended: Callable[[WeightStream], object] = lambda stream: None,
) -> WeightStream:
    """The weights of a model on the device, in buckets, read from wherever they are; the model stays there.

    Names are those of the state dict without wrappers; see [Note: Names]. Tensors are contiguous. See [Note: How long a
    weight is valid] for what the consumer may do with them. At most two buckets and the largest tensor (for FSDP1 the
    largest flat parameter) are on the device.

    Args:
        bucket_bytes: half of what the stream may hold on the device beside a tensor larger than a bucket.
        dtype: to cast floating tensors to, on the device, and before they are gathered where that makes fewer bytes.
        full: whether to gather tensors that are sharded. Else each rank gets its own part: of a DTensor the local
            tensor, of what FSDP1 flattened a vector of those elements that lie here.
        device: by default the one that the model lives on.
        names: only these; the same on all ranks.
        model: which one, where the manager has several.
        ended: called when a stream that was begun is over, or was given up.

    Raises:
        ValueError: an unknown name or model, a dtype that is not floating, a bucket too small for an element.
        UnsupportedError: a tensor that cannot be read in pieces.
    """
    limit = parse_bytes(bucket_bytes, "bucket_bytes")
    with untouched(), gc_paused():  # nothing is copied meanwhile
        of = _model(manager.models, model)
        units, plan = manager.weight_plans.plan(of, limit, full=full, dtype=dtype, names=names)
        where = _device(units, device)
    still = StandStill(where)
    read = WeightSource(manager, still).copies

    def start(ledger: Ledger) -> BucketStream:
        return BucketStream(plan, units, read, manager.copies(where), where, ledger, still)

    return WeightStream(units, plan, start, ended, still)


class WeightsOnDevice(dict[str, Tensor]):
    """Weights by name.

    Attributes:
        load_seconds: that bringing them took; exactly 0.0 if they were there.
        offload_seconds: that taking them back took, known after the block; exactly 0.0 if they stay.
    """

    load_seconds = 0.0
    offload_seconds = 0.0


@contextlib.contextmanager
def weights_on_device(manager: Moved, model: str | None = None) -> Iterator[WeightsOnDevice]:
    """The simple way: brings parameters and buffers to the device, and takes back at the end what was on the host.

    What was arriving is waited for, and stays: somebody has called for it.

    Sharded parameters stay DTensors. The manager's transitions record what was moved; there are none where nothing was.

    Raises:
        ValueError: an unknown model.
        UnsupportedError: FSDP1, whose parameters are parts of a shard: use ``stream_weights``.
    """
    weights = WeightsOnDevice(named_tensors(_model(manager.models, model)))
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


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
