"""Sharded models that are offloaded between steps: the remains on the device, and uses of them meanwhile."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from phases.delayed import DelayedCopies
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fxoffload.phases.guarding import sharded
from fxoffload.phases.guarding.overrides import is_ours
from fxoffload.phases.guarding.sentinel import untouched
from fxoffload.phases.manager import PhaseManager
from fxoffload.phases.moving.storages import plain_tensors

from .launch import Found
from .world import Rank, local

CPU = torch.device("cpu")
WIDTH = 8
Build = Callable[[Rank], nn.Module]


class Layer(nn.Module):
    """Sizes that two ranks cannot share evenly, one parameter for one rank only, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.linspace(1, 2, 3), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x))) * self.scale * self.frozen.sum()


class Model(nn.Module):
    """Two layers, and a head that belongs to none of them."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        if not frozen:
            self.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def fsdp2(rank: Rank, **options: Any) -> nn.Module:
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=rank.mesh(), **options)
    return fully_shard(model, mesh=rank.mesh(), **options)


def fsdp2_kept(rank: Rank) -> nn.Module:
    return fsdp2(rank, reshard_after_forward=False)


def fsdp2_mixed(rank: Rank) -> nn.Module:
    return fsdp2(rank, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def fsdp2_prefetching(rank: Rank) -> nn.Module:
    model: Any = fsdp2(rank)
    model.set_modules_to_forward_prefetch([model.layers[0]])
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    return model


def fsdp1(rank: Rank, use_orig_params: bool = True, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(
        Model(frozen=use_orig_params),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        device_id=CPU,
        use_orig_params=use_orig_params,
        **options,
    )


def fsdp1_flat(rank: Rank) -> nn.Module:
    return fsdp1(rank, use_orig_params=False)


def fsdp1_mixed(rank: Rank) -> nn.Module:
    return fsdp1(rank, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


def fsdp1_kept(rank: Rank) -> nn.Module:
    return fsdp1(rank, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, forward_prefetch=True)


def fsdp1_unsharded(rank: Rank) -> nn.Module:
    return fsdp1(rank, sharding_strategy=ShardingStrategy.NO_SHARD)


def ddp(rank: Rank) -> nn.Module:
    return DistributedDataParallel(Model())


def ddp_views(rank: Rank) -> nn.Module:
    return DistributedDataParallel(Model(), gradient_as_bucket_view=True)


def tensor_parallel(rank: Rank) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    return parallelize_module(model, rank.mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


BUILDS: dict[str, Build] = {
    f.__name__: f
    for f in (
        fsdp2, fsdp2_kept, fsdp2_mixed, fsdp2_prefetching, fsdp1, fsdp1_flat, fsdp1_mixed, fsdp1_kept, fsdp1_unsharded,
        ddp, ddp_views, tensor_parallel,
    )
}  # fmt: skip


class Training:
    """A model, its optimizer, and steps that write down their results."""

    def __init__(self, build: Build, rank: Rank) -> None:
        self.rank = rank
        self.model = build(rank)
        self.optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=0.01)
        self.number = 0

    def input(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.number)  # the same everywhere: tensor parallel ranks need that
        return torch.randn(4, WIDTH, generator=generator)

    def step(self) -> list[Tensor]:
        """The local bytes of all parameters after one more step, and the loss."""
        self.number += 1
        self.optimizer.zero_grad(set_to_none=self.number % 2 == 0)
        loss = local(self.model(self.input())).float().square().mean()
        loss.backward()
        self.optimizer.step()
        return [loss.detach().clone(), *(local(p.detach()).clone() for p in self.model.parameters())]

    def look(self) -> None:
        """A forward that computes no gradients."""
        with torch.no_grad():
            self.model(self.input())

    def manager(self, **options: Any) -> PhaseManager:
        return PhaseManager(self.model, self.optimizer, device_types=("cpu",), **options)

    def named(self) -> list[tuple[str, Tensor]]:
        """Every tensor that should leave and return."""
        found: list[tuple[str, Tensor]] = list(self.model.named_parameters())
        found += [(f"{n}.grad", p.grad) for n, p in self.model.named_parameters() if p.grad is not None]
        found += self.model.named_buffers()
        for i, entries in enumerate(self.optimizer.state.values()):
            found += [(f"state{i}.{k}", v) for k, v in entries.items() if isinstance(v, Tensor)]
        return found


def snapshot(training: Training) -> dict[str, Any]:
    """What must be the same afterwards: objects, layouts, who shares memory with whom, and every byte."""
    found: dict[str, Any] = {}
    storages: dict[int, list[str]] = {}
    for name, tensor in [*training.named(), *sharded.held_tensors(training.model)]:
        plain = plain_tensors(tensor)[0]
        spec = str(tensor._spec) if isinstance(tensor, DTensor) else ""
        found[name] = [
            id(tensor), type(tensor).__name__, list(tensor.shape), list(tensor.stride()), str(tensor.dtype),
            str(tensor.device), tensor.requires_grad, tensor.is_leaf, spec, id(plain) if plain is not tensor else 0,
            plain.storage_offset(), plain.untyped_storage().nbytes(), bytes(plain.untyped_storage()).hex(),
        ]  # fmt: skip
        storages.setdefault(plain.untyped_storage()._cdata, []).append(name)
    found["aliases"] = sorted(storages.values())
    return found


def bytes_left(tensors: list[Tensor]) -> int:
    """What the storages of the tensors hold."""
    with untouched():
        storages = [p.untyped_storage() for t in tensors for p in plain_tensors(t)]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = before.keys() | after.keys()
    return sorted(f"{n}: {before.get(n)} != {after.get(n)}" for n in names if before.get(n) != after.get(n))


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True)
    )


def noop(rank: Rank, build: Build) -> Found:
    """Five steps after offloading and onloading everything, in three ways, and the same steps without."""
    reference = Training(build, rank)
    for _ in range(2):
        reference.step()
    expected = [reference.step() for _ in range(5)]
    training = Training(build, rank)
    for _ in range(2):
        training.step()
    training.look()  # FSDP1's root, and FSDP2's without resharding, keep everything after it
    manager = training.manager()
    sharded.settle(training.model)
    before = snapshot(training)
    plain = [p for _, t in [*training.named(), *sharded.held_tensors(training.model)] for p in plain_tensors(t)]
    held = bytes_left(plain)
    hidden = [name for name, _ in hidden_tensors(training.model)]
    manager.offload()
    left = bytes_left(plain)
    manager.onload()
    changed = differing(before, snapshot(training))
    got = [training.step() for _ in range(2)]
    training.look()
    manager.enter("rollout")
    manager.enter("train")
    got += [training.step()]
    manager.close()
    # Copies that happen when they are waited for, and garbage until then.
    copies = DelayedCopies()
    late = training.manager(make_copies=lambda device: copies)
    got += [training.step()]
    late.offload()
    late.onload(wait=False)
    got += [training.step()]
    copies.run_all()
    late.close()
    return {
        "same": same(expected, got),
        "changed": changed,
        "held": held,
        "left": left,
        "hidden": hidden,
        "left_behind": [n for m in training.model.modules() for n, v in vars(m).items() if is_ours(v)],
        "num_tensors": len(before),
        "num_waits": copies.num_waits,
    }


# -- uses --------------------------------------------------------------------------------------------------------------


def tried(uses: dict[str, Callable[[], Any]]) -> Found:
    """What each use raised: [type, message]."""
    found: Found = {}
    for name, use in uses.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                use()
        except Exception as error:
            found[name] = [type(error).__name__, str(error)]
        else:
            found[name] = ["nothing", ""]
        print(name, found[name], flush=True)  # the log says which one ended the process
    return found


def uses(rank: Rank, build: Build, more: Callable[[Training], dict[str, Callable[[], Any]]], steps: int = 2) -> Found:
    """Uses while everything is on the host, then the next steps: a refused use may leave no trace."""
    reference = Training(build, rank)
    expected = [reference.step() for _ in range(steps + 3)][steps:]
    training = Training(build, rank)
    for _ in range(steps):
        training.step()
    model = training.model
    manager = training.manager()
    sharded.settle(model)
    before = snapshot(training)
    parameter = max(
        model.parameters(), key=lambda p: local(p.detach()).numel()
    )  # not one that this rank has nothing of
    manager.offload()
    found = tried(
        {
            "forward": lambda: model(training.input()),
            "no_grad forward": training.look,
            "plus": lambda: parameter + 1,
            "clone": lambda: parameter.clone(),
            "to": lambda: model.to(torch.bfloat16),
            "load, assigning": lambda: model.load_state_dict(reference.model.state_dict(), assign=True),
            "save": lambda: torch.save(parameter, io.BytesIO()),
            **more(training),
            **(_after_a_step(training) if steps else {}),
        }
    )
    manager.onload()
    changed = differing(before, snapshot(training))
    got = [training.step() for _ in range(3)]
    return {"tried": found, "same": same(expected, got), "changed": changed}


def _fsdp2_uses(training: Training) -> dict[str, Callable[[], Any]]:
    model: Any = training.model
    return {
        "unshard": model.unshard,
        "async unshard": lambda: model.layers[0].unshard(async_op=True),
        "layer": lambda: model.layers[0](training.input()),
        "full tensor": lambda: next(model.parameters()).full_tensor(),
    }


def _fsdp1_uses(training: Training) -> dict[str, Callable[[], Any]]:
    model: Any = training.model

    def summon() -> None:
        with FullyShardedDataParallel.summon_full_params(model):
            pass

    return {
        "summon": summon,
        "state dict": model.state_dict,
        "load": lambda: model.load_state_dict({}),
        "inner state dict": lambda: model.module.layers[0].state_dict(),
        "layer": lambda: model.module.layers[0](training.input()),
    }


def _after_a_step(training: Training) -> dict[str, Callable[[], Any]]:
    model: Any = training.model
    found: dict[str, Callable[[], Any]] = {
        "step": training.optimizer.step,
        "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    }
    if sharded.is_fsdp1(model):
        found["own clip"] = lambda: model.clip_grad_norm_(1.0)
        state_dict = FullyShardedDataParallel.optim_state_dict
        found["optimizer state dict"] = lambda: state_dict(model, training.optimizer)
    return found


def _nothing_more(training: Training) -> dict[str, Callable[[], Any]]:
    return {"deepcopy": lambda: copy.deepcopy(training.model)}


def _pinned(rank: Rank, build: Build) -> Found:
    """FSDP keeps these on the CPU itself."""
    model = build(rank)
    return {
        "kept": sum(len(sharded.kept_on_cpu(module)) for _, module in sharded.fsdp_modules(model)),
        "parameters": len(list(model.parameters())),
    }


def cpu_offloaded(rank: Rank) -> Found:
    policy = CPUOffloadPolicy(pin_memory=False)
    return {
        "fsdp2": _pinned(rank, lambda r: fsdp2(r, offload_policy=policy)),
        "fsdp1": _pinned(rank, lambda r: fsdp1(r, cpu_offload=CPUOffload(offload_params=True))),
        "none": _pinned(rank, fsdp2),
    }


def hidden_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What FSDP holds on storages that no parameter, gradient or buffer of the model has.

    A settled model has none, but for gradients that were not reduced yet (``set_requires_gradient_sync(False)``), and
    for a rank whose share of a flat parameter is padding only.
    """

    def storages(tensor: Tensor) -> set[int]:
        return {plain.untyped_storage()._cdata for plain in plain_tensors(tensor)}

    own = [*model.parameters(), *model.buffers()]
    own += [p.grad for p in own if p.grad is not None]
    known = set().union(*map(storages, own))
    return [(name, tensor) for name, tensor in sharded.held_tensors(model) if storages(tensor) - known]


def settled(rank: Rank) -> Found:
    """``settle``: in the middle of a forward and of a backward it refuses; started copies are waited for."""
    found: Found = {}
    for name, build in (("fsdp2", fsdp2), ("fsdp1", fsdp1)):
        training = Training(build, rank)
        training.step()
        training.look()
        model: Any = training.model
        said: list[str] = []
        found[f"{name} unsharded"] = len(hidden_tensors(model))

        def settle(*_: Any, model: Any = model, said: list[str] = said) -> None:
            try:
                sharded.settle(model)
            except RuntimeError as error:
                said.append(str(error))

        inner = (model if name == "fsdp2" else model.module).layers[0]
        forward = inner.register_forward_hook(lambda *a, s=settle: s())
        y = model(training.input())
        forward.remove()
        y.register_hook(settle)
        y.sum().backward()
        found[name] = said
        if name == "fsdp2":
            model.layers[0].unshard(async_op=True)
        training.look()
        settle()
        found[f"{name} ended"] = len(said)
        found[f"{name} hidden"] = [n for n, _ in hidden_tensors(model)]
    return found


def backward_between(rank: Rank) -> Found:
    """Offloaded between a forward and its backward: the backward raises, and the next step is as if it had not been."""
    found: Found = {}
    for name, build in (("fsdp2", fsdp2), ("fsdp2_kept", fsdp2_kept)):
        reference = Training(build, rank)
        reference.step()
        expected = [reference.step() for _ in range(3)]
        training = Training(build, rank)
        training.step()
        manager = training.manager()
        training.optimizer.zero_grad()
        loss = training.model(training.input()).sum()
        manager.offload("params")
        raised = tried({"backward": loss.backward})
        manager.onload()
        found[name] = {**raised, "same": same(expected, [training.step() for _ in range(3)])}
    return found


def optimizer_alone(rank: Rank) -> Found:
    """Its state leaves after a forward without gradients, which leaves FSDP2's root gathered: the shards stay."""
    found: Found = {}
    for name, build in (("fsdp2", fsdp2), ("fsdp2_kept", fsdp2_kept), ("fsdp1", fsdp1)):
        reference = Training(build, rank)
        expected = [reference.step() for _ in range(4)]
        training = Training(build, rank)
        steps = [training.step() for _ in range(2)]
        manager = training.manager()
        training.look()
        manager.offload("optimizer")
        groups = sorted({held.group for held in manager._transit.ledger.held()})
        names = [held.name for held in manager._transit.ledger.held() if held.name.startswith("group")]
        raised = tried({"forward": training.look, "step": training.optimizer.step})
        manager.onload()
        found[name] = {
            **raised,
            "groups": groups,
            "parameters": names,
            "same": same(expected, steps + [training.step() for _ in range(2)]),
        }
    return found


def extra_module(rank: Rank) -> Found:
    """A sharded copy of the model as ``extra``: its use raises while it is away, and is fenced while it arrives."""
    found: Found = {}
    for name, build in (("fsdp2", fsdp2), ("fsdp1", fsdp1)):
        training, average = Training(build, rank), build(rank)
        training.step()
        x = training.input()
        with torch.no_grad():
            expected = average(x).clone()
        copies = DelayedCopies()
        manager = PhaseManager(
            training.model,
            training.optimizer,
            extra={"ema": average},
            device_types=("cpu",),
            make_copies=lambda _, copies=copies: copies,
        )
        sharded_bytes = sum(local(p).untyped_storage().nbytes() for p in average.parameters())
        with torch.no_grad():
            average(x)
        manager.offload()
        with untouched():
            hidden = [n for n, _ in hidden_tensors(average)]
        found[name] = {
            "bytes": sharded_bytes,
            "hidden": hidden,
            **tried({"forward": lambda average=average, x=x: torch.no_grad()(average)(x), "to": average.double}),
        }
        manager.onload(wait=False)
        with torch.no_grad():
            found[name]["same"] = torch.equal(average(x), expected)
        copies.run_all()
        manager.onload()
        with torch.no_grad():
            found[name]["same afterwards"] = torch.equal(average(x), expected)
        manager.close()
    return found


# -- checkpoints -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder(rank: Rank) -> Iterator[Path]:
    """One that all ranks see."""
    names: list[Any] = [tempfile.mkdtemp() if rank.rank == 0 else None]
    dist.broadcast_object_list(names)
    yield Path(names[0])
    dist.barrier()


def checkpoint(rank: Rank, build: Build) -> Found:
    """Saved from the host, loaded into a fresh model; compared with a state dict from the device."""
    training = Training(build, rank)
    for _ in range(2):
        training.step()
    expected = [local(t.detach()).clone() for _, t in training.named() if not _.endswith(".grad")]
    manager = training.manager()
    at_home = training.model.state_dict()
    kinds = {k: (v.shape, v.dtype, str(getattr(v, "placements", ""))) for k, v in at_home.items()}
    manager.offload()
    model_state, optimizer_state = (
        get_model_state_dict(training.model),
        get_optimizer_state_dict(training.model, training.optimizer),
    )
    away = {k: (v.shape, v.dtype, str(getattr(v, "placements", ""))) for k, v in training.model.state_dict().items()}
    fresh = Training(build, rank)
    fresh.step()
    with folder(rank) as path:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
        loaded = {
            "model": get_model_state_dict(fresh.model),
            "optimizer": get_optimizer_state_dict(fresh.model, fresh.optimizer),
        }
        dcp.load(loaded, checkpoint_id=path)
    fresh.model.load_state_dict(loaded["model"], strict=False)
    dcp.state_dict.set_state_dict(
        fresh.model, fresh.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    got = [local(t.detach()) for _, t in fresh.named() if not _.endswith(".grad")]
    stream = io.BytesIO()
    torch.save(training.model.state_dict(), stream)
    stream.seek(0)
    reread = torch.load(stream, weights_only=False)
    manager.onload(wait=False)
    arriving = training.model.state_dict()
    where = manager.where("params").value
    manager.close()
    return {
        "kinds": kinds == away,
        "equal": [torch.equal(a, b) for a, b in zip(expected, got, strict=True)],
        "reread": [torch.equal(local(reread[k]), local(v)) and type(v) is type(reread[k]) for k, v in arriving.items()],
        "where": where,
    }


def __getattr__(name: str) -> Any:
    """The cases: noop_BUILD, uses_BUILD, fresh_BUILD (before the first step) and checkpoint_BUILD."""
    kind, _, build = name.partition("_")
    if build not in BUILDS:
        raise AttributeError(name)
    more = _fsdp2_uses if build.startswith("fsdp2") else _fsdp1_uses if build.startswith("fsdp1") else _nothing_more
    cases: dict[str, Callable[[Rank], Found]] = {
        "noop": lambda rank: noop(rank, BUILDS[build]),
        "uses": lambda rank: uses(rank, BUILDS[build], more),
        "fresh": lambda rank: uses(rank, BUILDS[build], more, steps=0),
        "checkpoint": lambda rank: checkpoint(rank, BUILDS[build]),
    }
    return cases[kind]
