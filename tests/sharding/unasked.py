"""Readers of a model's memory that do not ask its modules: an unknown DDP, and FSDP's streams."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from phases.delayed import DelayedCopies
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fxoffload.phases import OffloadedError, PhaseManager
from fxoffload.phases.guarding import sharded

from .launch import Found
from .models import WIDTH
from .world import Rank, graphs_compiled


class Scaled(nn.Module):
    """A layer whose output a buffer scales."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.arange(float(WIDTH)) + 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class Around(nn.Module):
    """A model inside something else, which DDP is put around."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def unwrapped_ddp(rank: Rank) -> Found:
    """DDP around a model that a manager was given without it: before the manager was made, after, and further out."""
    return {
        "before": _trained(rank, wrapped_first=True, around=False),
        "after": _trained(rank, wrapped_first=False, around=False),
        "around": _trained(rank, wrapped_first=False, around=True),
    }


def _trained(rank: Rank, *, wrapped_first: bool, around: bool) -> Found:
    model, reference = Scaled(), Scaled()
    copies = DelayedCopies()
    wrapped: Any = DistributedDataParallel(model) if wrapped_first else None
    manager = PhaseManager(model, device_types=("cpu",), make_copies=lambda device: copies)
    own_forward = DistributedDataParallel.forward
    manager.offload()
    _bring_back(manager, copies)
    wrapped = wrapped or DistributedDataParallel(Around(model) if around else model)
    losses: list[list[float]] = [[], []]
    for i in range(3):
        manager.offload()
        manager.onload("params", "buffers", wait=False)
        for call, found in zip((wrapped, reference), losses, strict=True):
            loss = call(rank.input(i, length=2, everywhere=True)).square().mean()
            loss.backward()
            found.append(loss.item())
        _bring_back(manager, copies)
        for one in (model, reference):
            with torch.no_grad():
                for p in one.parameters():
                    assert p.grad is not None
                    p -= 0.01 * p.grad
                    p.grad = None
    manager.offload()
    try:
        wrapped(rank.input(0, length=2))
        said = ""
    except OffloadedError as error:
        said = str(error)
    _bring_back(manager, copies)
    manager.close()
    pairs = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    return {
        "losses": losses,
        "same": all(torch.equal(a, b) for a, b in pairs),
        "said": said,
        "left": DistributedDataParallel.forward is not own_forward,
    }


def _bring_back(manager: PhaseManager, copies: DelayedCopies) -> None:
    handle = manager.onload(wait=False)
    while not handle.done():
        copies.run_all()
        time.sleep(0.001)
    handle.wait()


def ddp_around_others(rank: Rank) -> Found:
    """DDP around a model that no manager has: it runs as usual."""
    model, other = Scaled(), DistributedDataParallel(Scaled())
    manager = PhaseManager(model, device_types=("cpu",))
    manager.offload()
    other(rank.input(0, length=2)).sum().backward()
    manager.onload()
    manager.offload()
    del model, manager  # while it was away
    found = other(rank.input(0, length=2))
    return {"as ever": torch.equal(found, other.module(rank.input(0, length=2)))}


def compiled_ddp(rank: Rank) -> Found:
    """Graphs that each cycle compiles, around and in DDP that the manager does not know."""
    found = {}
    for name in ("around", "inside", "function"):
        torch.compiler.reset()
        model = Scaled()
        inner = torch.compile(model, backend="eager") if name == "inside" else model
        wrapped: Any = DistributedDataParallel(inner)
        call = {
            "around": torch.compile(wrapped, backend="eager"),
            "inside": wrapped,
            "function": torch.compile(lambda x, wrapped=wrapped: wrapped(x) * 2, backend="eager"),
        }[name]
        # Something else stays away meanwhile, so that the forward of DDP is watched.
        manager = PhaseManager(model, extra={"copy": torch.ones(9)}, device_types=("cpu",))
        counts = []
        for _ in range(4):
            before = graphs_compiled()
            manager.offload()
            manager.onload("params", "buffers", wait=False)
            call(rank.input(0, length=2)).sum().backward()
            model.zero_grad()
            manager.onload()
            counts.append(graphs_compiled() - before)
        found[name] = counts
        manager.close()
    return found


# -- FSDP's streams ----------------------------------------------------------------------------------------------------


class Stream:
    """Stands for one that a root has made: on a CPU there are none."""

    device = "cuda:0"

    def __init__(self, context: object, waits: list[tuple[object, object]]) -> None:
        self.stream_id = id(context)
        self._context, self._waits = context, waits

    def wait_event(self, event: object) -> None:
        self._waits.append((self._context, event))


@contextlib.contextmanager
def streams() -> Iterator[list[tuple[object, object]]]:
    """Roots have streams from their first forward on. What waits for which event in the block."""
    waits: list[tuple[object, object]] = []

    def of(module: Any) -> list[Stream]:
        contexts = [group.comm_ctx for group in sharded.fsdp2_groups(module)]
        return [Stream(context, waits) for context in contexts if hasattr(context, "all_gather_stream")]

    with mock.patch.object(sharded, "fsdp2_streams", of):
        yield waits


def _root(rank: Rank) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=rank.mesh())
    return fully_shard(model, mesh=rank.mesh())


def _context(model: Any) -> object:
    return sharded.fsdp2_groups(model[0])[0].comm_ctx


def two_roots(rank: Rank) -> Found:
    """None has run when they are looked for first; then one after the other."""
    policy, ref = _root(rank), _root(rank)
    x = rank.input(0, length=2)
    with streams() as waits:
        gathering = sharded.GatherStreams([policy, ref])
        counts = []
        for i, run in enumerate((None, policy, ref, None)):
            if run is not None:
                run(x)
            gathering.wait(i)
            counts.append(sum(event == i for _, event in waits))
        last = {id(context) for context, event in waits if event == 3}
    dist.barrier()
    return {"counts": counts, "both": last == {id(_context(policy)), id(_context(ref))}}


def sharded_later(rank: Rank) -> Found:
    """FSDP is applied after a manager was made."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    with streams() as waits:
        gathering = sharded.GatherStreams([model])
        gathering.wait(0)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=rank.mesh())
        model(rank.input(0, length=2))
        gathering.wait(1)
    return {"events": [event for _, event in waits]}
