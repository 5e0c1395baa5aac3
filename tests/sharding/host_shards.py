"""State dicts of sharded models that are away: every way to gather a shard, and every way to load in place."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxoffload.phases.guarding.host_dtensor import HostDTensor

from .away import CPU, Build, Model, Training, folder, fsdp2, tensor_parallel, tried
from .launch import Found
from .world import Rank, local


def two_dimensions(rank: Rank) -> nn.Module:
    """Replicated over one dimension, which has one rank, and sharded over the other."""
    mesh = rank.mesh(1, rank.world, names=("replicate", "shard"))
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(rank: Rank) -> nn.Module:
    """The other way round: every rank has everything."""
    mesh = rank.mesh(rank.world, 1, names=("replicate", "shard"))
    return fully_shard(Model(), mesh=mesh)


# Uneven, too small for all ranks, and frozen; of the tensor parallel model cut along either dimension, and whole.
SHARDS = ("layers.0.up.weight", "layers.1.scale", "layers.0.frozen", "0.weight", "2.weight", "2.bias")
BUILDS = (fsdp2, two_dimensions, replicated, tensor_parallel)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def replicate(shard: Any) -> Tensor:
    return shard.redistribute(placements=[Replicate()] * shard.device_mesh.ndim).to_local()


def reread(shard: Any) -> Any:
    stream = io.BytesIO()
    torch.save(shard, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


# Its argument, and the result that is compared with the whole tensor.
WAYS: dict[str, Callable[[Any], Any]] = {
    "to the device": lambda s: s.to(CPU, non_blocking=True),
    "to the device by name": lambda s: s.to("cpu"),
    "to like another": lambda s: s.to(torch.empty(0)),
    "to the device and a dtype": lambda s: s.to(CPU, torch.float64).to(torch.float32),
    "to a dtype": lambda s: s.to(torch.float64).to(torch.float32),
    "double": lambda s: s.double().float(),
    "copy": lambda s: s.to(CPU, copy=True),
    "cpu": lambda s: s.cpu(),
    "itself": lambda s: s,
    "redistribute": replicate,
    "clone": lambda s: s.clone(),
    "detach": lambda s: s.detach(),
    "contiguous": lambda s: s.contiguous(),
    "arithmetic": lambda s: (s * 2 + s * 2) / 4,
    "foreach": lambda s: torch._foreach_mul([s, s], 1.0)[1],
    "into another": lambda s: torch.empty_like(s).copy_(s),
    "deepcopy": copy.deepcopy,
    "copy.copy": copy.copy,
    "saved": reread,
}
# Not one by one.
OF_ALL: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "shards": get_model_state_dict,
    "full": lambda m: get_model_state_dict(m, options=StateDictOptions(full_state_dict=True)),
    "on the cpu": lambda m: get_model_state_dict(m, options=StateDictOptions(cpu_offload=True)),
    # Rank 0 alone has it.
    "full on the cpu": lambda m: get_model_state_dict(
        m, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    ),
}


def gathered(rank: Rank) -> Found:
    """As verl's weight sync and others gather shards. Also kept: a value of then, after the model has moved on."""
    found: Found = {}
    for build in BUILDS:
        training = Training(build, rank)
        training.step()
        expected = {name: whole(tensor).clone() for name, tensor in training.model.state_dict().items()}
        manager = training.manager()
        manager.offload()
        state: dict[str, Any] = training.model.state_dict()
        shards = {name: tensor for name, tensor in state.items() if name in SHARDS}
        wrong = [
            f"{way} of {name}"
            for name, shard in shards.items()
            for way, use in WAYS.items()
            if not torch.equal(whole(use(shard)), expected[name])
        ]
        for way, take in OF_ALL.items():
            taken = {} if way == "full on the cpu" and rank.rank else expected
            got = take(training.model)
            wrong += [f"{way} of {n}" for n, value in taken.items() if not torch.equal(whole(got[n]), value)]
        kept = {name: shard.to(CPU) for name, shard in shards.items()}
        sums = [(shard.sum().full_tensor() - expected[name].sum()).abs().item() for name, shard in shards.items()]
        found[build.__name__] = {
            "num_shards": len(shards),
            "wrong": wrong,
            "sums": max(sums),
            # A plain DTensor comes from the device, and nothing is copied before that.
            "plain": all(type(shard.to(CPU)) is type(shard.to("cpu")) is DTensor for shard in shards.values()),
            "host": all(type(s.clone()) is type(s * 2) is type(s.float()) is HostDTensor for s in shards.values()),
            "in the image": all(
                local(shard).data_ptr() == local(training.model.state_dict()[name]).data_ptr()
                for name, shard in shards.items()
            ),
        }
        del shards, state
        manager.onload()
        training.step()
        manager.offload()
        found[build.__name__]["kept"] = all(torch.equal(whole(t), expected[name]) for name, t in kept.items())
        manager.close()
    return found


def without_a_backend_for_the_cpu(rank: Rank) -> Found:
    """As with NCCL alone."""
    group = dist.new_group(backend="cuda:gloo")
    mesh = DeviceMesh.from_group(group, "cpu", mesh=list(range(rank.world)))
    shard = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    on_host = HostDTensor.over(shard, torch.ones(2, 3), torch.device("cuda"))
    return {
        "tried": tried({"row": lambda: on_host[0], "sort": lambda: on_host.sort(0), "local": lambda: on_host * 2}),
        "kind": type(on_host.t()).__name__,
    }


def _write(state: dict[str, Any], source: dict[str, Any]) -> None:
    for name, tensor in state.items():
        tensor.copy_(source[name])


def _write_bytes(state: dict[str, Any], source: dict[str, Any]) -> None:
    """No operator sees it."""
    for name, tensor in state.items():
        local(tensor).numpy()[...] = local(source[name].detach()).numpy()


def loaded(rank: Rank) -> Found:
    """Values loaded while everything is away are there afterwards, on every rank."""
    found: Found = {}
    for build in (fsdp2, tensor_parallel):
        found |= {f"{way} of {build.__name__}": wrong for way, wrong in _loaded(rank, build).items()}
    return found


def _loaded(rank: Rank, build: Build) -> Found:
    other = Training(build, rank)
    for _ in range(2):
        other.step()
    source = get_model_state_dict(other.model)
    expected = {name: whole(tensor).clone() for name, tensor in source.items()}
    full = StateDictOptions(full_state_dict=True)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    found: Found = {}

    def after(load: Callable[[Training], Any]) -> Training:
        training = Training(build, rank)
        training.step()
        manager = training.manager()
        manager.offload()
        load(training)
        manager.close()
        return training

    with folder(rank) as path:
        state = {"model": source, "optimizer": get_optimizer_state_dict(other.model, other.optimizer)}
        dcp.save(state, checkpoint_id=path)

        def read(t: Training) -> None:
            optimizer = get_optimizer_state_dict(t.model, t.optimizer)
            dcp.load({"model": get_model_state_dict(t.model), "optimizer": optimizer}, checkpoint_id=path)

        ways: dict[str, Callable[[Training], Any]] = {
            "dcp.load": read,
            "dcp.load of the module": lambda t: dcp.load({"model": t.model}, checkpoint_id=path),
            "copy_": lambda t: _write(t.model.state_dict(), source),
            "numpy": lambda t: _write_bytes(t.model.state_dict(), source),
            "load_state_dict": lambda t: t.model.load_state_dict(source),
            "set_model_state_dict": lambda t: set_model_state_dict(t.model, source),
            "full": lambda t: set_model_state_dict(t.model, {**expected}, options=full),
        }
        for way, load in ways.items():
            training = after(load)
            got = {name: whole(tensor) for name, tensor in training.model.state_dict().items()}
            found[way] = [name for name, value in expected.items() if not torch.equal(got[name], value)]
            if way == "dcp.load":
                found["optimizer"] = _differing(training.optimizer, other.optimizer)
    # It writes to the parameters themselves. All ranks raise, also those with nothing of the first parameter.
    refused: Found = {}
    after(
        lambda t: refused.update(
            tried({"load": lambda: set_model_state_dict(t.model, {**expected}, options=from_rank_0)})
        )
    )
    return {**found, "from rank 0": refused["load"][0]}


def _differing(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> list[str]:
    state, others = (optimizer.state_dict()["state"] for optimizer in (one, other))
    return [
        f"{key} of {index}"
        for index, entry in others.items()
        for key, value in entry.items()
        if not torch.equal(local(state[index][key]), local(value))
    ]
